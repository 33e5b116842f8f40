"""Two traces held against each other, event by event in the order in which they happened."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tangram.align.compare import TOLERANCES
from tangram.align.trace.read import Event, Record, Trace
from tangram.align.trace.store import What
from tangram.backends.dtypes import DTYPES
from tangram.errors import CheckpointError

FORWARD: tuple[What, ...] = ("input", "output", "weight")


@dataclass(frozen=True)
class Step:
    """One event of both traces.

    Args:
        error: norm-wise relative, over the rows that both have; NaN and infinite where a number is none.
        norm: of the first trace's.
        rows: that were compared; 0: of a parameter.
        problem: why the two cannot be held against each other; empty: they can.
        rounding: a difference whose norm is not larger is rounding.
        slack: how many times the tolerance the error may be.
    """

    name: str
    what: What
    error: float
    norm: float = 0.0
    rows: int = 0
    problem: str = ""
    rounding: float = 0.0
    slack: float = 1.0

    @property
    def event(self) -> Event:
        return self.name, self.what

    def within(self, tolerance: float) -> bool:
        """False also for NaN."""
        if self.problem:
            return False
        return self.error <= tolerance * self.slack or (self.error * self.norm if self.norm else self.error) <= self.rounding


@dataclass(frozen=True)
class Note:
    """What only one side has, and the reason that ``run`` gives for not having it."""

    name: str
    run: str
    why: str


@dataclass(frozen=True)
class Walk:
    """All events of one direction.

    Args:
        steps: in order.
        notes: what only one side has, for a reason that it gives.
        floor: what one rounding in the coarser type of the two makes.
    """

    steps: tuple[Step, ...]
    tolerance: float
    notes: tuple[Note, ...] = ()
    floor: float = 0.0

    @property
    def first(self) -> int | None:
        """Number of the first step that differs."""
        return next((number for number, step in enumerate(self.steps) if not step.within(self.tolerance)), None)

    @property
    def steepest(self) -> tuple[Step, float] | None:
        """Of runs in 16 bits, whose tolerance is wide: the activation whose error is the largest multiple of those before it, and how large."""
        if self.floor <= torch.finfo(torch.float32).eps:
            return None
        found, most = None, self.floor
        for step in self.steps:
            if step.what in ("input", "output") and math.isfinite(step.error):
                if found is None or step.error / most > found[1]:
                    found = step, step.error / most
                most = max(most, step.error)
        return found

    @property
    def differing(self) -> int:
        return sum(not step.within(self.tolerance) for step in self.steps)


def walk(ours: Trace, theirs: Trace, tolerance: float | None = None) -> tuple[Walk, Walk]:
    """Forward and backward.

    Args:
        ours: whose order counts, and whose norms errors are relative to.
        tolerance: None: that of the coarser type of the two, see ``tangram.align.compare.TOLERANCES``.

    Raises:
        CheckpointError: a trace cannot be read, or they have no module in common.
    """
    limit = max(TOLERANCES[trace.dtype] for trace in (ours, theirs)) if tolerance is None else tolerance
    floor = max(torch.finfo(DTYPES[trace.dtype]).eps for trace in (ours, theirs))
    # A weight passes one rounding and no computing.
    weights = min(1.0, max(floor, TOLERANCES["fp32"]) / limit) if tolerance is None else 1.0
    events = [*ours.order, *ours.parameters]
    if not any(event in theirs for event in events):
        raise CheckpointError(f"{ours.folder} and {theirs.folder}: traces of other models, or of other modules: they have no record in common")
    events += [event for event in [*theirs.order, *theirs.parameters] if event not in ours]
    walks = []
    for forward in (True, False):
        chosen = [event for event in events if (event[1] in FORWARD) == forward]
        notes, steps = [], []
        for event in _in_order(chosen, ours.order, theirs.order, forward):
            if event in ours and event in theirs:
                steps.append(replace(_compare(event, ours.read(event), theirs.read(event)), slack=weights if event[1] == "weight" else 1.0))
                continue
            lacking = theirs if event in ours else ours
            why = _why(event, lacking, ours if lacking is theirs else theirs)
            if why is None:
                problem = f"{lacking.run} has no {event[1]} of it" + ("" if lacking is theirs else ", and the other has")
                steps.append(Step(*event, error=float("nan"), problem=problem))
            elif why:
                notes.append(Note(event[0], lacking.run, why))
        walks.append(Walk(_with_rounding(steps), limit, tuple(dict.fromkeys(notes)), floor))
    return walks[0], walks[1]


def _why(event: Event, lacking: Trace, other: Trace) -> str | None:
    """Why a trace lacks an event: its own reason, or ``""`` for a module that other modules make up and which runs need not have; else None."""
    name, what = event
    parameter = what in ("weight", "gradient")
    if (name.rpartition(".")[0] if parameter else name) not in lacking.chosen:
        return "not chosen by --trace-only (tools.trace.only)"
    if parameter:
        return "it is frozen" if what == "gradient" and name in lacking.frozen else None
    if name in lacking.skipped:
        return lacking.skipped[name]
    if what == "grad_input" and (name, "input") in lacking:
        # A fused module has one for all its parts, and what needs no gradient has none; those around it are compared.
        return ""
    inside = [full for full, kind in other.parameters if kind == "weight" and full.startswith(f"{name}.")]
    composed = any("." in full.removeprefix(f"{name}.") for full in inside)
    if what == "grad_output" and (name, "output") in lacking:
        return "nothing before it is trained" if lacking.frozen else "" if composed else None
    return "" if composed and (name, "output") not in lacking else None


Order = Mapping[Event, tuple[int, int]]


def _in_order(events: Sequence[Event], ours: Order, theirs: Order, forward: bool) -> list[Event]:
    """Activations as they came in the first run, and what the second alone has after what came before it there; a module's weights before its
    output, and gradients of them after its output's gradient."""
    known = set(events)
    sequence = sorted((event for event in events if event in ours), key=lambda event: ours[event])
    places = {event: float(number) for number, event in enumerate(sequence)}
    at = -1.0
    for event in sorted((event for event in theirs if event in known), key=lambda event: theirs[event]):
        at = places.setdefault(event, at + 0.001)
    for event in events:
        if event not in places:
            places[event] = _place(event[0], places, forward)
    return sorted(events, key=lambda event: (places[event], event not in ours, event))


