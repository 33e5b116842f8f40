"""A report as a table for people."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from tangram.align.compare import Report, Row

WIDTH = 120


def render(report: Report, title: str, limit: int = 12) -> str:
    """Loss, logits, and the ``limit`` gradients with the largest errors, as text."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading, justify in (("tensor", "left"), ("shape", "left"), ("norm", "right"), ("error", "right"), ("", "left")):
        table.add_column(heading, justify=justify, no_wrap=heading != "tensor")  # type: ignore[arg-type]
    gradients = [row for row in report.rows if row.kind == "gradient"]
    for row in [*(row for row in report.rows if row.kind != "gradient"), *gradients[:limit]]:
        table.add_row(*_cells(row, report.tolerance))
    lines = [_draw(table)]
    if len(gradients) > limit:
        lines.append(f"{len(gradients) - limit} more gradients, none above {gradients[limit].error:.2e}")
    lines += [f"FAILED: {reason}" for reason in report.failures]
    if report.passed:
        lines.append(f"passed: {len(gradients)} gradients, logits and loss within {report.tolerance:g}")
    return "\n".join(lines)


def _cells(row: Row, tolerance: float) -> tuple[str, ...]:
    shape = " x ".join(map(str, row.shape))
    verdict = "" if row.within(tolerance) else "past tolerance"
    return row.name, shape, f"{row.norm:.3e}", f"{row.error:.2e}{' absolute' if row.absolute else ''}", verdict


def _draw(table: Table) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None).print(table)
    return buffer.getvalue().rstrip()
