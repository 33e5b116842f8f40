"""What each rank found: against the same rank of the baseline, and against the ranks that must find the same."""

from __future__ import annotations

from tangram.align.gate.numbers import Tolerance, by_percent, shown
from tangram.align.gate.recorded import RankStep, Recorded, is_finite
from tangram.align.gate.settings import Settings
from tangram.align.gate.verdict import Finding

REPLICA_LIMIT = 1e-3
"""Relative. Copies go through the same operations on the same numbers, so nothing but a kernel whose sums come in no order sets them apart, by less
than this; a gradient that one rank did not add up is off by much more."""


def compare_ranks(base: Recorded, run: Recorded, settings: Settings) -> Finding:
    """Loss and gradient norm of each rank, at the steps that both tell. A fault of one rank among many hardly moves what all make together."""
    if not base.ranks:
        return Finding("ranks", None, found="the baseline does not say what each rank found")
    if not run.ranks:
        return Finding("ranks", False, f"{len(_first(base).grad_norm)} ranks", "not said", found="the run does not say what each rank found")
    before, now = len(_first(base).grad_norm), len(_first(run).grad_norm)
    sizes = (f"{before} ranks", f"{now} ranks")
    limits = {"loss": Tolerance.of(settings, "loss"), "grad_norm": Tolerance.of(settings, "grad_norm")}
    allowed = " / ".join(map(str, limits.values())) if settings.mode.name == "margin" else str(settings.mode)
    common = sorted(base.ranks.keys() & run.ranks.keys())
    faults = [] if common else ["no step in common"]
    worst = 0.0
    for step in common:
        theirs, mine = base.ranks[step], run.ranks[step]
        if len(theirs.grad_norm) != len(mine.grad_norm):
            faults.append(f"step {step} has {len(mine.grad_norm)} ranks, in the baseline {len(theirs.grad_norm)}")
            continue
        for name, tolerance in limits.items():
            for rank, (a, b) in enumerate(zip(getattr(theirs, name), getattr(mine, name), strict=True)):
                if a is None and b is None:
                    continue
                if a is None or b is None or not tolerance.holds(a, b):
                    faults.append(f"rank {rank}, step {step}: {name} {shown(b)}, in the baseline {shown(a)}")
                if is_finite(a) and is_finite(b):
                    assert a is not None and b is not None
                    worst = max(worst, abs(b - a) / abs(a) if a else abs(b))
    found = "" if not faults else faults[0] + (f"; and {len(faults) - 1} more" if len(faults) > 1 else "")
    return Finding("ranks", not faults, *sizes, by_percent(worst), allowed, found)


def _first(run: Recorded) -> RankStep:
    return run.ranks[min(run.ranks)]


def compare_replicas(run: Recorded) -> Finding:
    """Gradients that several ranks have copies of, and losses that they each compute, are the same on all of them; no baseline is needed for that."""
    worst, faults, groups = 0.0, [], 0
    for step, ranks in sorted(run.ranks.items()):
        for members in _groups(ranks):
            groups = max(groups, len(members))
            for name, values in (("gradient norm of what they share", ranks.shared_grad_norm), ("loss", ranks.loss)):
                first = values[members[0]]
                for rank in members[1:]:
                    gap = _gap(first, values[rank])
                    worst = max(worst, gap)
                    if gap > REPLICA_LIMIT:
                        faults.append(f"step {step}: {name} is {shown(values[rank])} on rank {rank}, {shown(first)} on rank {members[0]}")
    if not groups:
        return Finding("replicas", None, found="no two ranks hold copies of the same parameters, or the run does not say")
    found = "" if not faults else faults[0] + (f"; and {len(faults) - 1} more" if len(faults) > 1 else "")
    return Finding("replicas", not faults, "", f"groups of {groups}", by_percent(worst), f"{REPLICA_LIMIT:.1%}", found)


def _groups(ranks: RankStep) -> list[list[int]]:
    """Ranks that have copies of the same parameters, where there are several."""
    members: dict[int, list[int]] = {}
    for rank, (group, shared) in enumerate(zip(ranks.shared_with, ranks.shared_grad_norm, strict=True)):
        if shared is not None:
            members.setdefault(group, []).append(rank)
    return [group for group in members.values() if len(group) > 1]


def _gap(first: float | None, other: float | None) -> float:
    if first is None or other is None:
        return 0.0 if first is other else float("inf")
    if not (is_finite(first) and is_finite(other)):
        return 0.0 if is_finite(first) == is_finite(other) else float("inf")
    largest = max(abs(first), abs(other))
    return abs(first - other) / largest if largest else 0.0
