"""The first difference of two traces, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tangram.align.trace.read import Trace
from tangram.align.trace.verdict import Verdict, judge
from tangram.align.trace.walk import Walk, walk


@dataclass(frozen=True)
class Finding:
    """What a walk along two traces found.

    Args:
        runs: what they are of, in words.
        walks: forward and backward.
        verdicts: where each first differs; None: it does not.
    """

    runs: tuple[str, str]
    walks: tuple[Walk, Walk]
    verdicts: tuple[Verdict | None, Verdict | None]

    @property
    def passed(self) -> bool:
        return self.verdicts == (None, None)

    @property
    def summary(self) -> str:
        """One line."""
        forward, backward = self.verdicts
        first = forward or backward
        if first is not None:
            way = "the first that differs" if first is forward else "forward agrees; the first that differs backward"
            return f"FAILED: {way} is {first.step.name} ({first.step.what}); look in {first.module}"
        return f"passed: {sum(len(walked.steps) for walked in self.walks)} steps agree within {self.walks[0].tolerance:g}"


def first_difference(first: Path, second: Path, tolerance: float | None = None) -> Finding:
    """Walk along two traces.

    Args:
        first, second: folders; the order of the first counts, and errors are relative to it.
        tolerance: see ``tangram.align.trace.walk.walk``.

    Raises:
        CheckpointError: one of them is no whole trace, or they have nothing in common.
    """
    ours, theirs = Trace(first), Trace(second)
    forward, backward = walks = walk(ours, theirs, tolerance)
    return Finding((ours.run, theirs.run), walks, (judge(forward, ours, theirs), judge(backward, ours, theirs)))
