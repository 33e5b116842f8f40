"""What each rank found: against the same rank of the baseline, and against the ranks that must find the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from tangram.align.gate.numbers import Tolerance, by_percent, shown
from tangram.align.gate.recorded import RankStep, Recorded, is_finite
from tangram.align.gate.settings import Settings
from tangram.align.gate.verdict import Finding

REPLICA_LIMIT = 1e-3
"""Relative. Copies go through the same operations on the same numbers, so nothing but a kernel whose sums come in no order sets them apart, by less
than this; a gradient that one rank did not add up is off by much more."""

SHARED = "gradient norm of what they share"
KINDS = {"parameters": "parameters", "experts": "parameters of experts", "whole": "parameters that are not sharded"}
"""Of copies, in words."""


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
    if common and (missing := sorted((base.ranks.keys() & run.by_step.keys()) - run.ranks.keys())):
        faults.append(f"the run does not say what each rank found in step {missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}")
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


@dataclass(frozen=True)
class Replicas:
    """A value that some ranks have alike.

    Args:
        exact: it is a digest: equal, or the copies are apart.
    """

    what: str
    ranks: Sequence[int]
    values: Sequence[float | str | None]
    exact: bool = False

    @cached_property
    def right(self) -> int:
        """Place of the one that the others are held against: the first of two, else what most have, or the one in the middle."""
        if len(self.values) == 2:
            return 0
        if self.exact:
            return self.values.index(Counter(self.values).most_common(1)[0][0])
        numbers = [value if isinstance(value, float) and is_finite(value) else inf for value in self.values]
        return sorted(range(len(numbers)), key=numbers.__getitem__)[(len(numbers) - 1) // 2]

    @cached_property
    def gaps(self) -> list[float]:
        """How far each rank's is from that one, relatively."""
        return [_gap(self.values[self.right], value) for value in self.values]

    def fault(self) -> str:
        """What is wrong, in words; "" where nothing is."""
        odd = [at for at, gap in enumerate(self.gaps) if gap > REPLICA_LIMIT]
        if not odd:
            return ""
        right = self.ranks[self.right]
        if self.exact:
            named = _named([self.ranks[at] for at in odd])
            return f"{self.what} on {named} are no longer those on rank {right}, of which they are copies"
        worst = max(odd, key=self.gaps.__getitem__)
        value, of = self.values[worst], self.values[self.right]
        assert not isinstance(value, str) and not isinstance(of, str)
        others = f", as wrong on {_named([self.ranks[at] for at in odd if at != worst])}" if len(odd) > 1 else ""
        return f"{self.what} is {shown(value)} on rank {self.ranks[worst]}{others}, {shown(of)} on rank {right}"


def compare_replicas(run: Recorded) -> Finding:
    """What several ranks have copies of is the same on all of them; no baseline is needed for that.

    Tensor-parallel ranks: gradients of what they share, and the loss that each computes. Data- and context-parallel ones, and copies of sharded
    weights: parameters, to the bit, and gradients where each holds all of them.
    """
    worst, faults, groups = 0.0, [], 0
    for step, ranks in sorted(run.ranks.items()):
        every = _replicas(ranks)
        groups = max([groups, *(len(one.ranks) for one in every)])
        worst = max([worst, *(max(one.gaps) for one in every if not one.exact)])
        faults += [f"step {step}: {fault}" for one in every if (fault := one.fault())]
    if not groups:
        return Finding("replicas", None, found="no two ranks hold copies of the same parameters, or the run does not say")
    found_all = "" if not faults else faults[0] + (f"; and {len(faults) - 1} more" if len(faults) > 1 else "")
    return Finding("replicas", not faults, "", f"groups of {groups}", by_percent(worst), f"{REPLICA_LIMIT:.1%}", found_all)


def _replicas(ranks: RankStep) -> list[Replicas]:
    """All that ranks have copies of in one step."""
    found = []
    for group in _groups([group if shared is not None else None for group, shared in zip(ranks.shared_with, ranks.shared_grad_norm, strict=True)]):
        found.append(Replicas(SHARED, group, [ranks.shared_grad_norm[rank] for rank in group]))
        found.append(Replicas("loss", group, [ranks.loss[rank] for rank in group]))
    for group in _groups(ranks.grad_norm_with):
        found.append(Replicas("norm of the summed gradients", group, [ranks.grad_norm[rank] for rank in group]))
    for kind, (held_with, digests) in ranks.copies.items():
        for group in _groups([with_ if digest is not None else None for with_, digest in zip(held_with, digests, strict=True)]):
            found.append(Replicas(KINDS.get(kind, kind), group, [digests[rank] for rank in group], exact=True))
    return found


def _groups(numbers: Sequence[int | None]) -> list[list[int]]:
    """Ranks that have the same number, where there are several."""
    members: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        if number is not None:
            members.setdefault(number, []).append(rank)
    return [group for group in members.values() if len(group) > 1]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:5]))}{f' and {len(ranks) - 5} more' if len(ranks) > 5 else ''}"


def _gap(first: float | str | None, other: float | str | None) -> float:
    if isinstance(first, str) or isinstance(other, str):
        return 0.0 if first == other else inf
    if first is None or other is None:
        return 0.0 if first is other else inf
    if not (is_finite(first) and is_finite(other)):
        return 0.0 if is_finite(first) == is_finite(other) else inf
    largest = max(abs(first), abs(other))
    return abs(first - other) / largest if largest else 0.0
