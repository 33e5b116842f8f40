"""Logs in Megatron's form: Tangram's own, Megatron-LM's, and those of projects that train with it.

``iteration N/ M | key: value | ... |`` per step or interval, and ``[Rank R] (after K iterations) memory (MB) | key: value | ...`` once. Launchers
may put a prefix before a line, and other keys are passed over.
"""

from __future__ import annotations

import re
from pathlib import Path

from tangram.align.gate.recorded import Recorded, Step
from tangram.errors import ConfigError

ITERATION = re.compile(r"\biteration\s+(\d+)/\s*(\d+)\s*\|(.*)")
MEMORY = re.compile(r"\[Rank\s+(\d+)\]\s*\(after\s+(\d+)\s+iterations?\)\s*memory\s*\(MB\)\s*\|(.*)")
LOSSES = ("loss", "lm loss")
TIME = "elapsed time per iteration (ms)"
FIGURES = ("allocated", "max allocated", "peak resident")
"""Of memory. What the allocator has reserved says little of the model."""


def read_log(path: Path, text: str) -> Recorded:
    """The run of a log.

    Megatron leaves a metric out of the line where it is not a number or below 0, so that a missing loss is told as such.

    Raises:
        ConfigError: a number cannot be read, or lines name several losses and none is the model's.
    """
    steps: list[Step] = []
    memory: dict[str, dict[int, dict[int, float]]] = {}
    notes: list[str] = []
    for line_number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {line_number}"
        if found := ITERATION.search(line):
            step = _step(int(found[1]), _fields(found[3]), where)
            if steps and step.step <= steps[-1].step:
                notes.append(f"line {line_number}: step {step.step} follows step {steps[-1].step}: the run was started again; its last numbers count")
                steps = [known for known in steps if known.step < step.step]
            steps.append(step)
        elif found := MEMORY.search(line):
            values = _fields(found[3])
            for figure in FIGURES:
                if figure in values:
                    memory.setdefault(figure, {}).setdefault(int(found[1]), {})[int(found[2])] = _number(values[figure], where, figure)
    return Recorded(str(path), "log", steps, memory=memory, notes=notes)


def _fields(text: str) -> dict[str, str]:
    """``key: value`` between bars."""
    parts = (part.rpartition(":") for part in text.split("|"))
    return {key.strip(): value.strip() for key, colon, value in parts if colon}


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
        raise ConfigError(f"{where}: {name} is {text!r}, expected a number; give the log as the run wrote it") from None


def unit(text: str | None) -> float:
    """Unit of the last digit of a printed number: 1e-6 of ``2.500000E+00``, 0.001 of ``1.235``; 0 where it is none."""
    found = re.fullmatch(r"[+-]?\d*\.?(\d*)(?:[eE]([+-]?\d+))?", text or "")
    return 0.0 if not text or found is None else 10.0 ** (int(found[2] or 0) - len(found[1]))
