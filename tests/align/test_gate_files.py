"""Files that a gate reads: logs of others, and files that are damaged or of another kind."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.align.gate.baseline import make_baseline, read_baseline, write_baseline
from tangram.align.gate.compare import hold_against
from tangram.align.gate.read_log import unit
from tangram.align.gate.read_run import read_run
from tangram.align.gate.settings import Settings
from tangram.align.gate.verdict import Verdict
from tangram.cli.main import main
from tangram.training.records import MetricsFile
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


BAR = "\rtraining  33%|###       | 1/3 [00:01<00:02]"
RENDERED: dict[str, Callable[[str], str | bytes]] = {
    "colours": lambda log: log.replace("loss:", "\x1b[1;32mloss\x1b[0m:").replace("iteration ", "\x1b]0;title\x07\x1b[2Kiteration "),
    "a progress bar": lambda log: log.replace("\n", f"\n{BAR}\r"),
    "CRLF": lambda log: log.replace("\n", "\r\n"),
    "a mark of UTF-8": lambda log: "\ufeff" + log,
    "UTF-16": lambda log: log.encode("utf-16"),
    "gzip": lambda log: gzip.compress(log.encode()),
    "gzip in two parts": lambda log: gzip.compress(log[:900].encode()) + gzip.compress(log[900:].encode()),
    "bytes that are no text": lambda log: b"\xff\xe9\n" + log.encode().replace(b"some words", b"some w\xf6rds"),
    "every rank writes every line": lambda log: "".join(f"[{rank}] {line}\n" for line in log.splitlines() for rank in range(3)),
    "two lines in one": lambda log: log.replace("|\n [2025-12-01 10:00:02]", "| [2025-12-01 10:00:02]").replace("23000.0\n[Rank", "23000.0[Rank"),
    "a table in JSON before it": lambda log: '{"model": 1}\n' + log,
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_log_is_read_however_it_was_kept(name: str, others: Path, tmp_path: Path) -> None:
    file, kept = make(others, tmp_path / "b.json"), RENDERED[name](OTHERS)
    (tmp_path / "kept.log").write_bytes(kept if isinstance(kept, bytes) else kept.encode())
    verdict = gate(tmp_path / "kept.log", file, "exact")
    assert verdict.passed and verdict.compared == 5 and not verdict.notes, verdict


SPELLINGS = {"NaN": "nan", "-nan": "nan", "nan(ind)": "nan", "-1.#IND": "nan", "1.#INF": "inf", "-Infinity": "-inf"}


@pytest.mark.parametrize(("text", "value"), SPELLINGS.items())
def test_what_is_no_number_is_known_in_every_spelling(text: str, value: str, others: Path, tmp_path: Path) -> None:
    file = make(others, tmp_path / "b.json")
    others.write_text(OTHERS.replace("1.200050E+01", text))
    found = {finding.name: finding.found for finding in gate(others, file).failures}
    assert found == {"loss": f"step 2 is {value}"}
    others.write_text(OTHERS.replace("1.200050E+01", "1200050e-05"))
    assert gate(others, file).passed


def test_the_last_line_of_a_killed_log_is_left_out(others: Path, tmp_path: Path) -> None:
    """Cut inside the last number, the rest would be another number."""
    file, cut = make(others, tmp_path / "b.json"), OTHERS.rindex("9.436471") + 4
    others.write_text(OTHERS[:cut])
    verdict = gate(others, file)
    assert [finding.found for finding in verdict.failures] == ["the run lacks step 3"] and "the last line is cut off" in verdict.notes[0]
    others.write_text(OTHERS.rstrip("\n"))
    assert gate(others, file).passed


def test_metrics_are_read_compressed_and_with_foreign_line_ends(tmp_path: Path) -> None:
    metrics = numbers().write(tmp_path / "run")
    file = make(metrics, tmp_path / "b.json")
    for name in ("metrics.jsonl", "metrics.ranks.jsonl"):
        text = (tmp_path / "run" / name).read_text()
        (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / f"{name}.gz").write_bytes(gzip.compress(("\ufeff" + text.replace("\n", "\r\n")).encode()))
    verdict = gate(tmp_path / "run", file, "exact")
    assert verdict.passed and verdict.compared == 15, verdict


def test_files_of_two_runs_are_told_apart(tmp_path: Path) -> None:
    run = numbers()
    told = replace(run, ranks=[replace(row, loss_of_all=record.loss) for row, record in zip(run.ranks, run.records, strict=True)])
    path = told.write(tmp_path)
    assert read_run(path).ranks.keys() == set(range(1, 9))
    MetricsFile(path).write(run.records[0])
    assert len(read_run(path).steps) == 1
    MetricsFile(path).write(replace(run.records[0], loss=3.0))
    with pytest.raises(ValueError, match=r"line 2: of another run than metrics.jsonl: the loss of step 1 is 11.\d+ in one and 3.0"):
        read_run(path)


def test_ranks_that_fall_silent_are_told(tmp_path: Path) -> None:
    run = numbers()
    file = make(run.write(tmp_path / "a"), tmp_path / "b.json")
    silent = replace(run, ranks=run.ranks[:5]).write(tmp_path / "c")
    found = {finding.name: finding.found for finding in gate(silent, file).failures}
    assert found == {"ranks": "the run does not say what each rank found in step 6 and 2 more"}


def test_long_runs_are_read_line_by_line(others: Path, tmp_path: Path) -> None:
    """Twice the steps take twice the time: nothing is looked up by going through all of them."""
    from tangram.align.gate.page import MOST_POINTS, render_page

    first, line = OTHERS.splitlines()[0], OTHERS.splitlines()[1]
    others.write_text("\n".join([first, *(line.replace("1/       3", f"{step}/ 10000") for step in range(1, 10001))]) + "\n")
    began = time.process_time()
    file = make(others, tmp_path / "b.json")
    base, run = read_baseline(file), read_run(others)
    verdict = hold_against(run, base)
    text = render_page(verdict, base.recorded, run)
    assert verdict.passed and len(run.steps) == 10000 and time.process_time() - began < 20
    assert text.count(",") < 9 * 2 * MOST_POINTS


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
    "no whole line": (text(OTHERS[: OTHERS.index("1.205116")]), "not one whole line of a step"),
    "damaged gzip": (text(b"\x1f\x8b" + b"x" * 20), "damaged gzip file"),
    "a number too large": (text(ROW.replace("2.0", "1" * 400)), "line 1: loss is '1111"),
    "odd copies": (beside(lambda lines: [lines[0], lines[1][:-1] + ', "copies": {"parameters": 3}}', *lines[2:]]), "copies is not as a run wr"),
    "short copies": (beside(lambda lines: [lines[0], lines[1][:-1] + ', "grad_norm_with": [0, 0]}', *lines[2:]]), "lists have different lengths"),
    "empty file beside": (beside(lambda lines: []), "metrics.ranks.jsonl: is empty"),
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


def edited(section: str, at: int | str, key: str, value: object) -> Callable[[Path], Path]:
    """As by hand."""

    def write(path: Path) -> Path:
        content = json.loads(make(numbers().write(path.parent / "run"), path).read_text())
        content[section][at][key] = value
        path.write_text(json.dumps(content, indent=2))
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
    "a run": (text(ROW + ROW.replace("1,", "2,", 1)), "is a run, and a baseline is wanted; give the run first and the baseline second"),
    "a run of one step": (text(ROW), "is a run, and a baseline is wanted"),
    "a log": (text(OTHERS), "is a run, and a baseline is wanted"),
    "a loss that is none": (edited("steps", 2, "loss", math.nan), "the loss of step 3 is nan; a baseline needs a loss that is a number"),
    "a norm that is none": (edited("steps", 2, "grad_norm", "inf"), "the gradient norm of step 3 is inf, and the step was not skipped"),
    "a time that is none": (edited("steps", 2, "step_ms", -1), "the time of step 3 is -1.0 ms"),
    "a rank's number that is none": (edited("ranks", "3", "grad_norm", [1.0, math.nan, 1.0, 1.0]), "some rank found nan in step 3"),
    "memory that is none": (edited("memory", "max allocated", "2", {"1": math.inf}), "max allocated of rank 2 is inf MB"),
    "a margin that is none": (edited("settings", "margins", "loss", "nan"), "margin loss 'nan' must be a number from 0 up"),
    "steps out of order": (edited("steps", 2, "step", 7), "damaged: step 4 follows step 7"),
    "a number too large": (edited("steps", 2, "loss", 10**400), "loss is '1000"),
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
    file.write_text(json.dumps(json.loads(file.read_text()), indent=4))
    assert main(["gate", str(file), str(file)]) == 2 and "is a baseline; give the run first" in capsys.readouterr().err
    assert main(["baseline", "make", str(others), "-o", str(file)]) == 2 and "lies there already" in capsys.readouterr().err
    assert main(["baseline", "make", str(others), "-o", str(tmp_path)]) == 2 and "a folder; give the path of the file" in capsys.readouterr().err


def test_what_is_read_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = numbers().write(tmp_path / "run")
    before = metrics.read_bytes()
    file = make(metrics, tmp_path / "b.json")
    for run in (metrics, metrics.parent):
        for out in (metrics, metrics.with_suffix(".ranks.jsonl")):
            assert main(["baseline", "make", str(run), "-o", str(out), "--force"]) == 2
            assert "the same file as RUN, which it would replace; give another name" in capsys.readouterr().err
    for options in (["--json", str(metrics)], ["--html", str(file)], ["--json", str(tmp_path / "x"), "--html", str(tmp_path / "x")]):
        assert main(["gate", str(metrics), str(file), *options]) == 2
        assert "which it would replace" in capsys.readouterr().err
    assert main(["baseline", "make", str(metrics), "-o", "/dev/null", "--force"]) == 2 and "no regular file" in capsys.readouterr().err
    assert main(["baseline", "make", str(metrics), "-o", str(file / "below.json")]) == 2 and "b.json: File exists" in capsys.readouterr().err
    assert metrics.read_bytes() == before


def test_a_replay_that_is_refused_leaves_the_earlier_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline, earlier = tmp_path / "b.json", tmp_path / "replay" / "metrics.jsonl"
    assert main(["baseline", "make", str(numbers().write(tmp_path / "run")), "-o", str(baseline)]) == 0
    earlier.parent.mkdir()
    earlier.write_text("{}")
    assert main(["replay", str(baseline), "-o", str(earlier.parent), "--force"]) == 2
    assert "the baseline" in capsys.readouterr().err
    assert earlier.read_text() == "{}"
