"""Deterministic mode on a CPU: two runs give the same numbers and the same bytes, at every kind of split.

The first of each pair is forked from the warm server of the tests. The second runs under another interpreter with another hash seed, so that sets
are in another order; in another folder; and reads ahead by worker processes, and saves in the background.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tangram.cli.main import main
from tests.ranks import on_ranks
from tests.trial import Record, Trial, entry_flags, metrics, run, split, write_trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
HERE = Path(__file__).parent
LAUNCHES = HERE.parent / "workers" / "launches.py"
TIMED = {"step_ms", "tokens_per_s", "tflops_per_device", "mfu"}
"""Columns of metrics.jsonl that no mode makes equal."""
ZERO = {"use_distributed_optimizer": True}
DROPOUT = "model.overrides=" + json.dumps({"text_decoder": {"attention_dropout": 0.1, "hidden_dropout": 0.1}})
LOADING = "data.dataloader_param."


@dataclass(frozen=True)
class Case:
    """A run of three steps."""

    overrides: list[str]
    ranks: int = 2
    file: str = "run.yaml"


CASES = {
    "one process": Case([DROPOUT, "training.save_hf_interval=3"], 1),
    "TP2 x SP": Case([DROPOUT, *split(2, sequence_parallel=True), "training.save_hf_interval=3"]),
    "PP2": Case([DROPOUT, *split(1, [2, 0], [1, 1])]),
    "CP2, ring": Case(split(1, context_parallel_size=2, context_parallel_algo="megatron_cp_algo", **ZERO)),
    "DP2, overlapped": Case([DROPOUT, *split(1, overlap_grad_reduce=True, overlap_param_gather=True, **ZERO)]),
    "EP2": Case(split(1, expert_model_parallel_size=2, **ZERO), file="experts/run.yaml"),
    "fsdp2, one rank": Case([], 1, "fsdp2.yaml"),
    "fsdp2, two ranks": Case([], 2, "fsdp2.yaml"),
}


def command(trial: Trial, case: Case, save: Path, second: bool) -> list[str]:
    own = case.file == "fsdp2.yaml"
    words = ["tangram", "train", str(trial.folder / case.file), "training.train_iters=3", "training.save_interval=2", f"training.save={save}"]
    words += [f"training.{'use_deter_comp' if own else 'deterministic'}=true", f"{LOADING}shuffle=true", *case.overrides]
    workers = f"{LOADING if own else 'training.'}num_workers="
    return [*words, f"{workers}2", f"{LOADING}enable_preload=true", "training.save_async=true"] if second else [*words, f"{workers}0"]


def write_fsdp2(trial: Trial) -> None:
    """With dropout in attention, and the loss in chunks."""
    hf = json.loads((trial.hf / "config.json").read_text())
    hf.get("text_config", hf)["attention_dropout"] = 0.1
    (trial.folder / "dropout").mkdir()
    for file in trial.hf.iterdir():
        (trial.folder / "dropout" / file.name).write_bytes(file.read_bytes())
    (trial.folder / "dropout" / "config.json").write_text(json.dumps(hf))
    content: dict[str, Any] = {
        "backend": "fsdp2",
        "model": {"model_name_or_path": "dropout"},
        "parallel": {"fsdp_plan": {"apply_modules": ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]}},
        "data": yaml.safe_load(trial.run_file.read_text())["data"],
        "training": {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "lr": 1e-3, "init_model_with_meta_device": True},
        "features": {"enable_chunk_loss": True, "chunkloss_plan": {"apply_module": "lm_head", "chunk_size": 64}},
    }
    (trial.folder / "fsdp2.yaml").write_text(yaml.safe_dump(content))


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    made = write_trial(tmp_path_factory.mktemp("trial"), layers=2)
    write_trial(made.folder / "experts", family="qwen3_vl_moe", layers=2)
    write_fsdp2(made)
    return made


@pytest.fixture(scope="module")
def saved(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``a/CASE`` and ``b/CASE``, in which both runs of each case saved."""
    folder = tmp_path_factory.mktemp("saved")
    second = [
        {"folder": str(folder / "logs" / name), "command": command(trial, case, folder / "b" / name, True), "ranks": case.ranks}
        for name, case in CASES.items()
    ]
    (folder / "second.json").write_text(json.dumps(second))
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(HERE.parent.parent)}
    with subprocess.Popen([sys.executable, str(LAUNCHES), str(folder / "second.json")], env=environment) as other:
        try:
            for name, case in CASES.items():
                run(folder / name, command(trial, case, folder / "a" / name, False), case.ranks).succeeded()
            assert other.wait() == 0
        finally:
            other.kill()
    yield folder


def untimed(row: Record) -> Record:
    return {key: value for key, value in row.items() if key not in TIMED}


@pytest.mark.parametrize("name", CASES)
def test_two_runs_are_the_same_to_the_last_byte(name: str, saved: Path, tmp_path: Path) -> None:
    first, second = saved / "a" / name, saved / "b" / name
    rows, again = (metrics(folder / "metrics.jsonl") for folder in (first, second))
    assert len(rows) == 3 and {"loss", "grad_norm", "lr", "samples_digest"} <= rows[0].keys()
    assert [untimed(row) for row in rows] == [untimed(row) for row in again]
    assert main(["baseline", "make", str(first), "-o", str(tmp_path / "b.json"), "--margin", "time=1000", "--margin", "memory=1"]) == 0
    assert main(["gate", str(second), str(tmp_path / "b.json"), "--mode", "exact"]) == 0

    files = [{str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()} for folder in (first, second)]
    assert files[0].keys() == files[1].keys()
    told = {name for name in files[0] if "/" not in name} - {"latest_checkpointed_iteration.txt"}
    assert told == {"metrics.jsonl", "metrics.ranks.jsonl", "run.yaml"}
    odd = [name for name in files[0].keys() - told if files[0][name].read_bytes() != files[1][name].read_bytes()]
    assert not odd
    parts = {f"iter_000000{step}/{name}" for step in (2, 3) for name in (".metadata", "manifest.json", "__0_0.distcp")}
    assert parts <= files[0].keys()
    assert ("training.save_hf_interval=3" in CASES[name].overrides) == any(name.endswith(".safetensors") for name in files[0])


def test_each_way_to_start_a_run_has_set_everything_when_the_device_is_first_used(trial: Trial, tmp_path: Path) -> None:
    script = HERE.parent.parent / "pretrain_vlm.py"
    flags = entry_flags(trial, tmp_path, {"--use-deter-comp": True, "--load": trial.hf})
    commands = [
        ["tangram", "train", str(trial.run_file), "training.deterministic=true"],
        [str(script), *flags],
        ["tangram", "train", str(trial.folder / "fsdp2.yaml"), "training.use_deter_comp=true", "training.train_iters=1"],
    ]
    (found,) = on_ranks(1, HERE / "cases_deterministic.py", "settings_when_the_device_is_first_used", commands)
    wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert found == [{**wanted, "FLASH_ATTENTION_DETERMINISTIC": "1", "algorithms": True}] * 3
