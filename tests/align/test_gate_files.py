"""Files that a gate reads: logs of others, and files that are damaged or of another kind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tangram.align.gate.baseline import make_baseline, read_baseline, write_baseline
from tangram.align.gate.compare import hold_against
from tangram.align.gate.read_log import unit
from tangram.align.gate.read_run import read_run
from tangram.align.gate.settings import Settings
from tangram.align.gate.verdict import Verdict
from tangram.cli.main import main
from tests.align.gate_kit import numbers

MEMORY = "[Rank 0] (after 1 iterations) memory (MB) | allocated: 19806.47 | max allocated: 21206.09 | reserved: 1.0 | max reserved: 2.0"
OTHERS = """\
some words before
 [2025-12-01 10:00:00] iteration        1/       3 | consumed samples:            4 | elapsed time per iteration (ms): 7611.4 | learning rate: \
1.000000E-06 | global batch size:     4 | tokens per sample: 1.024000E+03 | loss: 1.205116E+01 | loss scale: 1.0 | grad norm: 142.082 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
[Rank 0] (after 1 iterations) memory (MB) | allocated: 19806.47 | max allocated: 21206.09 | reserved: 23000.0 | max reserved: 23000.0
[Rank 4] (after 1 iterations) memory (MB) | allocated: 24492.90 | max allocated: 25974.75 | reserved: 29000.0 | max reserved: 29000.0
 [2025-12-01 10:00:01] iteration        2/       3 | consumed samples:            8 | elapsed time per iteration (ms): 870.0 | learning rate: \
1.000000E-06 | global batch size:     4 | tokens per sample: 1.024000E+03 | loss: 1.200050E+01 | loss scale: 1.0 | grad norm: 115.587 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
 [2025-12-01 10:00:02] iteration        3/       3 | consumed samples:           12 | elapsed time per iteration (ms): 915.9 | learning rate: \
1.000000E-06 | global batch size:     4 | tokens per sample: 1.024000E+03 | loss: 9.436471E+00 | loss scale: 1.0 | grad norm: 55.825 | \
number of skipped iterations:   0 | number of nan iterations:   0 |
"""
"""MindSpeed-MM's log, with the numbers of its published baseline and seed documents."""


def make(run: Path, file: Path) -> Path:
    write_baseline(make_baseline(read_run(run), Settings()), file)
    return file


def gate(run: Path, file: Path, mode: str | None = None) -> Verdict:
    base = read_baseline(file)
    return hold_against(read_run(run), base, base.settings.changed(mode, [], None))


