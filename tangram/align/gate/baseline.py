"""The file that a run is held against: what an earlier run left behind, and how closely it is to be repeated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tangram.align.gate.read_log import ITERATION
from tangram.align.gate.read_metrics import number, whole
from tangram.align.gate.read_run import MARK, looks_like_metrics
from tangram.align.gate.read_text import read_text
from tangram.align.gate.recorded import RankStep, Recorded, Step, is_finite
from tangram.align.gate.settings import Settings
from tangram.errors import ConfigError

VERSION = 1
OF_RANKS = ("loss", "grad_norm", "shared_grad_norm", "shared_with")
"""What is kept of a ``RankStep``: what is compared with another run's."""


@dataclass(frozen=True)
class Baseline:
    """Content of the file."""

    recorded: Recorded
    settings: Settings


def make_baseline(recorded: Recorded, settings: Settings) -> Baseline:
    """What a run left behind as a baseline.

    Raises:
        ConfigError: it is none to hold others against: losses that are missing or not finite, a norm of gradients that is not finite in a step that
            was not skipped, no time after the warm-up, or a run that was resumed otherwise than it was begun.
    """
    where = recorded.where
    _check_numbers(recorded)
    if len(recorded.steps) <= settings.warm_up:
        raise ConfigError(f"{where}: {len(recorded.steps)} steps, of which {settings.warm_up} are warm-up; run more steps, or lower --warm-up")
    for facts in recorded.facts[1:]:
        odd = sorted(key for key in facts.keys() | recorded.facts[0].keys() if facts.get(key) != recorded.facts[0].get(key))
        if odd:
            raise ConfigError(f"{where}: the run was resumed with another {', '.join(odd)}; a baseline is one run from beginning to end")
    return Baseline(replace(recorded, facts=recorded.facts[:1]), settings)


