"""A verdict as a page, with the curves of both runs side by side."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from tangram.align.gate.recorded import Recorded, Step, is_finite
from tangram.align.gate.render import mark
from tangram.align.gate.verdict import Verdict
from tangram.report_page import page, section

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 220, 64, 24, 10
"""Of a curve, in the units of its SVG."""
MOST_POINTS = 3000
STYLE = """
.curves { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }
svg.curve { width: 100%; height: auto; background: #fbfcfe; border: 1px solid var(--line); border-radius: 8px; }
svg.curve text { font: 11px system-ui, sans-serif; fill: var(--soft); } svg.curve line { stroke: var(--line); }
svg.curve polyline { fill: none; stroke-width: 2; } svg.curve .baseline { stroke: var(--soft); } svg.curve .run { stroke: var(--accent); }
svg.curve circle { fill: var(--bad); }
td { overflow-wrap: anywhere; } h3 { margin: 12px 0 6px; font-size: 1rem; }
"""
CURVES: Mapping[str, Callable[[Step], float | None]] = {
    "loss": lambda step: step.loss,
    "gradient norm": lambda step: step.grad_norm,
    "time of a step, ms": lambda step: step.step_ms,
}


def render_page(verdict: Verdict, base: Recorded, run: Recorded) -> str:
    """The HTML: verdict, both curves of each number on one scale, and the table."""
    rows = [
        f"<tr><td>{html.escape(finding.name)}</td><td class={'wrong' if finding.passed is False else 'right' if finding.passed else 'soft'}>"
        f"{mark(finding)}</td>"
        + "".join(f"<td>{html.escape(text)}</td>" for text in (finding.baseline, finding.run, finding.deviation))
        + f"<td>{html.escape(finding.allowed)}</td><td>{html.escape(finding.found)}</td></tr>"
        for finding in verdict.findings
    ]
    head = "<tr><th>checked</th><th></th><th>baseline</th><th>run</th><th>differ by</th><th>allowed</th><th></th></tr>"
    sections = [
        section("Verdict", f"<p class={'right' if verdict.passed else 'wrong'}>{html.escape(verdict.line)}</p>"),
        section("Curves", "".join(_pair(name, value, base.steps, run.steps) for name, value in CURVES.items())),
        section("What was compared", f"<table>{head}{''.join(rows)}</table>"),
    ]
    if verdict.notes:
        sections.append(section("Notes", "".join(f"<p>{html.escape(note)}</p>" for note in verdict.notes)))
    return page("Tangram gate", f"{verdict.run} against {verdict.baseline}", sections, style=STYLE)


def _pair(name: str, value: Callable[[Step], float | None], base: Sequence[Step], run: Sequence[Step]) -> str:
    """The baseline's curve on the left, the run's on the right, on the same axes; the right one has the left one behind it."""
    series = [_thinned([(step.step, value(step)) for step in steps]) for steps in (base, run)]
    finite = [(step, number) for points in series for step, number in points if number is not None and is_finite(number)]
    if not finite:
        return ""
    frame = Frame(finite)
    left = frame.svg("baseline", [("baseline", series[0])])
    right = frame.svg("run, before the baseline in grey", [("baseline", series[0]), ("run", series[1])])
    return f'<h3>{html.escape(name)}</h3><div class="curves">{left}{right}</div>'


def _thinned(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """No more points than a curve can show: of each stretch the lowest, the highest, and a number that is none."""
    if len(points) <= MOST_POINTS:
        return points
    length = -(-len(points) // (MOST_POINTS // 3))
    kept = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        finite = [point for point in stretch if is_finite(point[1])]
        odd = [point for point in stretch if not is_finite(point[1])][:1]
        ends = [min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))] if finite else []
        kept += sorted({*ends, *odd}, key=itemgetter(0))
    return kept


class Frame:
    """Axes that hold all of some points."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        steps, numbers = zip(*points, strict=True)
        self.first, self.last = min(steps), max(steps)
        self.low, self.high = min(numbers), max(numbers)

    def place(self, step: int, number: float) -> tuple[float, float]:
        """Where a point lies, in the units of the SVG."""
        across = (step - self.first) / (self.last - self.first or 1)
        up = (number - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return LEFT + across * (WIDTH - LEFT - 12), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    def svg(self, title: str, curves: Sequence[tuple[str, Sequence[tuple[int, float | None]]]]) -> str:
        """One drawing. A number that is not finite breaks its curve and is a red dot at the bottom."""
        parts = [f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
        for number in (self.low, self.high):
            _, y = self.place(self.first, number)
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/><text x="4" y="{y + 4:.1f}">{number:.5g}</text>')
        parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">step {self.first}</text>')
        parts.append(f'<text x="{WIDTH - 12}" y="{HEIGHT - 6}" text-anchor="end">{self.last}</text>')
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(title)}</text>')
        for kind, points in curves:
            part: list[str] = []
            for step, number in [*points, (0, None)]:
                if number is not None and is_finite(number):
                    part.append("{:.1f},{:.1f}".format(*self.place(step, number)))
                    continue
                if part:
                    # A single point has no line; the same again, with round ends, makes a dot.
                    places = " ".join(part if len(part) > 1 else part * 2)
                    parts.append(f'<polyline class="{kind}" points="{places}" stroke-linecap="round"/>')
                part = []
                if number is not None:
                    x, _ = self.place(step, self.low)
                    parts.append(f'<circle cx="{x:.1f}" cy="{HEIGHT - BOTTOM}" r="4"><title>step {step}: {number}</title></circle>')
        return "".join([*parts, "</svg>"])
