"""The tools in real runs of two ranks: two runs in deterministic mode are the same, and each tool leaves what it should."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests import trial as kit
from tests.training.test_resume import stored
from tests.trial import metrics, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TIMED = ("step_ms", "tokens_per_s", "tflops_per_device", "mfu")


def run_file(folder: Path) -> Path:
    """A run of 4 steps on the fsdp2 backend, with dropout in attention, that uses every tool a machine without accelerator has."""
    trial = kit.write_trial(folder, layers=2)
    hf = json.loads((trial.hf / "config.json").read_text())
    hf.get("text_config", hf)["attention_dropout"] = 0.3
    (trial.hf / "config.json").write_text(json.dumps(hf))
    content = yaml.safe_load(trial.run_file.read_text())
    content["data"]["dataset_param"]["basic_parameters"]["val_rate"] = 0.2
    plan = {"apply_modules": ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]}
    training = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "train_iters": 4, "lr": 1e-3, "val_interval": 2, "save_interval": 2}
    fsdp2: dict[str, Any] = {
        "backend": "fsdp2",
        "model": {"model_name_or_path": "hf", "freeze": ["model.visual.patch_embed"]},
        "parallel": {"fsdp_plan": plan},
        "data": content["data"],
        "training": {**training, "use_deter_comp": True, "manual_gc_interval": 2, "init_model_with_meta_device": True},
        "tools": {"memory_profile": {"mem_info": True}, "tensorboard": {"enable": True}, "peak_tflops": 0.5},
    }
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(fsdp2))
    return folder / "fsdp2.yaml"


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Curves of TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_two_runs_in_deterministic_mode_are_the_same_and_tools_tell_of_them(tmp_path: Path) -> None:
    file = run_file(tmp_path / "trial")
    pytest.importorskip("tensorboard")
    outcomes = [run(tmp_path / name, ["tangram", "train", str(file), f"training.save={tmp_path}/{name}/ckpt"], 2).succeeded() for name in "ab"]
    first, second = (metrics(tmp_path / name / "ckpt" / "metrics.jsonl") for name in "ab")
    assert [{k: v for k, v in row.items() if k not in TIMED} for row in first] == [{k: v for k, v in row.items() if k not in TIMED} for row in second]
    saved = [stored(tmp_path / name / "ckpt" / "iter_0000004") for name in "ab"]
    assert saved[0].keys() == saved[1].keys() and len(saved[0]) > 50
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])

    said = outcomes[0].output
    assert [("valid_loss" in row) for row in first] == [False, True, False, True], "8 of the 40 samples, all of them"
    assert len(re.findall(r"validation loss at iteration [24]: ", said)) == 2
    assert all(f"rank {rank}, iteration {step}: max resident" in said for rank in (0, 1) for step in range(1, 5)), "of every rank"
    (line,) = re.findall(r"iteration        2/ .*", said)
    speed, part = re.search(r"\| TFLOP/s per device: ([\d.]+) \| MFU: ([\d.]+)% \|", line).groups()  # type: ignore[union-attr]
    assert float(speed) == pytest.approx(first[1]["tflops_per_device"], abs=0.06) and float(part) == pytest.approx(100 * first[1]["mfu"], abs=0.06)
    assert first[1]["mfu"] == pytest.approx(first[1]["tflops_per_device"] / 0.5) and first[1]["mfu"] > 0

    curves = points(tmp_path / "a" / "ckpt" / "tensorboard")
    assert [step for step, _ in curves["loss"]] == [1, 2, 3, 4] and [step for step, _ in curves["valid_loss"]] == [2, 4]
    for name in ("loss", "grad_norm", "lr", "tokens", "mfu"):
        assert [value for _, value in curves[name]] == pytest.approx([row[name] for row in first], rel=1e-6)

    again = ["tangram", "train", str(file), f"training.save={tmp_path}/a/ckpt", f"training.load={tmp_path}/a/ckpt/iter_0000002"]
    run(tmp_path / "c", again, 2).succeeded()
    assert [step for step, _ in points(tmp_path / "a" / "ckpt" / "tensorboard")["loss"]] == [1, 2, 3, 4], "steps 3 and 4 are there once"


def test_the_work_of_a_step_does_not_depend_on_the_split(tmp_path: Path) -> None:
    """On the megatron backend: half of it is each of two ranks'."""
    trial = kit.write_trial(tmp_path / "trial", layers=2)
    words = ["training.train_iters=2", "training.lr_warmup_iters=0", "tools.peak_tflops=0.5"]
    one, two = (kit.train(tmp_path / f"{n}", trial, [*words, *kit.split(n)], n) for n in (1, 2))
    work = [[row["tflops_per_device"] * row["step_ms"] for row in rows] for rows in (one, two)]
    assert work[0][0] > 0 and work[0] == pytest.approx([2 * value for value in work[1]], rel=1e-6)
