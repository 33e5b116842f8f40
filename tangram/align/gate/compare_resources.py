"""Time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from tangram.align.gate.numbers import Tolerance, in_percent
from tangram.align.gate.recorded import Recorded
from tangram.align.gate.settings import Mode, Settings
from tangram.align.gate.verdict import Finding

RESOURCES = Mode("margin")
"""No mode makes time or memory repeat itself bit for bit."""


def times(run: Recorded, warm_up: int) -> list[float]:
    """Milliseconds of the steps after the warm-up."""
    return [step.step_ms for step in run.steps[warm_up:] if step.step_ms is not None]


def compare_time(base: Recorded, run: Recorded, settings: Settings) -> Finding:
    """The median over the steps after the warm-up: one slow step is no slower run."""
    theirs, mine = times(base, settings.warm_up), times(run, settings.warm_up)
    margin = settings.margins["time"]
    if not theirs:
        return Finding("time", None, found="the baseline has no times after its warm-up")
    if not mine:
        found = f"the run has no times after {settings.warm_up} warm-up steps"
        return Finding("time", False, f"{median(theirs):.1f} ms", "none", "", in_percent(margin), found)
    before, now = median(theirs), median(mine)
    holds = Tolerance(RESOURCES, margin).holds(before, now)
    deviation = (now - before) / before if before else now
    found = "" if holds else f"{now:.1f} ms per step, in the baseline {before:.1f} ms ({deviation:+.1%})"
    if not holds and deviation < 0:
        found += "; if it is meant to be faster, make a new baseline"
    return Finding("time", holds, f"{before:.1f} ms", f"{now:.1f} ms", f"{deviation:+.1%}", in_percent(margin), found)


def slow_steps(base: Recorded, run: Recorded, settings: Settings) -> list[str]:
    """A note where single steps are so slow that the mean is past the margin and the median does not show it."""
    theirs, mine = times(base, settings.warm_up), times(run, settings.warm_up)
    if not theirs or not mine:
        return []
    holds = Tolerance(RESOURCES, settings.margins["time"]).holds
    if holds(fmean(theirs), fmean(mine)) or not holds(median(theirs), median(mine)):
        return []
    slowest = max(run.steps[settings.warm_up :], key=lambda step: step.step_ms or 0.0)
    return [
        f"the mean time of a step is {fmean(mine):.1f} ms, in the baseline {fmean(theirs):.1f} ms, while the medians agree: single steps differ "
        f"(the slowest is step {slowest.step}, {slowest.step_ms:.1f} ms)"
    ]


def compare_memory(base: Recorded, run: Recorded, settings: Settings) -> Finding:
    """Every figure of every rank, at the last step that both tell it for."""
    margin = settings.margins["memory"]
    tolerance = Tolerance(RESOURCES, margin)
    if not base.memory:
        return Finding("memory", None, found="the baseline has none")
    figures = [figure for figure in base.memory if figure in run.memory]
    if not figures:
        others = ", ".join(run.memory) or "none"
        return Finding("memory", False, ", ".join(base.memory), others, "", in_percent(margin), f"the run has no such figures ({others})")
    faults: list[str] = []
    worst = (-1.0, "", "", "")
    for figure in figures:
        before, now = base.memory[figure], run.memory[figure]
        if missing := sorted(before.keys() - now.keys()):
            faults.append(f"the run says nothing of {_ranks(missing)}")
        # A log tells the memory of some ranks only.
        if (more := sorted(now.keys() - before.keys())) and base.kind == run.kind:
            faults.append(f"the baseline says nothing of {_ranks(more)}")
        for rank in sorted(before.keys() & now.keys()):
            common = before[rank].keys() & now[rank].keys()
            if not common:
                faults.append(f"rank {rank} has its figure at another step")
                continue
            a, b = before[rank][max(common)], now[rank][max(common)]
            deviation = (b - a) / a if a else b
            if not tolerance.holds(a, b):
                faults.append(f"rank {rank}: {figure} {b:.1f} MB, in the baseline {a:.1f} MB ({deviation:+.1%})")
            if abs(deviation) > worst[0]:
                worst = (abs(deviation), f"{a:.1f} MB", f"{b:.1f} MB", f"{deviation:+.1%} on rank {rank}")
    found = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
    return Finding("memory", not faults, *worst[1:], in_percent(margin), found)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:5]))}{f' and {len(ranks) - 5} more' if len(ranks) > 5 else ''}"
