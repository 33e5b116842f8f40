"""Baseline, gate and replay of real runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tangram.cli.main import main
from tests.trial import Trial, losses, run, split, train, write_trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TP2 = split(2, sequence_parallel=True)
WORKERS = Path(__file__).parent.parent / "workers"
LAX = ["--margin", "time=1000", "--margin", "memory=1"]
"""Other tests run beside this one."""


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return write_trial(tmp_path_factory.mktemp("trial"), layers=2, train_iters=9)


@pytest.fixture(scope="module")
def baseline(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four of nine steps on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("base")
    train(folder, trial, [*TP2, "training.exit_interval=4"], 2)
    assert main(["baseline", "make", str(folder), "-o", str(folder / "b.json"), *LAX]) == 0
    return folder / "b.json"


def gate(folder: Path, baseline: Path, *options: str) -> tuple[int, dict[str, str]]:
    """Exit status, and what failed."""
    report = folder / "gate.json"
    status = main(["gate", str(folder), str(baseline), "--json", str(report), *options])
    return status, {one["name"]: one["found"] for one in json.loads(report.read_text())["findings"] if one["passed"] is False}


def test_a_repeated_run_passes_to_the_last_bit(trial: Trial, baseline: Path, tmp_path: Path) -> None:
    train(tmp_path, trial, [*TP2, "training.exit_interval=4"], 2)
    assert gate(tmp_path, baseline, "--mode", "exact") == (0, {})


def test_a_fault_of_one_rank_is_seen_where_loss_and_norm_hide_it(trial: Trial, baseline: Path, tmp_path: Path) -> None:
    command = [str(WORKERS / "one_rank_fault.py"), "train", str(trial.run_file), f"training.metrics_file={tmp_path}/metrics.jsonl"]
    run(tmp_path, [*command, *TP2, "training.exit_interval=4"], 2).succeeded()
    status, failed = gate(tmp_path, baseline)
    assert status == 1 and failed.keys() == {"replicas"}
    assert failed["replicas"].startswith("step 1: gradient norm of what they share is ") and "on rank 1" in failed["replicas"]


def replay(baseline: Path, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """The run file."""
    assert main(["replay", str(baseline), "-o", str(folder), "--write-only", *options]) == 0
    content: dict[str, Any] = yaml.safe_load((folder / "run.yaml").read_text())
    return content


def test_a_replay_on_other_ranks_has_the_same_batches_and_passes(baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = replay(baseline, tmp_path / "out", ["--tp", "1", "--dp", "2"])
    assert "2 processes, 2 micro-batches per step" in capsys.readouterr().out
    assert content["training"]["global_batch_size"] == 8 and content["training"]["train_iters"] == 9 and content["training"]["exit_interval"] == 4
    run(tmp_path / "log", ["tangram", "train", str(tmp_path / "out" / "run.yaml")], 2).succeeded()
    assert gate(tmp_path / "out", baseline, "--ignore", "topology", "--mode", "digits 5") == (0, {})
    status, failed = gate(tmp_path / "out", baseline)
    assert status == 1 and "tensor: 1 in place of 2" in failed["topology"] and "data_parallel: 2 in place of 1" in failed["topology"]


def test_a_replay_on_the_other_backend_passes_in_one_command(baseline: Path, tmp_path: Path) -> None:
    command = [str(WORKERS / "alone.py"), "replay", str(baseline), "--backend", "fsdp2", "-o", str(tmp_path / "out"), "--mode", "digits 5"]
    ended = run(tmp_path, command).succeeded()
    assert "passed: 10 checks" in ended.output and "1 processes, 4 micro-batches" in ended.output, ended.output
    assert losses(tmp_path / "out" / "metrics.jsonl") == pytest.approx(losses(baseline.parent / "metrics.jsonl"), rel=1e-6)
    # And back again, from a baseline of the other backend.
    assert main(["baseline", "make", str(tmp_path / "out"), "-o", str(tmp_path / "b.json")]) == 0
    content = replay(tmp_path / "b.json", tmp_path / "back", ["--backend", "megatron", "--tp", "2"])
    before = yaml.safe_load(json.loads(baseline.read_text())["config"])
    alike = (
        "lr",
        "lr_warmup_iters",
        "lr_decay_style",
        "seed",
        "weight_decay",
        "loss_type",
        "dtype",
        "global_batch_size",
        "seq_length",
        "num_workers",
    )
    assert {key: content["training"][key] for key in alike} == {key: before["training"][key] for key in alike}
    assert content["model"]["load"] == before["model"]["load"] and content["data"] == before["data"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dp", "3"], "the baseline's global batch of 8 is no multiple of micro_batch_size 2 x 3 data-parallel ranks; choose another --dp"),
        (["--dp", "0"], "--dp 0 must be at least 1"),
        (["--pp", "3"], "--pp 3: the text decoder has 2 layers"),
        (["--backend", "fsdp2", "--tp", "2"], "--tp, --pp: not of the fsdp2 backend"),
        (["training.lrr=1"], "lrr"),
        (["--backend", "fsdp2", "training.micro_batch_size=3"], "micro_batch_size 3 x 1 data-parallel ranks"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(
    options: list[str], message: str, baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(baseline), "-o", str(tmp_path / "out"), "--write-only", *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and not (tmp_path / "out" / "run.yaml").exists()


def test_a_replay_removes_nothing_but_a_replay(baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay(baseline, tmp_path, [])
    assert main(["replay", str(baseline), "-o", str(tmp_path), "--write-only"]) == 2 and "--force to replace it" in capsys.readouterr().err
    replay(baseline, tmp_path, ["--force", "--pp", "2"])
    (tmp_path / "mine").touch()
    assert main(["replay", str(baseline), "-o", str(tmp_path), "--force"]) == 2 and "holds mine; give another folder" in capsys.readouterr().err