def _check_numbers(recorded: Recorded) -> None:
    """Against what is no number everything would pass, or nothing.

    Raises:
        ConfigError: there is such a one.
    """
    where, skipped = recorded.where, {step.step for step in recorded.steps if step.skipped}
    for step in recorded.steps:
        if not is_finite(step.loss):
            fault = "is missing" if step.loss is None else f"is {step.loss}"
            raise ConfigError(f"{where}: the loss of step {step.step} {fault}; a baseline needs a loss that is a number in every step")
        if step.grad_norm is not None and not is_finite(step.grad_norm) and not step.skipped:
            raise ConfigError(f"{where}: the gradient norm of step {step.step} is {step.grad_norm}, and the step was not skipped: no baseline")
        if step.step_ms is not None and not 0 <= step.step_ms < math.inf:
            raise ConfigError(f"{where}: the time of step {step.step} is {step.step_ms} ms: no baseline")
    for at, ranks in recorded.ranks.items():
        norms = [] if at in skipped else [*ranks.grad_norm, *ranks.shared_grad_norm]
        if odd := [value for value in [*ranks.loss, *norms] if value is not None and not is_finite(value)]:
            raise ConfigError(f"{where}: some rank found {odd[0]} in step {at}, and the step was not skipped: no baseline")
    for figure, by_rank in recorded.memory.items():
        for rank, by_step in by_rank.items():
            if odd := [value for value in by_step.values() if not 0 <= value < math.inf]:
                raise ConfigError(f"{where}: {figure} of rank {rank} is {odd[0]} MB: no baseline")


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write the file, whole or not at all.

    Raises:
        ConfigError: what lies there is no file.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: {'a folder' if path.is_dir() else 'no regular file'}; give the path of the file to write")
    recorded = baseline.recorded
    content = {
        MARK: VERSION,
        "from": recorded.where,
        "kind": recorded.kind,
        "settings": baseline.settings.as_dict(),
        "facts": recorded.facts[0] if recorded.facts else None,
        "steps": [step._asdict() for step in recorded.steps],
        "ranks": {str(step): {name: getattr(ranks, name) for name in OF_RANKS} for step, ranks in recorded.ranks.items()},
        "memory": recorded.memory,
        "config": recorded.config,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    # One value a line would make a file of a hundred ranks unreadable, one line a file without differences.
    lines = [f"{json.dumps(key)}: {_text(value)}" for key, value in content.items()]
    temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    temporary.replace(path)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[\n " + ",\n ".join(map(_json, value)) + "\n]"
    if isinstance(value, dict) and value:
        return "{\n " + ",\n ".join(f"{json.dumps(key)}: {_json(entry)}" for key, entry in value.items()) + "\n}"
    return _json(value)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    """JSON has neither NaN nor infinity, and keys are text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not is_finite(value) else value


def read_baseline(path: Path) -> Baseline:
    """Read the file.

    Raises:
        ConfigError: missing, a folder, no baseline, damaged, or of a version that this Tangram does not read.
    """
    text = read_text(path)
    mend = "make one with tangram baseline make RUN -o FILE"
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse_run(path, text)
        raise ConfigError(f"{path}: no baseline: not JSON ({error}); {mend}") from None
    if not isinstance(raw, dict) or MARK not in raw:
        _refuse_run(path, text)
        raise ConfigError(f"{path}: no baseline: its JSON has no {MARK!r}; {mend}")
    if (version := raw[MARK]) != VERSION:
        newer = isinstance(version, int) and version > VERSION
        how = "was written by a later Tangram: use that one, or make it again with this" if newer else f"is of no known version: {mend}"
        raise ConfigError(f"{path}: baseline of version {version!r}, this Tangram reads {VERSION}; it {how}")
    try:
        baseline = Baseline(_recorded(raw, str(path)), Settings.from_dict(raw["settings"], str(path)))
        _check_numbers(replace(baseline.recorded, where=str(path)))
        return baseline
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: damaged: {what}; make the baseline again") from None


def _refuse_run(path: Path, text: str) -> None:
    if looks_like_metrics(text) or ITERATION.search(text):
        raise ConfigError(f"{path}: is a run, and a baseline is wanted; give the run first and the baseline second, or make one of it")


def _recorded(raw: dict[str, Any], where: str) -> Recorded:
    steps = []
    for line, row in enumerate(raw["steps"]):
        at = f"{where}: steps[{line}]"
        values = {name: number(row[name], at, name) for name in ("loss", "grad_norm", "step_ms", "loss_unit", "grad_norm_unit")}
        steps.append(Step(**{**values, "step": whole(row["step"], at, "step"), "skipped": bool(row["skipped"]), "samples": row["samples"]}))
    if not steps:
        raise ConfigError(f"{where}: damaged: no steps; make the baseline again")
    for before, after in pairwise(steps):
        if after.step <= before.step:
            raise ConfigError(f"{where}: damaged: step {after.step} follows step {before.step}; make the baseline again")
    ranks = {int(step): _rank_step(row, f"{where}: ranks") for step, row in raw["ranks"].items()}
    memory = {
        figure: {int(rank): {int(step): _present(value, where) for step, value in of_rank.items()} for rank, of_rank in by_rank.items()}
        for figure, by_rank in raw["memory"].items()
    }
    if raw["facts"] is not None and not isinstance(raw["facts"], dict):
        raise ConfigError(f"{where}: damaged: facts is no mapping; make the baseline again")
    facts = [] if raw["facts"] is None else [raw["facts"]]
    config = raw["config"]
    if config is not None and not isinstance(config, str):
        raise ConfigError(f"{where}: damaged: config is no text; make the baseline again")
    return Recorded(str(raw["from"]), str(raw["kind"]), steps, facts, config, ranks, memory)


def _rank_step(row: dict[str, Any], where: str) -> RankStep:
    loss, grad_norm, shared = ([number(value, where, name) for value in row[name]] for name in OF_RANKS[:3])
    return RankStep(loss, grad_norm, shared, [whole(value, where, "shared_with") for value in row["shared_with"]])


def _present(value: Any, where: str) -> float:
    found = number(value, f"{where}: memory", "MB")
    if found is None:
        raise ConfigError(f"{where}: damaged: a memory figure is null; make the baseline again")
    return found
