"""Holds a run against a baseline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from tangram.align.gate.baseline import Baseline
from tangram.align.gate.compare_facts import compare_facts, machine_notes
from tangram.align.gate.compare_ranks import compare_ranks, compare_replicas
from tangram.align.gate.compare_resources import compare_memory, compare_time, slow_steps
from tangram.align.gate.numbers import Tolerance, by_percent, shown
from tangram.align.gate.recorded import Recorded, Step, is_finite
from tangram.align.gate.settings import Settings
from tangram.align.gate.verdict import Finding, Verdict

CHECKS = (
    *("topology", "seed", "data", "tokenizer", "model", "batch", "settings"),
    *("steps", "samples", "loss", "grad_norm", "ranks", "replicas", "time", "memory"),
)
"""Names of all findings, in order."""
OF_A_TOPOLOGY = ("topology", "ranks", "time", "memory")
"""What means nothing at another topology."""


def hold_against(run: Recorded, baseline: Baseline, settings: Settings | None = None, ignore: Collection[str] = ()) -> Verdict:
    """Compare everything that the baseline knows; what it knows and the run does not say is a failure.

    Args:
        settings: those of the baseline if None.
        ignore: of ``CHECKS``, not to be compared. With "topology" a run at another one is compared by what all topologies have alike.
    """
    settings, base = settings or baseline.settings, baseline.recorded
    checks: dict[str, Callable[[], Finding]] = {
        "steps": lambda: _steps(base, run),
        "samples": lambda: _samples(base, run),
        "loss": lambda: _curve("loss", base, run, settings, lambda step: (step.loss, step.loss_unit)),
        "grad_norm": lambda: _curve("grad_norm", base, run, settings, lambda step: (step.grad_norm, step.grad_norm_unit)),
        "ranks": lambda: compare_ranks(base, run, settings),
        "replicas": lambda: compare_replicas(run),
        "time": lambda: compare_time(base, run, settings),
        "memory": lambda: compare_memory(base, run, settings),
        **compare_facts(base, run),
    }
    left = dict.fromkeys(ignore, "left out, as asked")
    if "topology" in ignore and checks["topology"]().passed is False:
        left |= {name: left.get(name, "the topology is another one") for name in OF_A_TOPOLOGY}
    findings = [Finding(name, None, found=left[name]) if name in left else checks[name]() for name in CHECKS]
    notes = [*run.notes, *machine_notes(base, run), *([] if "time" in left else slow_steps(base, run, settings))]
    return Verdict(run.where, base.where, findings, notes)


def _steps(base: Recorded, run: Recorded) -> Finding:
    """The run has the steps of the baseline, no fewer and no more."""
    mine, theirs = set(run.by_step), set(base.by_step)
    words = (f"{len(base.steps)}, {_range(theirs)}", f"{len(run.steps)}, {_range(mine)}")
    faults = []
    if missing := sorted(theirs - mine):
        faults.append(f"the run lacks {_listed(missing)}")
    if more := sorted(mine - theirs):
        faults.append(f"the baseline lacks {_listed(more)}")
    for name in ("loss", "grad_norm"):
        absent = [a.step for a, b in _common(base, run) if getattr(b, name) is None and getattr(a, name) is not None]
        if absent:
            faults.append(f"the run has no {name} at {_listed(absent)}")
    return Finding("steps", not faults, *words, allowed="the same", found="; ".join(faults))


def _range(steps: Collection[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"


def _listed(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps[:5]))}{f' and {len(steps) - 5} more' if len(steps) > 5 else ''}"


def _common(base: Recorded, run: Recorded) -> Iterable[tuple[Step, Step]]:
    mine = run.by_step
    return ((step, mine[step.step]) for step in base.steps if step.step in mine)


def _samples(base: Recorded, run: Recorded) -> Finding:
    """Every step trains on the samples that the baseline's did."""
    known = [step for step in base.steps if step.samples is not None]
    if not known:
        return Finding("samples", None, found="the baseline does not say which samples its steps had")
    pairs = [(mine, theirs) for mine, theirs in _common(base, run) if mine.samples is not None]
    odd = [(mine, theirs) for mine, theirs in pairs if mine.samples != theirs.samples]
    if not odd and pairs:
        return Finding("samples", True, f"{len(known)} steps", f"{len(pairs)} steps", allowed="the same")
    if not odd:
        return Finding("samples", False, found="no step in common")
    mine, theirs = odd[0]
    if theirs.samples is None:
        return Finding("samples", False, str(mine.samples), "not said", allowed="the same", found=f"the run does not say those of step {theirs.step}")
    found = f"step {mine.step} and {len(odd) - 1} more have other samples" if len(odd) > 1 else f"step {mine.step} has other samples"
    return Finding("samples", False, str(mine.samples), theirs.samples, allowed="the same", found=found)


def _curve(name: str, base: Recorded, run: Recorded, settings: Settings, value: Callable[[Step], tuple[float | None, float]]) -> Finding:
    """A number of every step."""
    if all(value(step)[0] is None for step in base.steps):
        return Finding(name, None, found="the baseline has none")
    tolerance = Tolerance.of(settings, name)
    worst, faults, compared = (-1.0, "", ""), [], 0
    theirs_by_step = base.by_step
    for step in run.steps:
        # Where the baseline skipped a step too, a number that is none is what it had.
        there = theirs_by_step.get(step.step)
        if value(step)[0] is not None and not is_finite(value(step)[0]) and (there is None or is_finite(value(there)[0])):
            faults.append(f"step {step.step} is {value(step)[0]}")
    for mine, theirs in _common(base, run):
        (a, unit_a), (b, unit_b) = value(mine), value(theirs)
        if a is None:
            continue
        compared += 1
        if b is None or (is_finite(a) and not is_finite(b)):
            continue
        if not is_finite(a):
            if is_finite(b):
                faults.append(f"step {mine.step} is {shown(b)}, and {a} in the baseline, which skipped it")
            continue
        deviation = (b - a) / abs(a) if a else b - a
        if not tolerance.holds(a, b, unit_a, unit_b):
            faults.append(f"step {mine.step} is {shown(b)}, in the baseline {shown(a)} ({by_percent(deviation, '+')})")
        if abs(deviation) > worst[0]:
            worst = (abs(deviation), shown(a), shown(b))
    if not compared:
        faults.append("no step in common")
    found = "" if not faults else faults[0] + (f"; and {len(faults) - 1} more steps" if len(faults) > 1 else "")
    if not faults and any(value(mine)[0] is not None and value(theirs)[0] is None for mine, theirs in _common(base, run)):
        found, faults = "the run lacks it in some steps", ["missing"]
    return Finding(name, not faults, *worst[1:], "" if worst[0] < 0 else by_percent(worst[0]), str(tolerance), found)
