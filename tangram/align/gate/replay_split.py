"""A run file at another split: what the wishes name is changed, and what then no longer fits follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from tangram.config.model import ModelConfig
from tangram.errors import ConfigError


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


def split_megatron(content: dict[str, Any], wishes: Wishes, copies: int, accumulation: int, model: Callable[[], ModelConfig]) -> None:
    """Of the megatron backend. Context parallelism stays; sequence parallelism goes with tensor parallelism; experts and the vision encoder are
    divided over as many of the new ranks as they were, or the largest part of that which divides them.

    Args:
        copies: data-parallel size.
        accumulation: micro-batches of a step on each.
        model: what is trained.

    Raises:
        ConfigError: more stages than text layers, or micro-batches that do not fill virtual stages.
    """
    parallel = content["parallel"]
    before, experts_there = parallel.get("pipeline_model_parallel_size", 1), bool(_text_decoder(content, model).get("num_moe_experts"))
    if wishes.tensor is not None and wishes.tensor != parallel.get("tensor_model_parallel_size", 1):
        parallel["tensor_model_parallel_size"] = wishes.tensor
        if wishes.tensor == 1:
            parallel["sequence_parallel"] = False
        if (vision := parallel.get("vision_tensor_model_parallel_size")) is not None:
            parallel["vision_tensor_model_parallel_size"] = gcd(vision, wishes.tensor)
    if (experts := parallel.get("expert_model_parallel_size", 1)) > 1:
        parallel["expert_model_parallel_size"] = gcd(experts, copies * parallel.get("context_parallel_size", 1))
    if parallel.get("tensor_model_parallel_size", 1) > 1 and experts_there:
        # Else all tensor-parallel ranks would send the experts the same tokens.
        parallel["sequence_parallel"] = True
    if wishes.pipeline is not None and wishes.pipeline != before:
        _stages(content, wishes.pipeline, model)
    elif (parallel.get("virtual_pipeline_model_parallel_size") or 1) > 1 and accumulation % before:
        raise ConfigError(
            f"{accumulation} micro-batches per step on each of {copies} data-parallel ranks are no multiple of the {before} stages, which the "
            "baseline's virtual stages need; choose another --dp, or another --pp, which has no virtual stages"
        )


def _text_decoder(content: dict[str, Any], model: Callable[[], ModelConfig]) -> dict[str, Any]:
    described = content["model"].get("config")
    found: dict[str, Any] = described["text_decoder"] if described is not None else model().text_decoder.model_dump()
    return found


def _stages(content: dict[str, Any], stages: int, model: Callable[[], ModelConfig]) -> None:
    """Other stages: the vision encoder on the first, and text layers evenly, the later stages taking what is over."""
    parallel, described = content["parallel"], content["model"].get("config")
    if described is not None:
        for component in ((described.get("image_encoder") or {}).get("vision_encoder"), described["text_decoder"]):
            if component is not None:
                component["pipeline_num_layers"] = None
    one_stage = {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "vit_pp_layers": None, "llm_pp_layers": None}
    parallel |= one_stage
    if stages == 1:
        return
    whole = model()
    vision, text = whole.image_encoder.vision_encoder if whole.image_encoder else None, whole.text_decoder
    if text.num_layers < stages:
        raise ConfigError(f"--pp {stages}: the text decoder has {text.num_layers} layers; give a smaller one")
    share, over = divmod(text.num_layers, stages)
    parallel |= {
        "pipeline_model_parallel_size": stages,
        "vit_pp_layers": [vision.num_layers, *[0] * (stages - 1)] if vision is not None else None,
        "llm_pp_layers": [share + (stage >= stages - over) for stage in range(stages)],
    }


def split_fsdp2(content: dict[str, Any], wishes: Wishes, copies: int, accumulation: int) -> None:
    """Of the fsdp2 backend. Ulysses stays; shards and experts are divided over as many of the new ranks as they were, or else over all of them.

    Raises:
        ConfigError: the wishes are of the other backend.
    """
    if wishes.tensor is not None or wishes.pipeline is not None:
        raise ConfigError("--tp, --pp: not of the fsdp2 backend, which shards over data-parallel ranks; give --dp alone")
    parallel = content["parallel"]
    content["training"]["gradient_accumulation_steps"] = accumulation
    parallel["data_parallel_size"] = copies
    ranks = copies * parallel.get("ulysses_parallel_size", 1)
    for size, mend in (("fully_shard_parallel_size", "auto"), ("expert_fully_shard_parallel_size", None)):
        if isinstance(parallel.get(size), int) and ranks % parallel[size]:
            parallel[size] = mend
    if (experts := parallel.get("expert_parallel_size", 1)) > 1 and ranks % experts:
        parallel["expert_parallel_size"] = gcd(experts, ranks)
        parallel["expert_fully_shard_parallel_size"] = None
