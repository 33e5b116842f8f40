"""How fast a run could be, and how much work it does: what TFLOP/s and MFU of the log are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tangram.backends.engine import Batch
from tangram.config.patterns import Pattern
from tangram.config.run import RunConfig
from tangram.families import get_family
from tangram.families.flops import ModelFlops, Trains
from tangram.placement.table import Rule
from tangram.platform import current
from tangram.platform.peaks import peak_tflops


def model_flops(run: RunConfig) -> Callable[[Batch], int] | None:
    """Counts the operations of a micro-batch, forward and backward; None: the model is of no family."""
    if run.model.config is None:
        return None
    family = get_family(run.model.config.model_id)
    table = family.tensor_table(run.model.config, run.model.config.text_decoder.vocab_size)
    return ModelFlops(run.model.config, table, _trains_by_pattern(run) if run.fsdp2 is not None else _trains_by_component(run))


def peak_of(run: RunConfig) -> float | None:
    """What a device of this machine could do, TFLOP/s; None: not known."""
    if run.tools.peak_tflops is not None or current().name == "cpu":
        return run.tools.peak_tflops
    return peak_tflops(getattr(torch, current().name).get_device_name(), run.training.dtype)


def _trains_by_component(run: RunConfig) -> Trains:
    model = run.assembled_model()
    encoder = model.image_encoder
    frozen = {
        "text": model.text_decoder.freeze,
        "vision": encoder is not None and encoder.vision_encoder.freeze,
        "projector": encoder is not None and encoder.vision_projector.freeze,
    }
    return lambda rule, name: not frozen["projector" if rule.local.startswith("image_encoder.projector.") else rule.component]


def _trains_by_pattern(run: RunConfig) -> Trains:
    assert run.fsdp2 is not None
    frozen = [Pattern(text) for text in run.fsdp2.model.freeze]
    tied = not run.described.text_decoder.untie_embeddings_and_output_weights

    def trains(rule: Rule, name: str) -> bool:
        parts = name.split(".")
        modules = [".".join(parts[:end]) for end in range(1, len(parts))]
        if tied and name.endswith("embed_tokens.weight"):
            modules.append("lm_head")
        return not any(pattern.matches(module) for pattern in frozen for module in modules)

    return trains
