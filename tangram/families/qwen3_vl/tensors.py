"""The tensor table of Qwen3-VL: Qwen2-VL's with a position table and DeepStack mergers in the vision encoder, and head norms in the text decoder.

Source of the names on the right: transformers ``Qwen3VLForConditionalGeneration.state_dict()``, which the hub's files have too; of the
local names: the public ``mp_rank`` checkpoints of MindSpeed-MM.
"""

from __future__ import annotations

from dataclasses import replace

from tangram.config.model import ModelConfig, VisionEncoderConfig
from tangram.families.qwen2_vl.tensors import (
    LOCAL_VISION_LAYER,
    VISION,
    VISION_LAYER,
    linear,
    merger_rules,
    text_rules,
    vision_rules,
)
from tangram.families.qwen3_vl.config import Qwen3VisionEncoderConfig
from tangram.placement.table import Replicated, Rule, Source, Split

MERGER = ("norm", "linear_fc1", "linear_fc2")


def vision_mlp(vision: VisionEncoderConfig) -> list[Rule]:
    """Two plain linears."""
    width, ffn, bias = vision.hidden_size, vision.ffn_hidden_size, vision.add_bias_linear
    local, source = f"{LOCAL_VISION_LAYER}.mlp", f"{VISION_LAYER}.mlp"
    return [
        *linear(f"{local}.linear_fc1", {f"{source}.linear_fc1": ffn}, width, Split(0), "vision", bias=bias),
        *linear(f"{local}.linear_fc2", {f"{source}.linear_fc2": width}, ffn, Split(1), "vision", bias=bias),
    ]


def image_encoder_rules(model: ModelConfig) -> list[Rule]:
    """Vision encoder, merger, and the mergers of the DeepStack blocks, whose norm comes after merging; nothing for a model without them."""
    if model.image_encoder is None:
        return []
    vision, projector = model.image_encoder.vision_encoder, model.image_encoder.vision_projector
    assert isinstance(vision, Qwen3VisionEncoderConfig)
    table = Source(f"{VISION}.pos_embed.weight", (vision.max_position_embeddings, vision.hidden_size))
    deepstack = merger_rules(
        f"{LOCAL_VISION_LAYER}.deepstack_layer", f"{VISION}.deepstack_merger_list.{{i}}", MERGER, projector, projector.ffn_hidden_size, "layer"
    )
    return [
        Rule("image_encoder.encoder.pos_embed.weight", (table,), Replicated(), "vision", "first"),
        *vision_rules(vision, vision_mlp(vision)),
        *(replace(rule, layers=tuple(vision.deepstack_visual_indexes)) for rule in deepstack),
        *merger_rules("image_encoder.projector", f"{VISION}.merger", MERGER, projector, projector.input_size),
    ]


def tensor_table(model: ModelConfig, padded_vocab: int) -> list[Rule]:
    """The whole of Qwen3-VL.

    Args:
        padded_vocab: rows of the word embedding over all tensor-parallel ranks.
    """
    return [*image_encoder_rules(model), *text_rules(model.text_decoder, padded_vocab)]
