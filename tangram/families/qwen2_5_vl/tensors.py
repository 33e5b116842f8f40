"""The tensor table of Qwen2.5-VL: Qwen2-VL's with a gated vision MLP."""

from __future__ import annotations

from tangram.config.model import ModelConfig, VisionEncoderConfig
from tangram.families.qwen2_vl.tensors import LOCAL_VISION_LAYER, VISION_LAYER, image_encoder_rules, linear, text_rules
from tangram.placement.table import GatedSplit, Rule, Split


def vision_mlp(vision: VisionEncoderConfig) -> list[Rule]:
    """Gate and up projections side by side, then the down projection."""
    width, ffn, bias = vision.hidden_size, vision.ffn_hidden_size, vision.add_bias_linear
    gated = {f"{VISION_LAYER}.mlp.{x}_proj": ffn for x in ("gate", "up")}
    return [
        *linear(f"{LOCAL_VISION_LAYER}.mlp.linear_fc1", gated, width, GatedSplit(), "vision", bias=bias),
        *linear(f"{LOCAL_VISION_LAYER}.mlp.linear_fc2", {f"{VISION_LAYER}.mlp.down_proj": width}, ffn, Split(1), "vision", bias=bias),
    ]


def tensor_table(model: ModelConfig, padded_vocab: int) -> list[Rule]:
    """The whole of Qwen2.5-VL.

    Args:
        padded_vocab: rows of the word embedding over all tensor-parallel ranks.
    """
    return [*image_encoder_rules(model, vision_mlp), *text_rules(model.text_decoder, padded_vocab)]
