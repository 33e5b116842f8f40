"""Logs in Megatron's form: Tangram's own, Megatron-LM's, and those of projects that train with it.

``iteration N/ M | key: value | ... |`` per step or interval, and ``[Rank R] (after K iterations) memory (MB) | key: value | ...`` once. Launchers
may put a prefix before a line, several ranks may write into one, and other keys are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tangram.align.gate.read_text import lines_of
from tangram.align.gate.recorded import Recorded, Step
from tangram.errors import ConfigError

ITERATION = re.compile(r"\biteration\s+(\d{1,18})/\s*(\d+)\s*\|")
MEMORY = re.compile(r"\[Rank\s+(\d{1,9})\]\s*\(after\s+(\d{1,18})\s+iterations?\)\s*memory\s*\(MB\)\s*\|")
LOSSES = ("loss", "lm loss")
TIME = "elapsed time per iteration (ms)"
FIGURES = ("allocated", "max allocated", "peak resident")
"""Of memory. What the allocator has reserved says little of the model."""
NOT_A_NUMBER = re.compile(r"([+-]?)(?:nan|1\.#(?:qnan|snan|ind)|(1\.#)?inf(?:inity)?)(?:\(.*\))?", re.IGNORECASE)
"""How C and Python libraries spell what is none."""
USED = frozenset({*LOSSES, *FIGURES, TIME, "grad norm", "number of skipped iterations"})
DIGITS = re.compile(r"[+-]?\d*\.?(\d*)(?:[eE]([+-]?\d{1,3}))?")
SHOWN = 3
"""Notes of one kind."""


def read_log(path: Path, text: str) -> Recorded:
    """The run of a log.

    Megatron leaves a metric out of the line where it is not a number or below 0, so that a missing loss is told as such. Where several ranks
    have written the same line it counts once.

    Raises:
        ConfigError: a number cannot be read, or lines name several losses and none is the model's.
    """
    steps: list[Step] = []
    memory: dict[str, dict[int, dict[int, float]]] = {}
    again: list[str] = []
    notes: list[str] = []
    lines = lines_of(text)
    for line_number, line in enumerate(lines, 1):
        if "iteration" not in line:
            continue
        where = f"{path}, line {line_number}"
        if line_number == len(lines) and not line.rstrip().endswith("|"):
            # The last of its numbers may have lost digits, and would be another number.
            notes.append("the last line is cut off, as a killed run leaves it, and is left out")
            continue
        for found, rest in _parts(line):
            if found.re is MEMORY:
                values = _fields(rest)
                for figure in FIGURES:
                    if figure in values:
                        memory.setdefault(figure, {}).setdefault(int(found[1]), {})[int(found[2])] = _number(values[figure], where, figure)
                continue
            step = _step(int(found[1]), _fields(rest), where)
            if steps and step.step <= steps[-1].step:
                if step == steps[-1]:
                    continue
                again.append(f"line {line_number}: step {step.step} follows step {steps[-1].step}: the run was started again; its last numbers count")
                while steps and steps[-1].step >= step.step:
                    steps.pop()
            steps.append(step)
    if not steps:
        raise ConfigError(f"{path}: not one whole line of a step; the run has not ended its first step")
    more = [f"and {len(again) - SHOWN} more lines that go back"] if len(again) > SHOWN else []
    return Recorded(str(path), "log", steps, memory=memory, notes=[*again[:SHOWN], *more, *notes])


def _parts(line: str) -> Iterator[tuple[re.Match[str], str]]:
    """What a line tells of steps and of memory, each with the text up to the next: ranks that write at once may share a line."""
    if line.count("iteration ") == 1 and "memory" not in line:
        if (only := ITERATION.search(line, max(0, line.find("iteration ") - 1))) is not None:
            yield only, line[only.end() :]
        return
    found = sorted([*ITERATION.finditer(line), *MEMORY.finditer(line)], key=lambda match: match.start())
    for match, following in zip(found, [*found[1:], None], strict=True):
        yield match, line[match.end() : following.start() if following is not None else len(line)]


def _fields(text: str) -> dict[str, str]:
    """``key: value`` between bars, as far as it is of use."""
    parts = (part.rpartition(":") for part in text.split("|"))
    return {name: value.strip() for key, colon, value in parts if colon and ((name := key.strip()) in USED or name.endswith(" loss"))}


def _step(step: int, values: dict[str, str], where: str) -> Step:
    name = _loss_name(values, where)
    loss, norm = (values[key] if key is not None else None for key in (name, "grad norm" if "grad norm" in values else None))
    skipped = _number(values.get("number of skipped iterations", "0"), where, "skipped iterations")
    return Step(
        step=step,
        loss=None if loss is None else _number(loss, where, "loss"),
        grad_norm=None if norm is None else _number(norm, where, "grad norm"),
        step_ms=_number(values[TIME], where, TIME) if TIME in values else None,
        skipped=skipped > 0,
        loss_unit=unit(loss),
        grad_norm_unit=unit(norm),
    )


def _loss_name(values: dict[str, str], where: str) -> str | None:
    known = [name for name in LOSSES if name in values]
    others = [name for name in values if name.endswith(" loss")]
    if not known and len(others) > 1:
        raise ConfigError(f"{where}: losses {', '.join(others)}, and none is named {' or '.join(LOSSES)}; name the model's so")
    return next(iter(known or others), None)


def _number(text: str, where: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        if (found := NOT_A_NUMBER.fullmatch(text)) is not None:
            return float(f"{found[1]}{'inf' if 'inf' in text.lower() else 'nan'}")
        raise ConfigError(f"{where}: {name} is {text!r}, expected a number; give the log as the run wrote it") from None


def unit(text: str | None) -> float:
    """Unit of the last digit of a printed number: 1e-6 of ``2.500000E+00``, 0.001 of ``1.235``; 0 where it is none."""
    found = DIGITS.fullmatch(text or "")
    return 0.0 if not text or found is None else 10.0 ** (int(found[2] or 0) - len(found[1]))
