"""What can be checked before processes start, checked before processes start. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass, field

from tangram.config.preflight_files import FILE_RULES
from tangram.config.preflight_rules import GATES, RULES, Rule, Subject, notes, split_lines
from tangram.config.run import RunConfig
from tangram.errors import TangramError


@dataclass(frozen=True)
class Finding:
    """One rule's outcome; ``error`` None where it holds."""

    rule: str
    detail: str
    error: TangramError | None = None


@dataclass(frozen=True)
class Report:
    """All outcomes. Without a backend that runs the family, or a valid split, the rules after it are left out."""

    findings: list[Finding]
    notes: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    """The split as text, one line per stage."""

    @property
    def errors(self) -> list[TangramError]:
        return [finding.error for finding in self.findings if finding.error is not None]

    def raise_errors(self) -> None:
        """Raise the first error, and say how many there are.

        Raises:
            TangramError: of the kind that the rule raised.
        """
        if self.errors:
            first, *others = self.errors
            more = f" ({len(others)} more problems: run tangram check)" if others else ""
            raise type(first)(f"{first}{more}")


def check_run(run: RunConfig, world_size: int | None) -> Report:
    """Check a run.

    Args:
        world_size: number of processes; None: not known yet.
    """
    subject = Subject(run, world_size)
    findings: list[Finding] = []
    for name, rule in GATES:
        findings.append(_apply(name, rule, subject))
        if findings[-1].error is not None:
            return Report(findings)
    findings += [_apply(name, rule, subject) for name, rule in (*RULES, *FILE_RULES)]
    return Report(findings, notes(subject), split_lines(subject.topology))


def _apply(name: str, rule: Rule, subject: Subject) -> Finding:
    try:
        return Finding(name, rule(subject))
    except TangramError as error:
        return Finding(name, "", error)
