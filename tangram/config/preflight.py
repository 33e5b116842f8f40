"""What can be checked before processes start, checked before processes start. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tangram.config import preflight_fsdp2
from tangram.config.preflight_files import FILE_RULES
from tangram.config.preflight_fsdp2 import Fsdp2Subject
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


NamedRules = Sequence[tuple[str, Rule]]


@dataclass(frozen=True)
class Checks:
    """What is checked for one backend.

    Args:
        subject: makes what rules look at.
        gates: rules without which the others have nothing to check.
        split: the split as lines of text.
    """

    subject: type[Subject]
    gates: NamedRules
    rules: NamedRules
    notes: Callable[[Subject], list[str]]
    split: Callable[[Subject], list[str]]


CHECKS = {
    "megatron": Checks(Subject, GATES, (*RULES, *FILE_RULES), notes, lambda subject: split_lines(subject.topology)),
    "fsdp2": Checks(Fsdp2Subject, preflight_fsdp2.GATES, preflight_fsdp2.RULES, preflight_fsdp2.notes, preflight_fsdp2.split_lines),
}


def check_run(run: RunConfig, world_size: int | None, more: NamedRules = ()) -> Report:
    """Check a run.

    Args:
        world_size: number of processes; None: not known yet.
        more: rules that look at more than this room may import; they come last.
    """
    checks = CHECKS[run.backend]
    subject = checks.subject(run, world_size)
    findings: list[Finding] = []
    for name, rule in checks.gates:
        findings.append(_apply(name, rule, subject))
        if findings[-1].error is not None:
            return Report(findings)
    findings += [_apply(name, rule, subject) for name, rule in (*checks.rules, *more)]
    return Report(findings, checks.notes(subject), checks.split(subject))


def _apply(name: str, rule: Rule, subject: Subject) -> Finding:
    try:
        return Finding(name, rule(subject))
    except TangramError as error:
        return Finding(name, "", error)
