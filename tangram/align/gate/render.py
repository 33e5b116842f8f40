"""A verdict as a table for people."""

from __future__ import annotations

import io

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tangram.align.gate.verdict import Finding, Verdict

WIDTH = 150
WIDEST = 34
"""Characters of a value in the table; the whole of it is in the JSON and on the page."""


def render(verdict: Verdict) -> str:
    """Table, notes, and the line of the verdict at the end."""
    table = Table("checked", "", "baseline", "run", "differ by", "allowed", box=None, pad_edge=False)
    for finding in verdict.findings:
        values = (finding.baseline, finding.run, finding.deviation, finding.allowed)
        table.add_row(finding.name, mark(finding), *(escape(_cut(value)) for value in values))
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None).print(table)
    lines = ["\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())]
    lines += [f"FAILED {finding.name}: {finding.found}" for finding in verdict.failures]
    lines += [f"not compared: {finding.name}: {finding.found}" for finding in verdict.findings if finding.passed is None]
    lines += [f"note: {note}" for note in verdict.notes]
    return "\n".join([*lines, verdict.line])


def mark(finding: Finding) -> str:
    """One word for how a comparison ended."""
    return {True: "ok", False: "FAILED", None: "-"}[finding.passed]


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."
