"""A gate fails on each kind of regression, names it, and passes runs that only differ as honest runs do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram.align.gate.baseline import make_baseline, read_baseline, write_baseline
from tangram.align.gate.compare import CHECKS, hold_against
from tangram.align.gate.read_run import read_run
from tangram.align.gate.render import render
from tangram.align.gate.settings import Settings
from tangram.align.gate.verdict import Finding, Verdict
from tangram.cli.main import main
from tests.align.gate_kit import RANKS, STEPS, Numbers, digest_of, numbers, sample_ids


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    return make(numbers().write(folder), folder / "good.json")


def make(run: Path, file: Path, settings: Settings | None = None) -> Path:
    write_baseline(make_baseline(read_run(run), settings or Settings()), file)
    return file


def gate(run: Path, file: Path, options: dict[str, Any] | None = None, ignore: Sequence[str] = ()) -> Verdict:
    base = read_baseline(file)
    return hold_against(read_run(run), base, base.settings.changed(**{"mode": None, "margins": [], "warm_up": None, **(options or {})}), ignore)


def failed(verdict: Verdict) -> dict[str, str]:
    return {finding.name: finding.found for finding in verdict.failures}


def finding(verdict: Verdict, name: str) -> Finding:
    return next(one for one in verdict.findings if one.name == name)


def test_the_same_run_passes_in_every_mode(tmp_path: Path, baseline: Path) -> None:
    run = numbers().write(tmp_path)
    for mode in ("margin", "exact", "digits 17"):
        verdict = gate(run, baseline, {"mode": mode})
        assert verdict.passed and verdict.compared == len(CHECKS), verdict.line
    assert [one.name for one in verdict.findings] == list(CHECKS)


def test_twenty_honest_repeats_raise_no_alarm(tmp_path: Path, baseline: Path) -> None:
    for seed in range(20):
        verdict = gate(numbers(noise=seed).write(tmp_path / str(seed)), baseline)
        assert verdict.passed, f"repeat {seed}: {verdict.line}"


def _moved(run: Numbers) -> Numbers:
    return run.each_step(lambda record: {"samples_digest": digest_of(sample_ids(record.step, first=1))})


def _without_step(run: Numbers, step: int) -> Numbers:
    return replace(run, records=[record for record in run.records if record.step != step])


def _facts(**changes: Any) -> Callable[[Numbers], Numbers]:
    return lambda run: replace(run, facts={**run.facts, **changes})


PLANTED: dict[str, tuple[Callable[[Numbers], Numbers], dict[str, str]]] = {
    "loss 1.1 % up": (lambda run: run.each_step(lambda record: {"loss": 1.011 * record.loss}), {"loss": "(+1.10%); and 7 more steps"}),
    "loss 1.1 % down in one step": (lambda run: run.at_step(5, loss=0.989 * run.records[4].loss), {"loss": "step 5 is 9.8"}),
    "one loss missing": (lambda run: _without_step(run, 4), {"steps": "the run lacks step 4"}),
    "a step too many": (
        lambda run: replace(run, records=[*run.records, replace(run.records[-1], step=9)]),
        {"steps": "the baseline lacks step 9"},
    ),
    "NaN at step 3": (lambda run: run.at_step(3, loss=math.nan, skipped=True), {"loss": "step 3 is nan"}),
    "a gradient that is not finite": (lambda run: run.at_step(3, grad_norm=math.inf, skipped=True), {"grad_norm": "step 3 is inf"}),
    "gradient norm 6 % up": (lambda run: run.at_step(2, grad_norm=1.06 * run.records[1].grad_norm), {"grad_norm": "step 2 is 29.98"}),
    "time 6 % up": (lambda run: run.each_step(lambda record: {"step_ms": 1.06 * record.step_ms}), {"time": "922.2 ms per step, in the baseline"}),
    "time 6 % down": (lambda run: run.each_step(lambda record: {"step_ms": 0.94 * record.step_ms}), {"time": "(-6.0%); if it is meant"}),
    "memory 11 % up on one rank": (
        lambda run: run.each_rank("peak_memory_mb", lambda step, rank, mb: mb * (1.11 if rank == 3 else 1)),
        {"memory": "rank 3: max allocated 28832.0 MB, in the baseline 25974.8 MB (+11.0%)"},
    ),
    "memory 11 % down on one rank": (
        lambda run: run.each_rank("peak_memory_mb", lambda step, rank, mb: mb * (0.89 if rank == 0 else 1)),
        {"memory": "rank 0: max allocated"},
    ),
    "samples moved by one": (_moved, {"samples": f"step 1 and {STEPS - 1} more have other samples"}),
    "a copy that came apart on one rank": (
        # A norm's gradient that rank 1 alone did not sum: nothing that all ranks make together shows it, nor the rank's own total.
        lambda run: run.each_rank("shared_grad_norm", lambda step, rank, norm: norm * (0.9 if rank == 1 and step >= 3 else 1)),
        {"replicas": "step 3: gradient norm of what they share is 1.03923 on rank 1, 1.154701 on rank 0; and 5 more"},
    ),
    "a shard that is wrong on one rank": (
        lambda run: run.each_rank("grad_norm", lambda step, rank, norm: norm * (1.08 if rank == 1 else 1)),
        {"ranks": "rank 1, step 1: grad_norm 20.52, in the baseline 19; and 7 more"},
    ),
    "a loss that one rank alone finds": (
        lambda run: run.each_rank("loss", lambda step, rank, loss: loss * 1.02 if rank == 3 else loss),
        {"replicas": "step 1: loss is ", "ranks": "rank 3, step 1: loss"},
    ),
    "a rank without a loss": (
        lambda run: run.each_rank("loss", lambda step, rank, loss: None if rank == 3 else loss),
        {"replicas": "loss is none on rank 3", "ranks": "rank 3, step 1: loss none"},
    ),
    "another seed": (_facts(seed=43), {"seed": "another seed: 43 in place of 42"}),
    "other data": (_facts(data="sha256:cccc with global_batch_size 8, shuffle True, tail drop"), {"data": "another data: cccc with"}),
    "another tokenizer": (_facts(tokenizer="sha256:dddd"), {"tokenizer": "another tokenizer: dddd in place of bbbb"}),
    "another type": (_facts(dtype="fp32"), {"model": "another dtype: fp32 in place of bf16"}),
    "another schedule": (_facts(schedule={"lr": 2e-5, "lr_decay_style": "cosine"}), {"settings": "another lr: 2e-05 in place of 1e-05"}),
    "another split": (
        _facts(split={"tensor": 4, "pipeline": 1, "virtual": 1, "data_parallel": 1}),
        {"topology": "another tensor: 4 in place of 2, pipeline: 1 in place of 2"},
    ),
    "a rank missing": (
        lambda run: replace(
            run,
            facts={**run.facts, "world_size": 3},
            ranks=[
                replace(row, **{name: getattr(row, name)[:3] for name, value in vars(row).items() if isinstance(value, list)})
                for row in run.ranks  # type: ignore[arg-type]
            ],
        ),
        {"topology": "another world_size: 3", "ranks": "step 1 has 3 ranks, in the baseline 4", "memory": "the run says nothing of rank 3"},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_regression_is_caught_and_named(name: str, tmp_path: Path, baseline: Path) -> None:
    plant, expected = PLANTED[name]
    found = failed(gate(plant(numbers()).write(tmp_path), baseline))
    assert found.keys() == expected.keys()
    for check, text in expected.items():
        assert text in found[check], found[check]
    # What rounds as honest runs do hides it no better.
    assert expected.keys() <= failed(gate(plant(numbers(noise=7)).write(tmp_path / "noisy"), baseline)).keys()


def test_a_run_that_is_just_within_the_margins_passes(tmp_path: Path, baseline: Path) -> None:
    run = numbers().each_step(lambda record: {"loss": 1.0099 * record.loss, "step_ms": 1.049 * record.step_ms, "grad_norm": 0.951 * record.grad_norm})
    run = run.each_rank("peak_memory_mb", lambda step, rank, mb: 1.099 * mb)
    assert gate(run.write(tmp_path), baseline).passed


def test_margins_are_set_per_metric_and_may_be_of_one_side(tmp_path: Path, baseline: Path) -> None:
    run = numbers().each_step(lambda record: {"loss": 1.002 * record.loss, "step_ms": 0.8 * record.step_ms}).write(tmp_path)
    assert failed(gate(run, baseline)).keys() == {"time"}
    assert failed(gate(run, baseline, {"margins": ["time=+0.05", "loss=0.001"]})).keys() == {"loss"}
    assert gate(run, baseline, {"margins": ["time=+0.05"]}).passed
    # The options of the baseline hold where the gate has none.
    file = make(numbers().write(tmp_path / "base"), tmp_path / "own.json", Settings().changed("digits 2", ["time=+0.05"], 3))
    assert read_baseline(file).settings == Settings().changed("digits 2", ["time=+0.05"], 3) and gate(run, file).passed


def test_a_deviation_past_a_tight_margin_is_not_told_as_zero(tmp_path: Path, baseline: Path) -> None:
    for share, told in ((1 + 3e-6, "(+0.0003%)"), (1 - 1.2e-5, "(-0.0012%)")):
        run = numbers().at_step(3, loss=share * numbers().records[2].loss).write(tmp_path / told)
        verdict = gate(run, baseline, {"margins": ["loss=1e-6"]})
        assert told in failed(verdict)["loss"] and told[2:-1] in render(verdict)


def test_digits_count_from_the_first_significant_one(tmp_path: Path) -> None:
    """9.436471, the known seven digits of a published loss, and what differs from it in the seventh and in the eighth."""
    one = numbers().at_step(3, loss=9.436471)
    file = make(one.write(tmp_path), tmp_path / "b.json")
    for value, digits, passes in ((9.436472, 6, True), (9.436472, 7, False), (9.4364713, 7, True), (9.436471, 17, True), (9.437, 4, False)):
        run = one.at_step(3, loss=value).write(tmp_path / f"{value}")
        assert gate(run, file, {"mode": f"digits {digits}"}).passed == passes, (value, digits)


def test_exact_is_exact(tmp_path: Path, baseline: Path) -> None:
    run = numbers()
    for name in ("loss", "grad_norm"):
        there = run.at_step(6, **{name: math.nextafter(getattr(run.records[5], name), math.inf)}).write(tmp_path / name)
        assert failed(gate(there, baseline, {"mode": "exact"})).keys() == {name}
        assert gate(there, baseline, {"mode": "digits 15"}).passed


def test_a_step_that_the_baseline_skipped_is_skipped_again(tmp_path: Path) -> None:
    """As fp16 does while it looks for its loss scale: the norm is infinite, and the loss is a number."""
    skipping = numbers().at_step(1, grad_norm=math.inf, skipped=True)
    file = make(skipping.write(tmp_path), tmp_path / "b.json")
    assert gate(skipping.write(tmp_path / "again"), file).passed
    assert "step 1 is 40, and inf in the baseline, which skipped it" in failed(gate(numbers().write(tmp_path / "other"), file))["grad_norm"]


def test_single_slow_steps_are_no_alarm_but_are_told(tmp_path: Path, baseline: Path) -> None:
    verdict = gate(numbers().at_step(6, step_ms=2000.0).write(tmp_path), baseline)
    assert verdict.passed and "the slowest is step 6, 2000.0 ms" in verdict.notes[0]


def test_another_topology_is_compared_by_what_all_have_alike(tmp_path: Path, baseline: Path) -> None:
    run = PLANTED["another split"][0](numbers()).each_step(lambda record: {"step_ms": 3 * record.step_ms})
    verdict = gate(run.write(tmp_path), baseline, ignore=["topology"])
    assert verdict.passed and [one.name for one in verdict.findings if one.passed is None] == ["topology", "ranks", "time", "memory"]
    assert "the topology is another one" in finding(verdict, "time").found
    assert failed(gate(_moved(run).write(tmp_path / "moved"), baseline, ignore=["topology"])).keys() == {"samples"}
    # At the same one everything else is compared.
    assert finding(gate(numbers().write(tmp_path / "same"), baseline, ignore=["topology"]), "time").passed


def test_a_baseline_of_before_the_whole_split_was_told_is_read_alike(tmp_path: Path) -> None:
    split = {**numbers().facts["split"], "context": 4}
    before = {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2, "expert_model_parallel_size": 2, "sequence_parallel": True}
    now = {"ring": 2, "expert": 2, "sequence_parallel": True, "vision_balance": False}
    file = make(_facts(split={**split, **before})(numbers()).write(tmp_path / "old"), tmp_path / "b.json")
    assert gate(_facts(split={**split, **now})(numbers()).write(tmp_path / "new"), file).passed
    for key, value in (("ring", 4), ("expert", 1), ("sequence_parallel", False), ("vision_balance", True)):
        run = _facts(split={**split, **now, key: value})(numbers()).write(tmp_path / key)
        assert failed(gate(run, file)) == {"topology": f"another {key}: {value} in place of {now[key]}"}


def test_copies_that_came_apart_are_told_by_what_most_ranks_have(tmp_path: Path, baseline: Path) -> None:
    from tangram.training.rank_records import CopiesRecord

    def with_copies(digests: list[str | None], norms: list[float]) -> Numbers:
        told = {"grad_norm": norms, "grad_norm_with": [0] * RANKS, "copies": {"experts": CopiesRecord([0] * RANKS, digests)}}
        return replace(numbers(), ranks=[replace(row, **told) for row in numbers().ranks])  # type: ignore[arg-type]

    def found(name: str, run: Numbers) -> str | None:
        return failed(gate(run.write(tmp_path / name), baseline, ignore=["ranks"])).get("replicas")

    assert found("alike", with_copies(["a"] * 4, [2.0] * 4)) is None
    assert found("not told", with_copies([None] * 4, [2.0] * 4)) is None
    apart = found("apart", with_copies(["b", "a", "a", "c"], [2.0] * 4))
    assert apart == "step 1: parameters of experts on ranks 0, 3 are no longer those on rank 1, of which they are copies; and 7 more"
    norm = found("norm", with_copies(["a"] * 4, [2.1, 2.0, 2.0, 2.0]))
    assert norm == "step 1: norm of the summed gradients is 2.1 on rank 0, 2 on rank 2; and 7 more"
    # An old row tells neither, and a baseline keeps neither.
    kept = json.loads(make(with_copies(["a"] * 4, [2.0] * 4).write(tmp_path / "made"), tmp_path / "b.json").read_text())
    assert kept["ranks"]["1"].keys() == {"loss", "grad_norm", "shared_grad_norm", "shared_with"}


def test_a_run_without_the_file_beside_it_fails_on_what_it_does_not_say(tmp_path: Path, baseline: Path) -> None:
    run = numbers().write(tmp_path)
    (tmp_path / "metrics.ranks.jsonl").unlink()
    verdict = gate(run, baseline)
    assert {"topology", "seed", "data", "ranks", "memory"} < failed(verdict).keys()
    assert "metrics.ranks.jsonl is missing" in verdict.notes[0] and failed(verdict)["seed"] == "the run does not say its own"


def test_a_run_resumed_with_another_seed_is_caught(tmp_path: Path, baseline: Path) -> None:
    from tangram.training.rank_records import RanksFile

    run = numbers()
    path = run.write(tmp_path)
    RanksFile(tmp_path / "metrics.ranks.jsonl", {**run.facts, "seed": 1}, "", resumed_step=4)
    with (tmp_path / "metrics.ranks.jsonl").open() as file:
        heads = [row for row in map(json.loads, file) if "schema" in row]
    assert [head["after_step"] for head in heads] == [0, 4]
    assert failed(gate(path, baseline))["seed"] == "another seed: 1 in place of 42"
    with pytest.raises(ValueError, match="the run was resumed with another seed; a baseline is one run from beginning to end"):
        make_baseline(read_run(path), Settings())


def test_half_a_line_of_a_killed_run_is_left_out_and_told(tmp_path: Path, baseline: Path) -> None:
    path = numbers().write(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.rindex("{") + 40])
    verdict = gate(path, baseline)
    assert failed(verdict) == {"steps": "the run lacks step 8"} and "metrics.jsonl: the last line is cut off" in verdict.notes[0]


def test_the_digest_does_not_depend_on_who_takes_a_sample() -> None:
    whole = digest_of(range(8))
    assert digest_of([7, 3, 1, 5, 0, 2, 4, 6]) == whole != digest_of(range(1, 9))
    from tangram.training.rank_records import WORD, digest

    assert f"{(digest([0, 1, 2, 3]) + digest([4, 5, 6, 7])) % WORD:016x}" == whole
    # Sets with the same sum, which a plain sum of ids would take for one another.
    assert digest_of([0, 3]) != digest_of([1, 2]) and digest_of([1, 1]) != digest_of([2]) and digest_of([5, 5]) != digest_of([5])


def test_the_command_line(tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = numbers(noise=1).write(tmp_path / "good"), PLANTED["samples moved by one"][0](numbers()).write(tmp_path / "bad")
    assert main(["baseline", "make", str(good.parent), "-o", str(tmp_path / "b.json"), "--margin", "loss=0.02"]) == 0
    assert "8 steps of" in (said := capsys.readouterr().out) and "4 ranks; mode margin; margins loss 0.02, grad_norm 0.05" in said
    assert main(["gate", str(good), str(baseline)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("passed: 15 checks against ")
    page, report = tmp_path / "out" / "gate.html", tmp_path / "out" / "gate.json"
    assert main(["gate", str(bad), str(baseline), "--json", str(report), "--html", str(page)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: samples: step 1 and 7 more have other samples"
    content = json.loads(report.read_text())
    assert not content["passed"] and [one["name"] for one in content["findings"] if one["passed"] is False] == ["samples"]
    text = page.read_text()
    assert text.count("<svg") == 6 and "FAILED: samples" in text and "http" not in text and "src=" not in text


def test_the_page_shows_a_number_that_is_none(tmp_path: Path, baseline: Path) -> None:
    from tangram.align.gate.page import render_page

    run = read_run(PLANTED["NaN at step 3"][0](numbers()).write(tmp_path / "<b>"))
    base = read_baseline(baseline)
    text = render_page(hold_against(run, base), base.recorded, run)
    assert "<title>step 3: nan</title>" in text and "<b>/" not in text.replace("&lt;b&gt;", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--margin", "los=1"], "--margin 'los=1' (did you mean 'loss'?): write METRIC=X with one of loss, grad_norm, time, memory"),
        (["--margin", "loss=-1"], "--margin loss '-1' must be a number from 0 up"),
        (["--margin", "loss=nan"], "--margin loss 'nan' must be a number from 0 up"),
        (["--mode", "digits"], "--mode 'digits': write margin, exact, or 'digits N' with N from 1 to 17"),
        (["--mode", "digits 0"], "--mode 'digits 0': write margin"),
        (["--warm-up", "-1"], "--warm-up -1 must be at least 0"),
        (["--ignore", "toplogy"], "--ignore 'toplogy': no such check (did you mean 'topology'?)"),
        ([word for name in CHECKS for word in ("--ignore", name)], "--ignore leaves nothing to compare"),
    ],
)
def test_options_that_cannot_be_used(options: list[str], message: str, tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", str(numbers().write(tmp_path)), str(baseline), *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""
