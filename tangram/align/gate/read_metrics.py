"""metrics.jsonl, and ``metrics.ranks.jsonl`` beside it, which says what the run was and what each rank found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from tangram.align.gate.read_text import read_text, without_gzip
from tangram.align.gate.recorded import RankStep, Recorded, Step
from tangram.errors import ConfigError
from tangram.training.rank_records import SCHEMA, ranks_path

ON_CPU = "peak resident"
ON_DEVICE = "max allocated"
"""Names of memory figures, as logs have them."""


def read_metrics(path: Path, text: str) -> Recorded:
    """The run of a metrics file.

    Raises:
        ConfigError: a line is damaged (but half a line at the end, which a killed run leaves), or the file beside it is.
    """
    rows, notes = parse_lines(path, text)
    if not rows:
        raise ConfigError(f"{path}: not one whole line; the run has not ended its first step")
    steps = [_step(row, f"{path}, line {number}") for number, row in enumerate(rows, 1)]
    for number, (before, after) in enumerate(pairwise(steps), 2):
        if after.step <= before.step:
            raise ConfigError(f"{path}, line {number}: step {after.step} follows step {before.step}; give the file of one run")
    beside = ranks_path(without_gzip(path))
    if not beside.exists() and (packed := beside.with_name(f"{beside.name}.gz")).exists():
        beside = packed
    if not beside.exists():
        return Recorded(str(path), "metrics", steps, notes=[*notes, f"{beside.name} is missing, which says what the run was; keep the two together"])
    ranks, more = parse_lines(beside, read_text(beside))
    return _with_ranks(path, beside, steps, ranks, [*notes, *more])


def parse_lines(path: Path, text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects of a file with one a line, and a note where the last is cut off.

    Raises:
        ConfigError: another line is no JSON object.
    """
    lines = text.split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            if number == len(lines):
                return rows, [f"{path.name}: the last line is cut off, as a killed run leaves it, and is left out"]
            raise ConfigError(f"{path}, line {number}: no JSON object ({line[:40]!r}); give the file as the run wrote it")
        rows.append(row)
    return rows, []


def number(value: Any, where: str, name: str) -> float | None:
    """A number, or the text that stands for one that is not finite.

    Raises:
        ConfigError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return float(value)
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):
            return float(value)
    raise ConfigError(f"{where}: {name} is {str(value)[:40]!r}, expected a number; give the file as the run wrote it")


def whole(value: Any, where: str, name: str) -> int:
    """A whole number.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where}: {name} is {value!r}, expected a whole number; give the file as the run wrote it")
    return value


def _step(row: Mapping[str, Any], where: str) -> Step:
    samples = row.get("samples_digest")
    return Step(
        step=whole(row.get("step"), where, "step"),
        loss=number(row.get("loss"), where, "loss"),
        grad_norm=number(row.get("grad_norm"), where, "grad_norm"),
        step_ms=number(row.get("step_ms"), where, "step_ms"),
        skipped=bool(row.get("skipped", False)),
        samples=samples if isinstance(samples, str) else None,
    )


def _with_ranks(path: Path, beside: Path, steps: Sequence[Step], rows: Sequence[Mapping[str, Any]], notes: list[str]) -> Recorded:
    heads = [row for row in rows if "schema" in row]
    for head in heads:
        if head["schema"] != SCHEMA:
            raise ConfigError(f"{beside}: schema {head['schema']!r}, this Tangram reads {SCHEMA}; use the Tangram that wrote it")
        if not isinstance(head.get("facts"), dict) or not isinstance(head.get("config"), str):
            raise ConfigError(f"{beside}: damaged: a line of schema {SCHEMA} lacks facts or config; run again")
    if not heads or "schema" not in rows[0]:
        raise ConfigError(f"{beside}: damaged: its first line has no schema; run again")
    last, losses = steps[-1].step, {step.step: step.loss for step in steps}
    ranks: dict[int, RankStep] = {}
    memory: dict[int, dict[int, float]] = {}
    for line, row in enumerate(rows, 1):
        where = f"{beside}, line {line}"
        if "schema" in row or (step := whole(row.get("step"), where, "step")) > last:
            # A step that a killed run did not bring to its line of metrics.
            continue
        if (told := number(row.get("loss_of_all"), where, "loss_of_all")) is not None and str(told) != str(losses.get(step, told)):
            raise ConfigError(f"{where}: of another run than {path.name}: the loss of step {step} is {told} in one and {losses[step]} in the other")
        columns = {name: _column(row.get(name), where, name) for name in ("loss", "grad_norm", "shared_grad_norm", "peak_memory_mb", "shared_with")}
        if len({len(column) for column in columns.values()}) != 1:
            raise ConfigError(f"{where}: damaged: its lists have different lengths; run again")
        groups = [whole(value, where, "shared_with") for value in row["shared_with"]]
        ranks[step] = RankStep(
            columns["loss"], columns["grad_norm"], columns["shared_grad_norm"], groups, *_copies(row, len(groups), where)
        )
        for rank, value in enumerate(columns["peak_memory_mb"]):
            if value is not None:
                memory.setdefault(rank, {})[step] = value
    facts = [head["facts"] for head in heads]
    figure = ON_CPU if facts[-1].get("platform") == "cpu" else ON_DEVICE
    return Recorded(str(path), "metrics", steps, facts, heads[-1]["config"], ranks, {figure: memory} if memory else {}, notes)


def _copies(row: Mapping[str, Any], ranks: int, where: str) -> tuple[list[int | None], dict[str, tuple[list[int], list[str | None]]]]:
    """Which ranks hold the same gradients, and digests of parameters that several hold; a run of before they were told has neither.

    Raises:
        ConfigError: they are not as a run writes them.
    """
    told, copies = row.get("grad_norm_with", []), row.get("copies", {})
    try:
        same = [None if value is None else whole(value, where, "grad_norm_with") for value in told]
        held = {
            str(kind): ([whole(value, where, "held_with") for value in of["held_with"]], [None if one is None else str(one) for one in of["digest"]])
            for kind, of in copies.items()
        }
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(f"{where}: damaged: grad_norm_with or copies is not as a run writes it; run again") from None
    if len(same) not in (0, ranks) or any(len(column) != ranks for pair in held.values() for column in pair):
        raise ConfigError(f"{where}: damaged: its lists have different lengths; run again")
    return same, held


def _column(values: Any, where: str, name: str) -> list[float | None]:
    if not isinstance(values, list):
        raise ConfigError(f"{where}: {name} is {values!r}, expected a list with one number per rank; run again")
    return [number(value, where, name) for value in values]
