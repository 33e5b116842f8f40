"""Deterministic mode on a CPU: two runs give the same numbers and the same bytes, at every kind of split.

The first of each pair is forked from the warm server of the tests. The second runs in another interpreter with another hash seed, so that the order of
Python's sets is another one, in another folder, and reads its data by worker processes in place of its own, or saves in the background.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tangram.cli.main import main
from tests.trial import Trial, run, split, write_trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
LAUNCHES = Path(__file__).parent.parent / "workers" / "launches.py"
ZERO = {"use_distributed_optimizer": True}
DROPOUT = "model.overrides=" + json.dumps({"text_decoder": {"attention_dropout": 0.1, "hidden_dropout": 0.1}})
WHOLE = ["training.deterministic=true", "training.train_iters=3", "training.save_interval=2"]


@dataclass(frozen=True)
class Case:
    """A run."""

    overrides: list[str]
    ranks: int = 2
    family: str = "qwen2_5_vl"
    fsdp2: bool = False


CASES = {
    "one process, dropout": Case([DROPOUT], 1),
    "TP2 x SP, dropout": Case([DROPOUT, *split(2, sequence_parallel=True)]),
    "PP2": Case([DROPOUT, *split(1, [2, 0], [1, 1])]),
    "CP2 ring": Case(split(1, context_parallel_size=2, context_parallel_algo="megatron_cp_algo", **ZERO)),
    "DP2, overlapped": Case(split(1, overlap_grad_reduce=True, overlap_param_gather=True, **ZERO)),
    "EP2": Case(split(1, expert_model_parallel_size=2, **ZERO), family="qwen3_vl_moe"),
    "EP2 all-gather": Case(split(1, expert_model_parallel_size=2, moe_token_dispatcher_type="allgather", **ZERO), family="qwen3_vl_moe"),
    "fsdp2": Case([], 1, fsdp2=True),
    "fsdp2 of two": Case([], fsdp2=True),
}


def write(folder: Path, family: str) -> Trial:
    return write_trial(folder, family=family, layers=2)


def fsdp2_file(trial: Trial) -> Path:
    content = yaml.safe_load(trial.run_file.read_text())
    plan = {"apply_modules": ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]}
    training = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "lr": 1e-3, "use_deter_comp": True}
    fsdp2: dict[str, Any] = {
        "backend": "fsdp2",
        "model": {"model_name_or_path": "hf", "freeze": ["model.visual.patch_embed"]},
        "parallel": {"fsdp_plan": plan},
        "data": content["data"],
        "training": {**training, "init_model_with_meta_device": True},
        "features": {"enable_chunk_loss": True, "chunkloss_plan": {"apply_module": "lm_head", "chunk_size": 64}},
    }
    (trial.folder / "fsdp2.yaml").write_text(yaml.safe_dump(fsdp2))
    return trial.folder / "fsdp2.yaml"


def launch(case: Case, trials: dict[str, Trial], out: Path, second: bool) -> dict[str, Any]:
    trial = trials[case.family]
    file = trial.folder / "fsdp2.yaml" if case.fsdp2 else trial.run_file
    words = [word for word in WHOLE if not (case.fsdp2 and "deterministic" in word)] + case.overrides
    words += [f"training.save={out}/ckpt"]
    if second:
        words += ["data.dataloader_param.enable_preload=true", "training.save_async=true"]
        words += ["data.dataloader_param.num_workers=2" if case.fsdp2 else "training.num_workers=2"]
    return {"folder": str(out), "command": ["tangram", "train", str(file), *words], "ranks": case.ranks}


def test_x(tmp_path: Path) -> None:
    trials = {family: write(tmp_path / family, family) for family in ("qwen2_5_vl", "qwen3_vl_moe")}
    fsdp2_file(trials["qwen2_5_vl"])
    pairs = {
        name: [launch(case, trials, tmp_path / side / name.replace(" ", "_"), bool(number)) for number, side in enumerate("ab")]
        for name, case in CASES.items()
    }
    (tmp_path / "b.json").write_text(json.dumps([second for _, second in pairs.values()]))
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.Popen([sys.executable, str(LAUNCHES), str(tmp_path / "b.json")], env=environment)
    for first, _ in pairs.values():
        run(Path(first["folder"]), first["command"], first["ranks"]).succeeded()
    assert other.wait() == 0
    for name, (a, b) in pairs.items():
        x, y = Path(a["folder"], "ckpt"), Path(b["folder"], "ckpt")
        fx, fy = ({str(p.relative_to(d)): p.read_bytes() for p in d.rglob("*") if p.is_file()} for d in (x, y))
        print(name, sorted(set(fx) ^ set(fy)), [k for k in fx if k in fy and fx[k] != fy[k]], len(fx))
        main(["baseline", "make", str(x), "-o", str(x / "b.json")])
        print(main(["gate", str(y), str(x / "b.json"), "--mode", "exact", "--margin", "time=1000", "--margin", "memory=1"]))
