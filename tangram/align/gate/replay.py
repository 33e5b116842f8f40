"""The run of a baseline again: from its own run file, at its topology or at another one, with the same global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tangram.align.gate.baseline import Baseline
from tangram.align.gate.read_run import METRICS_FILE
from tangram.align.gate.replay_backend import to_fsdp2, to_megatron
from tangram.align.gate.replay_split import Wishes, split_fsdp2, split_megatron
from tangram.config.run import RunConfig
from tangram.config.yaml_config import dump, read_run
from tangram.errors import ConfigError

RUN_FILE = "run.yaml"
NOT_AGAIN = (
    *("save", "save_interval", "save_total_limit", "save_hf_interval", "save_async", "save_format"),
    *("eval_interval", "eval_iters", "val_interval", "val_iters"),
)
"""Keys of ``training`` that a replay leaves out: it is there for its numbers."""


@dataclass(frozen=True)
class Replay:
    """A run file that lies in its folder, and the processes that it needs."""

    folder: Path
    processes: int
    accumulation: int
    """Micro-batches of a step on each data-parallel rank."""
    changes: Sequence[str] = ()
    """Keys of ``parallel`` that are others than the baseline's."""

    @property
    def run_file(self) -> Path:
        return self.folder / RUN_FILE


def prepare(baseline: Baseline, wishes: Wishes, folder: Path, base: Path | None = None) -> Replay:
    """Write the run file of the replay.

    Args:
        base: folder that relative paths of the baseline and of the wishes start from; None: the working directory.

    Raises:
        ConfigError: the baseline does not hold the run, it was not run from its run file alone, or the wishes do not fit it.
    """
    content = _content(baseline)
    try:
        return _prepare(content, baseline, wishes, folder, base)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"the baseline: damaged: in its run file or facts {what}; make the baseline again") from None


def _prepare(content: dict[str, Any], baseline: Baseline, wishes: Wishes, folder: Path, base: Path | None) -> Replay:
    facts = baseline.recorded.facts[0]
    backend = wishes.backend or content["backend"]
    copies, baseline_backend = wishes.data or facts["split"]["data_parallel"], content["backend"]
    _again(content, folder, baseline.recorded.steps[-1].step)
    if backend != content["backend"]:
        content = to_fsdp2(content, facts) if backend == "fsdp2" else to_megatron(content, facts)
    before = dict(content["parallel"])
    micro = _micro_batch_size(content, wishes.settings)
    accumulation, rest = divmod(facts["global_batch_size"], micro * copies)
    if rest:
        raise ConfigError(
            f"the baseline's global batch of {facts['global_batch_size']} is no multiple of micro_batch_size {micro} x {copies} data-parallel ranks; "
            "choose another --dp, or give training.micro_batch_size=N"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_FILE
    try:
        if backend == "fsdp2":
            split_fsdp2(content, wishes, copies, accumulation)
        else:
            content["training"] |= {"global_batch_size": facts["global_batch_size"], "gradient_accumulation_steps": 1}
            split_megatron(content, wishes, copies, accumulation, lambda: _written(content, path, wishes.settings, base).assembled_model())
        run = _written(content, path, wishes.settings, base)
        processes = _ranks_of_a_copy(run) * copies
    except Exception:
        path.unlink(missing_ok=True)
        raise
    path.write_text(dump(run), encoding="utf-8")
    after = content["parallel"]
    changes = [f"parallel.{key} {after[key]} (in the baseline {before.get(key)})" for key in after if after[key] != before.get(key)]
    return Replay(folder, processes, accumulation, changes if backend == baseline_backend else ())


def _written(content: dict[str, Any], path: Path, settings: Sequence[str], base: Path | None) -> RunConfig:
    """The run of a run file as it stands."""
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=150), encoding="utf-8")
    return read_run(path, settings, base or Path.cwd())


def _content(baseline: Baseline) -> dict[str, Any]:
    recorded = baseline.recorded
    where = "the baseline"
    if recorded.config is None or not recorded.facts:
        raise ConfigError(f"{where} was made of {recorded.where}, which holds no run file; make it of a metrics.jsonl with the file beside it")
    if callbacks := recorded.facts[0].get("callbacks"):
        raise ConfigError(
            f"{where}: its run was of an entry script with {', '.join(callbacks)} of its own; start that script, and compare with tangram gate"
        )
    if recorded.steps[0].step != 1:
        raise ConfigError(f"{where} begins with step {recorded.steps[0].step}: the run went on from a checkpoint; make one of a run from its start")
    try:
        content = yaml.safe_load(recorded.config)
    except yaml.YAMLError:
        content = None
    if not isinstance(content, dict) or content.get("backend") not in ("megatron", "fsdp2"):
        raise ConfigError(f"{where}: damaged: its config is no run file; make the baseline again")
    return content


def _again(content: dict[str, Any], folder: Path, last: int) -> None:
    """The same steps, without checkpoints, validation and tools."""
    training = content["training"]
    for key in NOT_AGAIN:
        training.pop(key, None)
    training["metrics_file"] = str(folder.resolve() / METRICS_FILE)
    training["exit_interval"] = last if training.get("train_iters") is None or last < training["train_iters"] else None
    content["tools"] = {}


def _micro_batch_size(content: dict[str, Any], settings: Sequence[str]) -> int:
    for setting in settings:
        key, _, value = setting.partition("=")
        if key.strip() == "training.micro_batch_size" and value.strip().isdecimal() and int(value):
            return int(value)
    return int(content["training"].get("micro_batch_size", 1))


def _ranks_of_a_copy(run: RunConfig) -> int:
    if run.fsdp2 is not None:
        return run.fsdp2.parallel.ulysses_parallel_size
    return run.topology().ranks_of_a_batch
