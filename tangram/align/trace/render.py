"""What a walk found, as text for people and as JSON types."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from tangram.align.trace.find import Finding
from tangram.align.trace.verdict import Verdict
from tangram.align.trace.walk import Step, Walk
from tangram.errors import name_some

WIDTH = 150
WAYS = ("forward", "backward")


def render(finding: Finding, around: int = 4) -> str:
    """The verdict of both directions, each with ``around`` steps before the first difference and after it."""
    lines = [f"{number}: {run}" for number, run in zip(("first ", "second"), finding.runs, strict=True)]
    for way, walked, verdict in zip(WAYS, finding.walks, finding.verdicts, strict=True):
        if way == "backward" and verdict is not None and finding.verdicts[0] is not None:
            first = f"first {verdict.step.name} ({verdict.step.what}), after {verdict.agreed} that agree"
            lines += ["", f"backward: {walked.differing} of {len(walked.steps)} steps differ, {first}; the runs part forward already"]
        else:
            lines += ["", *_direction(way, walked, verdict, around)]
    notes: dict[tuple[str, str], list[str]] = {(note.run, note.why): [] for walked in finding.walks for note in walked.notes}
    for walked in finding.walks:
        for note in walked.notes:
            notes[note.run, note.why].append(note.name)
    if notes:
        lines += ["", *(f"not compared, {run}: {why}: {name_some(sorted(set(names)))}" for (run, why), names in notes.items())]
    lines += ["", finding.summary]
    return "\n".join(lines)


def _direction(way: str, walked: Walk, verdict: Verdict | None, around: int) -> list[str]:
    if verdict is None:
        worst = max((step for step in walked.steps if step.error <= walked.tolerance), key=lambda step: step.error, default=None)
        most = f", none above {worst.error:.2e} ({worst.name}, {worst.what})" if worst is not None else ""
        lines = [f"{way}: {len(walked.steps)} steps agree{most}"]
        if walked.steepest is not None:
            step, growth = walked.steepest
            lines.append(f"{way}: the error grows most, {growth:.1f}-fold, at {step.name} ({step.what})")
        return lines
    assert walked.first is not None
    table = Table(box=None, pad_edge=False)
    for heading in ("", "module or parameter", "what", "rows", "norm", "error"):
        table.add_column(heading, justify="right" if heading in ("rows", "norm", "error") else "left", no_wrap=True)
    for number in range(max(0, walked.first - around), min(len(walked.steps), walked.first + around + 1)):
        step = walked.steps[number]
        mark = ">" if number == walked.first else "" if step.within(walked.tolerance) else "x"
        table.add_row(mark, step.name, step.what, str(step.rows or ""), f"{step.norm:.3e}", step.problem or f"{step.error:.2e}")
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None).print(table)
    text = [line.rstrip() for line in buffer.getvalue().rstrip().splitlines()]
    return [f"{way}: {verdict.agreed} steps agree within {walked.tolerance:g}, then: in {verdict.module}: {verdict.why}", "", *text]


def as_dict(finding: Finding) -> dict[str, Any]:
    """JSON types; a number that is not finite is written as its name."""
    return {
        "passed": finding.passed,
        "first": finding.runs[0],
        "second": finding.runs[1],
        "tolerance": finding.walks[0].tolerance,
        **{
            way: {
                "verdict": _verdict(verdict),
                "notes": [vars(note) for note in walked.notes],
                "steps": [_step(step, walked) for step in walked.steps],
            }
            for way, walked, verdict in zip(WAYS, finding.walks, finding.verdicts, strict=True)
        },
    }


def _verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    if verdict is None:
        return None
    first = {"name": verdict.step.name, "what": verdict.step.what, "error": _number(verdict.step.error)}
    return {"module": verdict.module, "why": verdict.why, "after": list(verdict.before), "agreed": verdict.agreed, "step": first}


def _step(step: Step, walked: Walk) -> dict[str, Any]:
    numbers = {"error": _number(step.error), "norm": _number(step.norm), "rows": step.rows}
    return {"name": step.name, "what": step.what, **numbers, "problem": step.problem, "within": step.within(walked.tolerance)}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