@pytest.fixture
def others(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(OTHERS)
    return path


def test_a_log_of_others_is_read(others: Path) -> None:
    run = read_run(others)
    assert [(step.step, step.loss, step.grad_norm, step.step_ms) for step in run.steps] == [
        (1, 12.05116, 142.082, 7611.4),
        (2, 12.0005, 115.587, 870.0),
        (3, 9.436471, 55.825, 915.9),
    ]
    assert run.memory == {"allocated": {0: {1: 19806.47}, 4: {1: 24492.9}}, "max allocated": {0: {1: 21206.09}, 4: {1: 25974.75}}}
    assert [step.loss_unit for step in run.steps] == pytest.approx([1e-5, 1e-5, 1e-6]) and run.steps[0].grad_norm_unit == pytest.approx(1e-3)
    assert (unit("12"), unit("-2.50"), unit("nan")) == (1.0, 0.01, 0.0)


@pytest.mark.parametrize(
    ("old", "new", "check", "text"),
    [
        (" | loss: 1.200050E+01", "", "steps", "the run has no loss at step 2"),  # what Megatron prints of a loss that is not a number
        ("loss: 1.200050E+01", "loss: NAN", "loss", "step 2 is nan"),
        ("loss: 9.436471E+00", "loss: 9.540272E+00", "loss", "step 3 is 9.540272, in the baseline 9.436471 (+1.10%)"),
        ("(ms): 870.0", "(ms): 1000.0", "time", "958.0 ms per step, in the baseline 893.0 ms (+7.3%)"),
        ("max allocated: 25974.75", "max allocated: 29000.00", "memory", "rank 4: max allocated 29000.0 MB, in the baseline 25974.8 MB"),
        ("| allocated: 24492.90", "| allocated: 27500.00", "memory", "rank 4: allocated 27500.0 MB"),
        ("[Rank 4] (after", "[Rank 5] (after", "memory", "the run says nothing of rank 4; the baseline says nothing of rank 5"),
        ("iteration        3/", "iteration        4/", "steps", "the run lacks step 3; the baseline lacks step 4"),
    ],
)
def test_faults_in_a_log_are_caught(old: str, new: str, check: str, text: str, others: Path, tmp_path: Path) -> None:
    file, run = make(others, tmp_path / "b.json"), tmp_path / "new.log"
    assert gate(others, file).passed and gate(others, file, "exact").passed
    assert OTHERS.count(old) == 1
    run.write_text("".join(f"[default7]:{line}\n" for line in OTHERS.replace(old, new).splitlines()))
    found = {finding.name: finding.found for finding in gate(run, file).failures}
    assert text in found[check], found


def test_a_log_that_was_started_again_counts_its_last_numbers(others: Path, tmp_path: Path) -> None:
    file = make(others, tmp_path / "b.json")
    lines = OTHERS.splitlines(keepends=True)
    others.write_text("".join([*lines[:5], *lines[4:]]).replace("1.200050E+01", "9.999999E+01", 1))
    assert [(step.step, step.loss) for step in read_run(others).steps] == [(1, 12.05116), (2, 12.0005), (3, 9.436471)]
    verdict = gate(others, file)
    assert verdict.passed and "step 2 follows step 2: the run was started again" in verdict.notes[0]


def test_megatrons_own_name_of_the_loss_and_unknown_fields(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    line = " [2025-01-01 00:00:00.123456] iteration 1/ 2 | lm loss: 2.5E+00 | load_balancing_loss: 1.0E+00 | params norm: 3.0 | z loss: 4.0E+00 |\n"
    path.write_text(line)
    assert read_run(path).steps[0].loss == 2.5 and read_run(path).steps[0].grad_norm is None
    path.write_text(line.replace("lm loss", "mtp loss"))
    with pytest.raises(ValueError, match="losses mtp loss, z loss, and none is named loss or lm loss"):
        read_run(path)


def test_a_log_and_the_metrics_of_one_run_agree_as_far_as_the_log_was_printed(tmp_path: Path) -> None:
    run = numbers()
    log, metrics = run.log(tmp_path / "train.log", MEMORY), run.write(tmp_path)
    of_log = make(log, tmp_path / "log.json")
    for mode in ("margin", "exact", "digits 7"):
        verdict = gate(metrics, of_log, mode)
        assert verdict.passed, verdict.line
    assert [finding.name for finding in verdict.findings if finding.passed] == ["steps", "loss", "grad_norm", "replicas", "time", "memory"]
    off = run.at_step(3, loss=run.records[2].loss * (1 + 2e-6)).write(tmp_path / "off")
    assert not gate(off, of_log, "exact").passed
    # The other way round the log does not say what the baseline knows.
    found = {finding.name for finding in gate(log, make(metrics, tmp_path / "metrics.json")).failures}
    assert found == {"topology", "seed", "data", "tokenizer", "model", "batch", "settings", "samples", "ranks", "memory"}


def test_a_baseline_is_not_made_of_what_is_none(tmp_path: Path, others: Path) -> None:
    for name, run, message in (
        ("nan", numbers().at_step(3, loss=math.nan, skipped=True), "the loss of step 3 is nan"),
        ("norm", numbers().at_step(3, grad_norm=math.nan), "the gradient norm of step 3 is nan, and the step was not skipped"),
    ):
        with pytest.raises(ValueError, match=message):
            make_baseline(read_run(run.write(tmp_path / name)), Settings())
    others.write_text(OTHERS.replace(" | loss: 1.200050E+01", ""))
    with pytest.raises(ValueError, match="the loss of step 2 is missing"):
        make_baseline(read_run(others), Settings())
    with pytest.raises(ValueError, match="8 steps, of which 8 are warm-up"):
        make_baseline(read_run(numbers().write(tmp_path / "short")), Settings(warm_up=8))


def text(content: str | bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def beside(change: Callable[[list[str]], list[str]]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        metrics = numbers().write(path)
        ranks = metrics.with_suffix(".ranks.jsonl")
        ranks.write_text("\n".join(change(ranks.read_text().splitlines())) + "\n")
        return metrics

    return write


ROW = '{"step": 1, "loss": 2.0, "grad_norm": 1.0, "step_ms": 5.0}\n'
BAD_RUNS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: path, "no such file"),
    "empty": (text(""), "is empty; the run has not ended its first step"),
    "blank": (text(" \n\n"), "is empty"),
    "folder": (folder, "a folder without metrics.jsonl"),
    "half a line": (text(ROW[:20]), "not one whole line"),
    "broken inside": (text(ROW + ROW[:20] + "\n" + ROW), "line 2: no JSON object"),
    "other text": (text("hello\n"), "neither metrics.jsonl nor a log"),
    "binary": (text(b"\x80\x04\x95"), "no text (byte 0 is not UTF-8)"),
    "a list": (text("[1, 2]\n"), "neither metrics.jsonl nor a log"),
    "no step": (text(ROW.replace('"step"', '"stop"')), "line 1: step is None, expected a whole number"),
    "loss in words": (text(ROW.replace("2.0", '"low"')), "line 1: loss is 'low', expected a number"),
    "twice": (text(ROW + ROW), "line 2: step 1 follows step 1; give the file of one run"),
    "later schema": (beside(lambda lines: [lines[0].replace('"schema": 1', '"schema": 2'), *lines[1:]]), "schema 2, this Tangram reads 1"),
    "no schema": (beside(lambda lines: lines[1:]), "its first line has no schema"),
    "uneven lists": (beside(lambda lines: [lines[0], lines[1].replace("null, ", "", 1)]), "its lists have different lengths"),
    "broken log": (text(OTHERS.replace("870.0", "fast")), "elapsed time per iteration (ms) is 'fast', expected a number"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_run_that_cannot_be_read_is_one_line_and_status_2(name: str, tmp_path: Path, others: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, message = BAD_RUNS[name]
    run, base = str(write(tmp_path / "bad")), str(make(others, tmp_path / "b.json")) if name != "broken log" else "b.json"
    if name != "broken log":
        assert main(["gate", run, base]) == 2
        shown = capsys.readouterr()
        assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""
    assert main(["baseline", "make", run, "-o", str(tmp_path / "new.json")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "new.json").exists()


def changed(**changes: object) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        content = json.loads(make(numbers().write(path.parent / "run"), path).read_text())
        path.write_text(json.dumps({**content, **changes}))
        return path

    return write


def without(key: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        content = json.loads(make(numbers().write(path.parent / "run"), path).read_text())
        del content[key]
        path.write_text(json.dumps(content))
        return path

    return write


BAD_BASELINES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: path, "no such file"),
    "folder": (folder, "a folder; give the path of a file"),
    "empty": (text(""), "is empty"),
    "not JSON": (text("{"), "no baseline: not JSON"),
    "of another kind": (text('{"a": 1}'), "no baseline: its JSON has no 'tangram_baseline'"),
    "a number": (text("1"), "no baseline: its JSON has no"),
    "from the future": (changed(tangram_baseline=2), "baseline of version 2, this Tangram reads 1; it was written by a later Tangram"),
    "of no version": (changed(tangram_baseline="x"), "baseline of version 'x'"),
    "without steps": (changed(steps=[]), "damaged: no steps"),
    "without facts": (without("facts"), "damaged: 'facts' is missing"),
    "odd facts": (changed(facts=[1]), "damaged: facts is no mapping"),
    "odd settings": (changed(settings={"mode": "margin"}), "damaged: settings must hold mode, margins and warm_up"),
    "odd steps": (changed(steps=[{"step": 1}]), "damaged: 'loss' is missing"),
    "odd memory": (changed(memory={"x": {"0": {"1": None}}}), "damaged: a memory figure is null"),
}


@pytest.mark.parametrize("name", BAD_BASELINES)
def test_a_baseline_that_cannot_be_read_is_one_line_and_status_2(name: str, tmp_path: Path, others: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, message = BAD_BASELINES[name]
    file = write(tmp_path / "bad.json")
    assert main(["gate", str(others), str(file)]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_a_baseline_and_a_run_that_change_places_are_told(tmp_path: Path, others: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make(others, tmp_path / "b.json")
    assert main(["gate", str(file), str(file)]) == 2 and "is a baseline; give the run first" in capsys.readouterr().err
    assert main(["baseline", "make", str(others), "-o", str(file)]) == 2 and "lies there already" in capsys.readouterr().err
    assert main(["baseline", "make", str(others), "-o", str(tmp_path)]) == 2 and "a folder; give the path of the file" in capsys.readouterr().err
