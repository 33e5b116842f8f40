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
class Wishes:
    """What the replay has otherwise; None: as the baseline."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    backend: str | None = None
    settings: Sequence[str] = ()
    """``section.key=value`` of the run file, such as paths of another machine."""

    @property
    def other_topology(self) -> bool:
        return any(value is not None for value in (self.tensor, self.pipeline, self.data, self.backend))


@dataclass(frozen=True)
class Replay:
    """A run file that lies in its folder, and the processes that it needs."""

    folder: Path
    processes: int
    accumulation: int
    """Micro-batches of a step on each data-parallel rank."""

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
    facts = baseline.recorded.facts[0]
    backend = wishes.backend or content["backend"]
    copies = wishes.data or facts["split"]["data_parallel"]
    _again(content, folder, baseline.recorded.steps[-1].step)
    if backend != content["backend"]:
        content = to_fsdp2(content, facts) if backend == "fsdp2" else to_megatron(content, facts)
    micro = _micro_batch_size(content, wishes.settings)
    accumulation, rest = divmod(facts["global_batch_size"], micro * copies)
    if rest:
        raise ConfigError(
            f"the baseline's global batch of {facts['global_batch_size']} is no multiple of micro_batch_size {micro} x {copies} data-parallel ranks; "
            "choose another --dp, or give training.micro_batch_size=N"
        )
    if backend == "fsdp2":
        _split_fsdp2(content, wishes, copies, accumulation)
    else:
        _split_megatron(content, wishes, facts["global_batch_size"])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RUN_FILE
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=150), encoding="utf-8")
    try:
        run = read_run(path, wishes.settings, base or Path.cwd())
        processes = _ranks_of_a_copy(run) * copies
    except ConfigError:
        path.unlink()
        raise
    path.write_text(dump(run), encoding="utf-8")
    return Replay(folder, processes, accumulation)


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
    content = yaml.safe_load(recorded.config)
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


def _split_megatron(content: dict[str, Any], wishes: Wishes, batch: int) -> None:
    parallel, training, model = content["parallel"], content["training"], content["model"]
    training |= {"global_batch_size": batch, "gradient_accumulation_steps": 1}
    if wishes.tensor is not None:
        parallel["tensor_model_parallel_size"] = wishes.tensor
        parallel["sequence_parallel"] = parallel.get("sequence_parallel", False) and wishes.tensor > 1
    if wishes.pipeline is not None:
        described = model["config"]
        vision, text = (described.get("image_encoder") or {}).get("vision_encoder"), described["text_decoder"]
        for component in (vision, text):
            if component is not None:
                component["pipeline_num_layers"] = None
        stages = wishes.pipeline
        if text["num_layers"] < stages:
            raise ConfigError(f"--pp {stages}: the text decoder has {text['num_layers']} layers; give a smaller one")
        # The vision encoder lies on the first stage, and text layers evenly, the later stages taking what is over.
        share, over = divmod(text["num_layers"], stages)
        parallel |= {
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": None,
            "vit_pp_layers": [vision["num_layers"], *[0] * (stages - 1)] if vision is not None and stages > 1 else None,
            "llm_pp_layers": [share + (stage >= stages - over) for stage in range(stages)] if stages > 1 else None,
        }


def _split_fsdp2(content: dict[str, Any], wishes: Wishes, copies: int, accumulation: int) -> None:
    if wishes.tensor is not None or wishes.pipeline is not None:
        raise ConfigError("--tp, --pp: not of the fsdp2 backend, which shards over data-parallel ranks; give --dp alone")
    parallel = content["parallel"]
    content["training"]["gradient_accumulation_steps"] = accumulation
    parallel["data_parallel_size"] = copies
    shard = parallel.get("fully_shard_parallel_size", "auto")
    if wishes.data is not None and shard != "auto" and copies * parallel.get("ulysses_parallel_size", 1) % shard:
        parallel["fully_shard_parallel_size"] = "auto"


def _ranks_of_a_copy(run: RunConfig) -> int:
    if run.fsdp2 is not None:
        return run.fsdp2.parallel.ulysses_parallel_size
    return run.topology().ranks_of_a_batch