def _place(parameter: str, places: Mapping[Event, float], forward: bool) -> float:
    """Of a parameter among activations: at its module, or, where that is not recorded or has others in it, at the next one around."""
    module, own = parameter.rpartition(".")[0], True
    while module:
        composed = any(name.startswith(f"{module}.") for name, _ in places)
        if forward:
            at = places.get((module, "input"), places.get((module, "output")))
            if at is not None:
                # After the input; before the output where that is all there is.
                return at + (0.5 if (module, "input") in places else -0.5)
        elif own and not composed and (module, "grad_output") in places:
            return places[module, "grad_output"] + 0.5
        elif (module, "grad_input") in places:
            return places[module, "grad_input"] - 0.5
        elif (module, "grad_output") in places and not composed:
            return places[module, "grad_output"] + 0.5
        module, own = module.rpartition(".")[0], False
    return -1.0 if forward else float(len(places))


def _compare(event: Event, ours: Record, theirs: Record) -> Step:
    what: What = event[1]
    for record, whose in ((ours, "the first"), (theirs, "the second")):
        if record.missing:
            return Step(*event, error=float("nan"), problem=f"{whose} lacks {record.missing} of {record.values.numel()} elements")
    a, b = ours.values, theirs.values
    if a.shape[1:] != b.shape[1:] or (ours.keys is None and a.shape != b.shape):
        return Step(*event, error=float("nan"), problem=f"shapes {list(a.shape)} and {list(b.shape)}")
    if ours.keys is not None and theirs.keys is not None and not torch.equal(ours.keys, theirs.keys):
        if not (ours.partial or theirs.partial):
            only = _only(ours.keys, theirs.keys)
            return Step(*event, error=float("nan"), problem=f"{only[0]} rows are in the first alone, {only[1]} in the second alone")
        a, b = _common(ours, theirs)
        if not len(a) and len(ours.values) and len(theirs.values):
            return Step(*event, error=float("nan"), problem="they have no row in common")
    norm = float(torch.linalg.vector_norm(a.double()))
    gap = float(torch.linalg.vector_norm(b.double() - a.double()))
    error = max([gap / norm if norm > 0 else gap, ours.disagreement, theirs.disagreement], key=lambda value: (value != value, value))
    return Step(event[0], what, error, norm, len(a) if ours.keys is not None else 0)


def _only(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[int, int]:
    both = len(torch.unique(torch.cat([ours, theirs]), dim=0))
    return both - len(theirs), both - len(ours)


def _common(ours: Record, theirs: Record) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the rows that both have, in one order."""
    assert ours.keys is not None and theirs.keys is not None
    _, places = torch.unique(torch.cat([ours.keys, theirs.keys]), dim=0, return_inverse=True)
    mine, other = places[: len(ours.keys)], places[len(ours.keys) :]
    return ours.values[torch.isin(mine, other)], theirs.values[torch.isin(other, mine)]


def _with_rounding(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Gradients that vanish by cancellation are rounding of terms as large as the others; see ``tangram.align.compare``."""
    known = list(steps)
    for kinds in (("gradient",), ("grad_input", "grad_output")):
        norms = [step.norm for step in known if step.what in kinds and step.norm > 0]
        if norms:
            least = torch.finfo(torch.float32).eps * statistics.median(norms)
            known = [replace(step, rounding=least) if step.what in kinds else step for step in known]
    return tuple(known)
