"""Precision, recomputation, loss types and the cut into micro-batches: what may and what may not change the numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.training.test_resume import stored
from tests.trial import BATCH, Record, Trial, run, split, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
THREE = "training.train_iters=3"


@pytest.fixture(scope="module")
def plain(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return train(tmp_path_factory.mktemp("plain"), trial, [THREE])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_keep_fp32_masters_and_moments(dtype: str, trial: Trial, plain: list[Record], folder: Path) -> None:
    """areal-project/AReaL 1292, NVIDIA-NeMo/Automodel PR 2248. On two ranks with the distributed optimizer."""
    steps = 6 if dtype == "bf16" else 24  # fp16 first finds its loss scale
    command = [f"training.train_iters={steps}", f"training.dtype={dtype}", "model.cast_weights=true", f"training.save={folder}/ckpt"]
    rows = train(folder, trial, [*command, *split(use_distributed_optimizer=True)], 2)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows[0]["loss"] == pytest.approx(plain[0]["loss"], rel=2e-2)
    taken = [row for row in rows if not row["skipped"]]
    assert len(taken) >= 6 and taken[-1]["loss"] < taken[0]["loss"]
    if dtype == "fp16":
        assert len(taken) == steps or rows[0]["loss_scale"] > rows[-1]["loss_scale"] > 1
    else:
        assert len(taken) == steps and rows[0]["loss_scale"] == 1
    held = stored(folder / "ckpt" / f"iter_{steps:07}")
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    names = [key.removeprefix("model.") for key in held if key.startswith("model.")]
    assert {held[f"model.{name}"].dtype for name in names} == {kinds[dtype]}
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert {held[f"optimizer.{kind}.{name}"].dtype for name in names} == {torch.float32}, kind
    for name in names:
        assert torch.equal(held[f"optimizer.master.{name}"].to(kinds[dtype]), held[f"model.{name}"]), name
    assert any(not torch.equal(held[f"optimizer.master.{n}"], held[f"model.{n}"].float()) for n in names), "masters hold more than the weights"


def test_weights_are_cast_only_when_asked(trial: Trial, folder: Path) -> None:
    outcome = run(folder, ["tangram", "train", str(trial.run_file), "training.dtype=bf16"])
    assert outcome.codes == [2] and "cast" in outcome.errors()[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective"},
    ],
    ids=["full, uniform", "full, block", "selective"],
)
def test_recomputation_changes_no_bit(settings: dict[str, object], trial: Trial, plain: list[Record], folder: Path) -> None:
    rows = train(folder, trial, [THREE, *(f"features.{key}={value}" for key, value in settings.items())])
    assert [(row["loss"], row["grad_norm"]) for row in rows] == [(row["loss"], row["grad_norm"]) for row in plain]


@pytest.mark.parametrize("loss_type", ["default", "per_sample_loss", "per_token_loss"])
def test_each_loss_type_is_the_same_on_two_ranks(loss_type: str, trial: Trial, plain: list[Record], folder: Path) -> None:
    command = [THREE, f"training.loss_type={loss_type}"]
    one, two = train(folder / "one", trial, command), train(folder / "two", trial, command, 2)
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-6)
    assert [row["grad_norm"] for row in two] == pytest.approx([row["grad_norm"] for row in one], rel=1e-5)
    same = [row["loss"] for row in one] == [row["loss"] for row in plain]
    assert same == (loss_type == "per_token_loss"), "answers differ in length, so the types give different numbers"


@pytest.mark.parametrize("loss_type", ["per_token_loss", "per_sample_loss"])
def test_the_cut_into_micro_batches_changes_nothing(loss_type: str, trial: Trial, folder: Path) -> None:
    """huggingface/transformers 35203: accumulation must give the loss, the gradient norm and the weights of one large batch."""
    made = {}
    for micro in (8, 4, 1):
        assert BATCH % micro == 0
        own = folder / str(micro)
        command = [f"training.micro_batch_size={micro}", f"training.loss_type={loss_type}", "training.train_iters=3"]
        made[micro] = train(own, trial, [*command, f"training.save={own}/ckpt"]), stored(own / "ckpt" / "iter_0000003")
    rows, weights = made[8]
    for micro in (4, 1):
        others, their_weights = made[micro]
        assert [row["loss"] for row in others] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
        assert [row["grad_norm"] for row in others] == pytest.approx([row["grad_norm"] for row in rows], rel=1e-5)
        for key in weights:
            if key.startswith("model."):
                assert torch.allclose(their_weights[key], weights[key], rtol=1e-5, atol=1e-6), key


def test_a_frozen_component_stays_and_the_table_says_so(trial: Trial, folder: Path) -> None:
    command = ["tangram", "train", str(trial.run_file), "training.train_iters=2", f"training.save={folder}/ckpt", "training.lr_warmup_iters=0"]
    output = run(folder, [*command, "features.freeze_vision_encoder=true", *split(1, [4, 0], [0, 4])], 2).succeeded().output
    from safetensors.torch import load_file

    from tangram.families.base import get_family

    before = {get_family("qwen2_5_vl").canonical_name(key): value for key, value in load_file(trial.hf / "model.safetensors").items()}
    after = stored(folder / "ckpt" / "iter_0000002")
    moved = {name for name, value in before.items() if not torch.equal(after[f"model.{name}"], value)}
    still = {name for name in before if name.startswith("model.visual.") and ".merger." not in name}
    assert moved == set(before) - still
    sizes = {
        "vision_encoder": sum(before[name].numel() for name in still),
        "vision_projector": sum(value.numel() for name, value in before.items() if ".merger." in name),
        "text_decoder": sum(value.numel() for name, value in before.items() if not name.startswith("model.visual.")),
    }
    lines = {name: next(line for line in output.splitlines() if f" {name} " in line) for name in sizes}
    for name, size in sizes.items():
        assert f"{size:,}" in lines[name], lines[name]
        assert ("true (given)" in lines[name]) == (name == "vision_encoder")
    total = next(line for line in output.splitlines() if " all " in line)
    assert f"{sum(sizes.values()):,}" in total and f"{sum(sizes.values()) - sizes['vision_encoder']:,}" in total
