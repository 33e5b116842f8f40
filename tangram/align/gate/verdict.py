"""What a gate has found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that was compared.

    Args:
        passed: None: it was not compared, and ``found`` says why.
        baseline, run: the two values where they differ most.
        allowed: in words.
        found: what is wrong, in words with its numbers; "" where nothing is.
    """

    name: str
    passed: bool | None
    baseline: str = ""
    run: str = ""
    deviation: str = ""
    allowed: str = ""
    found: str = ""


@dataclass(frozen=True)
class Verdict:
    """All findings; the gate is passed if none failed, and something was compared."""

    run: str
    baseline: str
    findings: Sequence[Finding]
    notes: Sequence[str] = field(default=())

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.passed is False]

    @property
    def compared(self) -> int:
        return sum(finding.passed is not None for finding in self.findings)

    @property
    def passed(self) -> bool:
        return not self.failures and self.compared > 0

    @property
    def line(self) -> str:
        """One line for people and for CI."""
        if self.passed:
            left = ", ".join(finding.name for finding in self.findings if finding.passed is None)
            return f"passed: {self.compared} checks against {self.baseline}{f'; not compared: {left}' if left else ''}"
        first, *others = self.failures
        more = f"; also {', '.join(finding.name for finding in others)}" if others else ""
        return f"FAILED: {first.name}: {first.found}{more}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "verdict": self.line,
            "run": self.run,
            "baseline": self.baseline,
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
        }
