"""Every rule of the checks of a run on the fsdp2 backend, by the text of its message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tangram.config.fsdp2 import Fsdp2Parallel
from tangram.config.fsdp2_sizes import expert_sizes, least_processes, sizes
from tangram.config.preflight import Report, check_run
from tangram.config.yaml_config import read_run
from tangram.data.epochs import steps_of_epochs
from tangram.errors import ConfigError, DataError
from tests.config.fsdp2_kit import write_hf, write_run


def report(path: Path, *overrides: str, world: int | None = 4) -> Report:
    return check_run(read_run(path, overrides), world)


def fault(path: Path, *overrides: str, world: int | None = 4) -> str:
    """The message of the one rule that does not hold."""
    errors = report(path, *overrides, world=world).errors
    assert len(errors) == 1, errors
    return str(errors[0])


def detail(path: Path, rule: str, *overrides: str, world: int | None = 4) -> str:
    found = report(path, *overrides, world=world)
    assert not found.errors
    return next(finding.detail for finding in found.findings if finding.rule == rule)


def test_a_good_run_passes_every_rule(tmp_path: Path) -> None:
    found = report(write_run(tmp_path), "training.gradient_accumulation_steps=2", "parallel.ulysses_parallel_size=2", "training.save=out")
    assert not found.errors
    details = {finding.rule: finding.detail for finding in found.findings}
    assert details["processes"] == "4 processes = 1 copies x 4 shards, data-parallel size 2"
    assert details["attention heads"] == "4 heads on 2 ranks"
    assert details["global batch"] == "4 samples = 1 x DP 2 x 2 micro-batches"
    assert details["schedule"] == "10 steps, constant, lr 0.001"
    assert detail(tmp_path / "run.yaml", "schedule", "training.lr_decay_style=cosine") == "10 steps, cosine, lr 0.001 to 0"
    assert found.split == ["weights: 1 copy, each shared by 4 ranks", "samples: 2 ranks share the tokens of each"]
    assert found.notes == []


@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        ({}, 8, (1, 8, 1)),
        ({}, 1, (1, 1, 1)),
        ({"fully_shard_parallel_size": 4}, 8, (2, 4, 1)),
        ({"fully_shard_parallel_size": 4, "ulysses_parallel_size": 2}, 8, (2, 2, 2)),
        ({"fully_shard_parallel_size": 1}, 4, (4, 1, 1)),
        ({"ulysses_parallel_size": 2, "data_parallel_size": 2}, 4, (1, 2, 2)),
    ],
)
def test_sizes_of_the_axes(parallel: dict[str, Any], world: int, expected: tuple[int, int, int]) -> None:
    assert sizes(Fsdp2Parallel(**parallel), world) == expected


@pytest.mark.parametrize(
    ("parallel", "needed"),
    [
        ({}, 1),
        ({"fully_shard_parallel_size": 4}, 4),
        ({"ulysses_parallel_size": 2}, 2),
        ({"fully_shard_parallel_size": 4, "expert_parallel_size": 8}, 8),
        ({"expert_parallel_size": 2, "expert_fully_shard_parallel_size": 3}, 6),
        ({"data_parallel_size": 3, "ulysses_parallel_size": 2}, 6),
    ],
)
def test_processes_that_are_needed(parallel: dict[str, Any], needed: int) -> None:
    assert least_processes(Fsdp2Parallel(**parallel)) == needed


def test_experts_are_dealt_out() -> None:
    assert expert_sizes(Fsdp2Parallel(expert_parallel_size=2), 8) == (1, 4, 2)
    assert expert_sizes(Fsdp2Parallel(expert_parallel_size=2, expert_fully_shard_parallel_size=2), 8) == (2, 2, 2)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.fully_shard_parallel_size=3"], "parallel.fully_shard_parallel_size 3 must divide the 4 processes"),
        (["parallel.data_parallel_size=3"], "parallel.data_parallel_size 3, but 4 processes / ulysses_parallel_size 1 = 4"),
        (["parallel.fully_shard_parallel_size=2", "parallel.ulysses_parallel_size=4"], "must divide the 4 processes and be a multiple of"),
        (["training.seq_length=40000"], "training.seq_length 40000 (or cutoff_len) is longer than max_position_embeddings 32768"),
        (["features.enable_chunk_loss=true", "features.enable_dynamic_chunk_loss=true"], "are two ways to cut the same loss; switch one off"),
        (["features.enable_chunk_loss=true", "features.loss_cfg.loss_type=raw"], "features.enable_chunk_loss is on, but loss_cfg.loss_type raw is"),
        (["features.loss_cfg.router_aux_loss_coef=0.1"], "router_aux_loss_coef 0.1: family qwen2_5_vl has no experts; remove it"),
        (["features.enable_chunk_mbs=true", "features.chunkmbs_plan.apply_modules=a"], "positions of family qwen2_5_vl ([3, batch, length]) have"),
        (["features.recompute_plan.apply_modules=a"], "features.recompute_plan.apply_modules names modules, but features.recompute is off"),
        (["features.recompute=true"], "features.recompute is on, but features.recompute_plan.apply_modules names no module"),
        (["training.lr_warmup_ratio=0.9", "training.lr_decay_ratio=0.5"], "lr_warmup_ratio 0.9 of 10 steps is 9, but the rate has reached its end"),
        (["training.lr_warmup_ratio=0.01", "training.lr_start=1e-4"], "training.lr_start 0.0001 does nothing without a warm-up"),
        (["training.val_interval=5"], "training.val_interval 5 needs basic_parameters.val_dataset or val_rate"),
        (["data.dataset_param.basic_parameters.val_rate=0.5"], "the samples of basic_parameters.val_rate 0.5 would never be read; set training.val"),
        (["training.train_iters=null", "training.train_epochs=2", "data.dataset_param.basic_parameters.streaming=true"], "streaming does not look"),
        (["training.train_iters=null", "training.train_epochs=2", "data.dataset_param.basic_parameters.packing=true"], "give train_iters"),
        (["training.load=hf", "training.load_format=dcp"], "a Hugging Face directory, but load_format dcp asks for a training checkpoint"),
        (["training.save=samples.json"], "samples.json is a file; give a folder"),
        (["data.dataset_param.basic_parameters.dataset=gone.json"], "gone.json"),
        (["data.dataset_param.basic_parameters.cutoff_len=64", "training.seq_length=32"], "cutoff_len 64 is larger than seq_length 32"),
    ],
)
def test_what_does_not_fit(overrides: list[str], said: str, tmp_path: Path) -> None:
    assert said in fault(write_run(tmp_path), *overrides)


def test_experts_must_divide(tmp_path: Path) -> None:
    said = [str(error) for error in report(write_run(tmp_path), "parallel.expert_parallel_size=2", "parallel.ep_plan.apply_modules=a").errors]
    assert said == ["parallel.expert_parallel_size 2: family qwen2_5_vl has no experts; remove it"]


def test_a_model_without_weights_is_not_trained_from_random_ones_unasked(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "hf" / "model.safetensors").unlink()
    assert "set training.random_init to true to start from random ones" in fault(path)
    assert detail(path, "weights", "training.random_init=true") == "random, from the seed"


def test_truncated_and_foreign_weights(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"\x0b" + bytes(7) + b"{}")
    assert "its header of 11 bytes is cut off" in fault(path)
    (tmp_path / "ranks" / "release" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "ranks" / "release" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")
    assert "a mp_rank directory, which this backend does not read; convert it first (mm-convert ... mm_to_hf)" in fault(path, "training.load=ranks")


def test_families_of_another_backend_and_of_none(tmp_path: Path) -> None:
    from dataclasses import replace

    from tangram.families import base, get_family

    path = write_run(tmp_path)
    other = replace(get_family("qwen2_5_vl"), backends=("megatron",))
    run = read_run(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(base._families, "qwen2_5_vl", other)
        assert str(check_run(run, 1).errors[0]).endswith("the fsdp2 backend does not run it yet; use megatron")
    write_hf(tmp_path, {"model_type": "of_no_family", "text_config": {"max_position_embeddings": 512}})
    found = {one.rule: one for one in report(path, "training.seq_length=513").findings}
    assert found["backend"].detail.endswith("a model of no family, as transformers or a plug-in has it")
    assert "longer than max_position_embeddings 512" in str(found["sequence length"].error)
    assert "the model is of no registered family" in str(found["dataset"].error)


@pytest.mark.parametrize(
    ("tail", "samples", "epochs", "steps"),
    [("drop", 10, 3, 6), ("pad", 10, 3, 9), ("continue", 10, 3, 7), ("drop", 12, 2, 6), ("pad", 3, 2, 2)],
)
def test_epochs_as_steps(tail: str, samples: int, epochs: int, steps: int, tmp_path: Path) -> None:
    path = write_run(tmp_path, {"training": {"train_iters": None, "train_epochs": epochs, "gradient_accumulation_steps": 2}}, samples)
    run = read_run(path, [f"data.dataloader_param.tail={tail}"])
    assert steps_of_epochs(run, epochs, data_parallel_size=2) == steps
    assert detail(path, "schedule", f"data.dataloader_param.tail={tail}", world=2).startswith(f"{epochs} epochs = {steps} steps")
    assert detail(path, "schedule", f"data.dataloader_param.tail={tail}", world=None).startswith(f"{epochs} epochs, ")


def test_epochs_too_short_for_a_batch(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, {"training": {"train_iters": None, "train_epochs": 2}}, samples=3))
    with pytest.raises(DataError, match="3 samples are fewer than a global batch of 4"):
        steps_of_epochs(run, 2, data_parallel_size=4)


def test_what_is_allowed_but_worth_knowing(tmp_path: Path) -> None:
    found = report(write_run(tmp_path), "parallel.fsdp_plan.apply_modules=")
    assert found.notes == [
        "parallel.fsdp_plan.apply_modules is empty: the whole model is one unit, gathered at once",
        "training.save is not given: nothing of the run is kept",
    ]


def test_a_least_rate_that_is_never_reached_is_told(tmp_path: Path) -> None:
    found = report(write_run(tmp_path), "training.lr_min=1e-6")
    assert next(one.detail for one in found.findings if one.rule == "schedule").endswith("; the least rate 1e-06 has no effect")


def test_processes_of_unknown_number(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    assert detail(path, "processes", "parallel.fully_shard_parallel_size=4", world=None) == "a multiple of 4 processes is needed"
    assert detail(path, "processes", world=None) == "any number of processes"
    with pytest.raises(ConfigError, match="expert_fully_shard_parallel_size 3 must divide the 2 ranks that hold the same experts"):
        expert_sizes(Fsdp2Parallel(expert_parallel_size=2, expert_fully_shard_parallel_size=3), 4)
    said = [str(error) for error in report(path, "parallel.ulysses_parallel_size=3").errors]
    assert said == [
        "4 processes cannot be divided by parallel.ulysses_parallel_size 3; start a multiple of it",
        "parallel.ulysses_parallel_size 3 does not divide the model's 4 attention heads; use 1 or 2",
    ]
