"""Where two traces part, and what that says of the fault."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tangram.align.trace.read import Event, Trace
from tangram.align.trace.walk import Step, Walk

ENDS = {"output", "grad_input"}
"""Events with which a module has done its work, forward and backward."""


@dataclass(frozen=True)
class Verdict:
    """The first difference of one direction.

    Args:
        module: in which the fault lies.
        step: that differs first.
        before: modules that had just given what both agree on, where the fault lies between them and the step.
        why: in a sentence.
        agreed: how many steps before agree.
    """

    module: str
    step: Step
    before: tuple[str, ...]
    why: str
    agreed: int


def judge(walked: Walk, ours: Trace, theirs: Trace) -> Verdict | None:
    """None: the traces agree."""
    if walked.first is None:
        return None
    step, agreed = walked.steps[walked.first], walked.steps[: walked.first]
    moved = "" if step.problem else _moved(step, ours, theirs)
    module, before, why = (step.name, (), moved) if moved else _judge(step, [earlier.event for earlier in agreed])
    return Verdict(module, step, before, why, len(agreed))


def _judge(step: Step, agreed: Sequence[Event]) -> tuple[str, tuple[str, ...], str]:
    name, what = step.event
    if step.problem:
        return (name.rpartition(".")[0] if what in ("weight", "gradient") else name), (), step.problem
    if what == "weight":
        return name.rpartition(".")[0], (), f"its parameter {name.rpartition('.')[2]} differs"
    if what == "gradient":
        owner = name.rpartition(".")[0]
        known = (owner, "grad_output") in agreed
        reason = "what it takes in and the gradient of what it gives agree, so the sum over tokens or over ranks differs" if known else "it differs"
        return owner, (), f"gradient of {name}: {reason}"
    inside = _last(event for event in agreed if event[0].startswith(f"{name}."))
    if what in ENDS:
        begun = "its input" if what == "output" else "the gradient of its output"
        if not inside:
            weights = [event for event in agreed if event[1] == "weight" and event[0].rpartition(".")[0] == name]
            parts = f"{begun} and its {'parameters agree' if weights else 'place agree'}" if what == "output" else f"{begun} agrees"
            return name, (), f"{parts}, so it computes otherwise" + (" backward" if what == "grad_input" else "")
        return name, inside, f"{begun} and all that its modules compute agree; the fault lies after {', '.join(inside)}"
    scope = name.rpartition(".")[0]
    siblings: tuple[str, ...] = ()
    while scope:
        siblings = _last(event for event in agreed if event[0].startswith(f"{scope}."))
        if siblings:
            break
        scope = scope.rpartition(".")[0]
    if not siblings:
        return name, (), "nothing is recorded before it" + ("; look at the loss, its scale and its labels" if what == "grad_output" else "")
    scope = _without_list(scope, name)
    short = [one.removeprefix(f"{scope}.") for one in (*siblings, name)]
    lies = f"between {', '.join(short[:-1])} and {short[-1]}"
    kinds = " (rotary positions, scale, mask)" if scope.endswith(("attn", "attention")) else ""
    what_agrees = "what these give agrees" if what == "input" else "the gradient that these hand back agrees"
    return scope, siblings, f"{lies}{kinds}: {what_agrees}, what {short[-1]} gets does not"


def _last(events: Iterable[Event]) -> tuple[str, ...]:
    """The last modules of a run of events that have done their work, without those that lie in another of them; of a list of layers the last; up
    to four."""
    done = [name for name, what in events if what in ENDS]
    outer = [name for name in done if not any(name.startswith(f"{other}.") for other in done)]
    last = {re.sub(r"\.\d+$", ".", name): name for name in outer}
    return tuple(name for name in dict.fromkeys(reversed(outer)) if name in last.values())[:4][::-1]


def _without_list(scope: str, name: str) -> str:
    """A list of layers computes nothing; what holds it does."""
    rest = name.removeprefix(f"{scope}.").partition(".")[0]
    return scope.rpartition(".")[0] if rest.isdigit() and "." in scope else scope


def _moved(step: Step, ours: Trace, theirs: Trace) -> str:
    """That one of the runs comes to the module after others beside it than the other run; empty: it does not."""
    if step.what != "input" or step.event not in ours.order or step.event not in theirs.order:
        return ""
    first, second = (_before(step.event, trace, set(ours.order) & set(theirs.order)) for trace in (ours, theirs))
    if first == second:
        return ""
    names = [", ".join(sorted(name.rpartition(".")[2] for name in found)) or "nothing beside it" for found in (first, second)]
    return f"the runs come to it at different places: the first after {names[0]}, the second after {names[1]}"


def _before(event: Event, trace: Trace, shared: set[Event]) -> set[str]:
    """Modules beside an event's that have given their output before it."""
    scope, at = event[0].rpartition(".")[0], trace.order[event]
    return {name for name, what in shared if what == "output" and name.rpartition(".")[0] == scope and trace.order[name, what] < at}
