"""Training runs that record an iteration: two of them are walked to the first difference, whatever their splits and backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.align.trace.find import first_difference
from tests.training.test_across_backends import trial_of_both
from tests.trial import run, split

RECOMPUTE = ["features.recompute_granularity=full", "features.recompute_method=uniform", "features.recompute_num_layers=1"]


def traced(folder: Path, file: Path, ranks: int, *changes: str) -> Path:
    """The first of two iterations, after which weights go apart by rounding."""
    where = [f"tools.trace.save_path={folder}", "tools.trace.step=1", "training.exit_interval=2"]
    command = ["tangram", "train", str(file), f"training.metrics_file={folder}.jsonl", *where, *changes]
    run(folder.parent, command, ranks).succeeded()
    return folder


@pytest.mark.timeout(300)
def test_two_runs_are_walked_across_splits_and_backends(tmp_path: Path) -> None:
    trial, fsdp2 = trial_of_both(tmp_path / "trial", "fp32", layers=2)
    alone = traced(tmp_path / "alone", trial.run_file, 1, *RECOMPUTE)
    pair = traced(tmp_path / "pair", trial.run_file, 2, *split(tensor=2, sequence_parallel=True))
    finding = first_difference(alone, pair)
    assert finding.passed, finding.summary
    assert min(len(walked.steps) for walked in finding.walks) > 100
    copies = traced(tmp_path / "fsdp2", fsdp2, 2, "tools.trace.only=['model.language_model.layers.{*}*']")
    finding = first_difference(alone, copies)
    assert finding.passed, finding.summary
    assert {step.name.rpartition(".layers.")[0] for walked in finding.walks for step in walked.steps} == {"model.language_model"}
    assert {note.why for walked in finding.walks for note in walked.notes} == {"not chosen by --trace-only (tools.trace.only)"}


def test_a_step_after_the_last_is_refused(tmp_path: Path) -> None:
    from tests.trial import write_trial

    trial = write_trial(tmp_path / "trial", layers=2)
    outcome = run(tmp_path, ["tangram", "train", str(trial.run_file), "tools.trace.step=7"])
    assert outcome.codes == [2]
    assert "tools.trace.step 7 lies after the last iteration, train_iters 6" in outcome.output
