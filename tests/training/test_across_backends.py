"""One run on both backends: what the one saved, the other goes on with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests import trial as kit
from tests.largest import largest
from tests.training.test_resume import relative, stored
from tests.trial import Record, Trial, metrics, run, split

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
FOUR = split(2, [2, 0], [1, 1], vision_tensor_model_parallel_size=1, use_distributed_optimizer=True)
"""TP2 x PP2 with sharded optimizer state, each tensor-parallel rank with the whole vision encoder."""


def trial_of_both(folder: Path, dtype: str, family: str = "qwen2_5_vl", layers: int = 4) -> tuple[Trial, Path]:
    """A run file of each backend for one run: 8 samples in micro-batches of 2, a warm-up and a cosine."""
    schedule = {"lr_warmup_iters": 2, "lr_decay_style": "cosine", "weight_decay": 0.0}
    trial = kit.write_trial(folder, family=family, layers=layers, **schedule, dtype=dtype)
    trial.edit({"model": {"cast_weights": True}})
    content = yaml.safe_load(trial.run_file.read_text())
    own = content["training"]
    plan = {"apply_modules": ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]}
    fsdp2 = {
        "backend": "fsdp2",
        "model": {"model_name_or_path": "hf"},
        "parallel": {"fsdp_plan": plan | ({} if dtype == "fp32" else {"param_dtype": dtype, "reduce_dtype": "fp32"})},
        "data": content["data"],
        "features": {"loss_cfg": {"loss_type": own["loss_type"]}},
        "training": {
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "lr_warmup_ratio": 1 / 3,
            "init_model_with_meta_device": True,
            **{key: own[key] for key in ("train_iters", "lr", "seq_length", "lr_decay_style", "weight_decay")},
        },
    }
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(fsdp2))
    return trial, folder / "fsdp2.yaml"


def train(folder: Path, file: Path, overrides: Sequence[str], ranks: int) -> tuple[list[Record], str]:
    command = ["tangram", "train", str(file), f"training.save={folder}/ckpt", *overrides]
    output = run(folder, command, ranks).succeeded().output
    return metrics(folder / "ckpt" / "metrics.jsonl"), output


def same(mine: dict[str, Any], theirs: dict[str, Any], kinds: Sequence[str], limit: float) -> None:
    assert mine.keys() == theirs.keys()
    worst = {key: relative(mine[key], theirs[key]) for key in mine if key.startswith(tuple(kinds))}
    assert len(worst) > 50 and largest(worst.values()) <= limit, max(worst.items(), key=lambda item: item[1])


def test_a_run_goes_from_one_backend_to_the_other_and_back(tmp_path: Path) -> None:
    trial, fsdp2 = trial_of_both(tmp_path / "trial", "fp32", layers=2)
    whole, _ = train(tmp_path / "whole", trial.run_file, ["training.save_interval=3", "training.save_hf_interval=3", *FOUR], 4)
    there, said = train(tmp_path / "there", fsdp2, [f"training.load={tmp_path}/whole/ckpt/iter_0000003", "training.save_interval=4"], 2)
    assert "random state not restored: the split is another one" in said and "learning-rate schedule" not in said
    back, said = train(tmp_path / "back", trial.run_file, [f"model.load={tmp_path}/there/ckpt/iter_0000004", *FOUR], 4)
    assert "learning-rate schedule" not in said
    assert [row["step"] for row in there] == [4, 5, 6] and [row["step"] for row in back] == [5, 6]
    for rows in (there, back):
        for mine, theirs in zip(rows, whole[-len(rows) :], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) and mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            assert (mine["lr"], mine["consumed_samples"], mine["tokens"]) == (theirs["lr"], theirs["consumed_samples"], theirs["tokens"])
    ends = [stored(tmp_path / name / "ckpt" / "iter_0000006") for name in ("whole", "there", "back")]
    for end in ends[1:]:
        same(end, ends[0], ["model.", "optimizer."], 1e-4)
    _the_directory_is_what_export_writes(trial, tmp_path)


def _the_directory_is_what_export_writes(trial: Trial, tmp_path: Path) -> None:
    run(tmp_path / "log", ["tangram", "export", f"{tmp_path}/whole/ckpt/iter_0000003", f"{tmp_path}/out", "--hf", str(trial.hf)]).succeeded()
    direct = tmp_path / "whole" / "ckpt" / "hf" / "iter_0000003"
    assert {path.name: path.read_bytes() for path in direct.iterdir()} == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert load_file(direct / "model.safetensors").keys() == load_file(trial.hf / "model.safetensors").keys()


def test_in_bf16_both_store_the_same_and_read_the_masters(tmp_path: Path) -> None:
    """Steps with a rate that moves no fp32 number leave masters and weights as they were, to the bit."""
    trial, fsdp2 = trial_of_both(tmp_path / "trial", "bf16", layers=2)
    still = "training.lr=1e-30"
    train(tmp_path / "whole", trial.run_file, ["training.train_iters=3", *FOUR], 4)
    train(tmp_path / "there", fsdp2, [f"training.load={tmp_path}/whole/ckpt", "training.train_iters=4", still], 2)
    before, there = (stored(tmp_path / name / "ckpt" / f"iter_000000{step}") for name, step in (("whole", 3), ("there", 4)))
    masters = {key for key in before if ".master." in key}
    assert len(masters) > 50 and before.keys() == there.keys()
    for key, value in before.items():
        assert value.dtype == there[key].dtype
        if key in masters or key.startswith("model."):
            assert torch.equal(value, there[key]), key
        elif ".step." in key:
            assert (int(value), int(there[key])) == (3, 4), key
        else:
            assert relative(there[key], value) < 1, key
    assert sum(not torch.equal(before[key], before[key].bfloat16().float()) for key in masters) > 50, "masters are not the weights"
    manifest = json.loads((tmp_path / "there" / "ckpt" / "iter_0000004" / "manifest.json").read_text())
    assert manifest["optimizer"] and manifest["split"]["fully_shard"] == 2
