"""Qwen3-VL's keys of model.json, and its Hugging Face config as a model config."""

from __future__ import annotations

from math import isqrt
from typing import Any

from pydantic import Field, model_validator

from tangram.config.model import ImageEncoderConfig, ModelConfig, TextDecoderConfig, VisionEncoderConfig
from tangram.config.parsing import parse_section
from tangram.errors import ConfigError
from tangram.families.qwen2_vl.config import HFConfig, Reader, assemble, decoder_section


class Qwen3VisionEncoderConfig(VisionEncoderConfig):
    """A vision transformer with a learned position table and DeepStack mergers."""

    max_position_embeddings: int = Field(ge=1)
    """Rows of the position table: a square grid that is interpolated to the picture's."""
    deepstack_visual_indexes: list[int]
    """Global 0-based indexes of the blocks whose output a merger of their own brings to the first layers of the text decoder."""

    @property
    def deepstack_layers(self) -> list[int]:
        return self.deepstack_visual_indexes

    @model_validator(mode="after")
    def _tables_fit(self) -> Qwen3VisionEncoderConfig:
        rows, indexes = self.max_position_embeddings, self.deepstack_visual_indexes
        if isqrt(rows) ** 2 != rows:
            raise ValueError(f"max_position_embeddings {rows} is no square, so its rows make no square grid")
        outside = [i for i in indexes if not 0 <= i < self.num_layers]
        if outside:
            raise ValueError(f"deepstack_visual_indexes {outside} lie outside 0..{self.num_layers - 1}")
        if sorted(set(indexes)) != indexes:
            raise ValueError(f"deepstack_visual_indexes {indexes} must rise: the text decoder takes them in the order of the blocks")
        return self


class Qwen3TextDecoderConfig(TextDecoderConfig):
    """A Qwen3 decoder."""

    mrope_interleaved: bool = False
    """Rotary pairs go to time, height and width in turn (t h w t h w ...), as far as ``mrope_section`` has some, instead of in three runs."""


class Qwen3ImageEncoderConfig(ImageEncoderConfig):
    vision_encoder: Qwen3VisionEncoderConfig


class Qwen3VLConfig(ModelConfig):
    """model.json of Qwen3-VL."""

    image_encoder: Qwen3ImageEncoderConfig | None = None
    text_decoder: Qwen3TextDecoderConfig

    @model_validator(mode="after")
    def _deepstack_fits(self) -> Qwen3VLConfig:
        if self.image_encoder is not None:
            indexes = self.image_encoder.vision_encoder.deepstack_visual_indexes
            if len(indexes) > self.text_decoder.num_layers:
                raise ValueError(
                    f"deepstack_visual_indexes {indexes} bring {len(indexes)} outputs to the first text layers, but text_decoder.num_layers is "
                    f"{self.text_decoder.num_layers}"
                )
        return self


def qwen3_keys(read: Reader) -> dict[str, Any]:
    """What Qwen3 decoders have beyond Qwen2's.

    Raises:
        ConfigError: biases, or rotary pairs in runs; transformers would compute another model than config.json says.
    """
    if read.text.get("attention_bias"):
        raise ConfigError("config.json: attention_bias true is not supported; no published Qwen3-VL has it")
    interleaved = read.rope.get("mrope_interleaved", True)
    if interleaved is not True:
        raise ConfigError(f"config.json: mrope_interleaved {interleaved!r} is not supported; transformers interleaves whatever it says")
    return {"kv_channels": read.get(read.text, "head_dim"), "qk_layernorm": True, "mrope_interleaved": True}


def vision_rope_theta(vision: HFConfig) -> Any:
    """Base of the 2-D rotary positions; only files of transformers 5.x name it."""
    rope = Reader.section(vision, "rope_parameters")
    kind = rope.get("rope_type", "axial")
    if kind != "axial":
        raise ConfigError(f"config.json, vision_config: rope type {kind!r} is not supported; supported: axial")
    return rope.get("rope_theta", 10000.0)


def vision_encoder(read: Reader) -> Qwen3VisionEncoderConfig:
    """The vision encoder that all Qwen3-VL share."""
    return parse_section(
        Qwen3VisionEncoderConfig,
        {
            "model_id": "qwen3vit",
            "num_layers": read.get(read.vision, "depth"),
            "hidden_size": read.get(read.vision, "hidden_size"),
            "ffn_hidden_size": read.get(read.vision, "intermediate_size"),
            "num_attention_heads": read.get(read.vision, "num_heads"),
            "in_channels": read.get(read.vision, "in_channels", "in_chans"),
            "patch_size": read.get(read.vision, "patch_size"),
            "temporal_patch_size": read.get(read.vision, "temporal_patch_size"),
            "spatial_merge_size": read.get(read.vision, "spatial_merge_size"),
            "max_position_embeddings": read.get(read.vision, "num_position_embeddings"),
            "deepstack_visual_indexes": read.get(read.vision, "deepstack_visual_indexes"),
            "add_bias_conv": True,
            "rope_theta": vision_rope_theta(read.vision),
            "activation_func": read.get(read.vision, "hidden_act"),
            "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-6,
            "init_method_std": read.init_std,
            "freeze": False,
        },
        "config.json, vision_config",
    )


def from_hf_config(hf: HFConfig) -> ModelConfig:
    """Read a ``qwen3_vl`` config.json.

    Raises:
        ConfigError: a key is missing or its value cannot be represented.
    """
    read = Reader(hf)
    text = decoder_section(read, Qwen3TextDecoderConfig, model_id="qwen3_lm", **qwen3_keys(read))
    return assemble(read, "qwen3_vl", vision_encoder(read), text, Qwen3VLConfig)
