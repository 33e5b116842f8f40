"""LLaVA-1.5's Hugging Face config as a model config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from tangram.config.model import Grid, ImageEncoderConfig, ModelConfig, TextDecoderConfig, VisionEncoderConfig
from tangram.config.parsing import parse_section
from tangram.errors import ConfigError
from tangram.families.qwen2_vl.config import HFConfig, Reader

LLAMA_DEFAULTS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""What transformers' LlamaConfig puts where ``text_config`` says nothing; the hub's files rely on it."""
CLIP_DEFAULTS: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0,
}
"""The same of CLIPVisionConfig, where ``vision_config`` is there but says nothing of a key."""
TOWER_DEFAULTS: dict[str, Any] = {
    **CLIP_DEFAULTS,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""What LlavaConfig makes of an absent ``vision_config``: CLIP ViT-L/14-336."""


class ClipEncoderConfig(VisionEncoderConfig):
    """A CLIP tower: pictures of one size, learned positions, a class token. All its layers are kept, used or not."""

    image_size: int = Field(ge=1)
    """Side of the square picture, pixels."""
    temporal_patch_size: int = Field(default=1, ge=1, le=1)
    spatial_merge_size: int = Field(default=1, ge=1, le=1)
    add_class_token: bool = True
    """A learned token before the patches, with a position of its own."""
    vision_feature_layer: int = -2
    """Whose output the projector gets, counted as transformers counts hidden states: -1 is the last layer's, -2 the one's before."""

    @property
    def picture_grid(self) -> Grid:
        return (1, self.image_size // self.patch_size, self.image_size // self.patch_size)

    @property
    def positions(self) -> int:
        """Rows of the position embedding: one per patch, and one for the class token."""
        return self.places(self.picture_grid)

    @property
    def used_layers(self) -> int:
        """Those up to ``vision_feature_layer``."""
        return self.vision_feature_layer if self.vision_feature_layer >= 0 else self.num_layers + 1 + self.vision_feature_layer

    @property
    def places_together(self) -> int:
        """One: patches are merged, if at all, when they are whole again."""
        return 1

    @property
    def rotary(self) -> bool:
        """No: positions are learned, so heads may have any width."""
        return False

    def places(self, grid: Grid) -> int:
        return super().places(grid) + int(self.add_class_token)

    @model_validator(mode="after")
    def _picture_fits(self) -> ClipEncoderConfig:
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not divisible by patch_size {self.patch_size}")
        if not -self.num_layers - 1 <= self.vision_feature_layer <= self.num_layers:
            raise ValueError(f"vision_feature_layer {self.vision_feature_layer} lies outside {-self.num_layers - 1}..{self.num_layers}")
        return self


class LlavaImageEncoderConfig(ImageEncoderConfig):
    vision_encoder: ClipEncoderConfig


class LlavaConfig(ModelConfig):
    image_encoder: LlavaImageEncoderConfig | None = None


def _filled(hf: HFConfig, defaults: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of config.json over the defaults of its class in transformers.

    Raises:
        ConfigError: the section is no mapping, or of another class.
    """
    given = {key: value for key, value in Reader.section(hf, name).items() if value is not None}
    filled = {**defaults, **given}
    kind, supported = filled["model_type"], defaults["model_type"]
    if kind != supported:
        raise ConfigError(f"config.json: {name}.model_type {kind!r} is not supported in a llava model; supported: {supported}")
    return filled


def _refuse(section: Mapping[str, Any], where: str, supported: Mapping[str, Any]) -> None:
    for key, value in supported.items():
        if section.get(key, value) not in (value, None):
            raise ConfigError(f"config.json: {where}{key} {section[key]!r} is not supported; LLaVA-1.5 has {value!r}")


def from_hf_config(hf: HFConfig) -> LlavaConfig:
    """Read a ``llava`` config.json; what it leaves out is as transformers has it.

    Raises:
        ConfigError: a key is missing or its value cannot be represented.
    """
    vision = _filled(hf, TOWER_DEFAULTS if hf.get("vision_config") is None else CLIP_DEFAULTS, "vision_config")
    text = _filled(hf, LLAMA_DEFAULTS, "text_config")
    _refuse(text, "text_config.", {"attention_bias": False, "mlp_bias": False})
    _refuse(hf, "", {"vision_feature_select_strategy": "default"})
    read = Reader({**hf, "vision_config": vision, "text_config": text})
    projector = {
        "model_id": "mlp",
        "input_size": vision["hidden_size"],
        "ffn_hidden_size": text["hidden_size"],
        "hidden_size": text["hidden_size"],
        "activation_func": hf.get("projector_hidden_act", "gelu"),
        "add_bias_linear": hf.get("multimodal_projector_bias", True),
        "init_method_std": read.init_std,
    }
    return parse_section(
        LlavaConfig,
        {
            "model_id": "llava",
            "img_context_token_id": hf.get("image_token_index", hf.get("image_token_id", 32000)),
            "image_encoder": {"vision_encoder": _vision_encoder(read, hf), "vision_projector": projector},
            "text_decoder": _text_decoder(read, bool(hf.get("tie_word_embeddings") or text.get("tie_word_embeddings"))),
        },
        "config.json",
    )


def _vision_encoder(read: Reader, hf: HFConfig) -> dict[str, Any]:
    vision = read.vision
    return {
        "model_id": "clip",
        "num_layers": vision["num_hidden_layers"],
        "hidden_size": vision["hidden_size"],
        "ffn_hidden_size": vision["intermediate_size"],
        "num_attention_heads": vision["num_attention_heads"],
        "in_channels": vision["num_channels"],
        "patch_size": vision["patch_size"],
        "image_size": vision["image_size"],
        "vision_feature_layer": hf.get("vision_feature_layer", -2),
        "activation_func": vision["hidden_act"],
        "normalization": "LayerNorm",
        "layernorm_epsilon": vision["layer_norm_eps"],
        "attention_dropout": vision["attention_dropout"],
        "init_method_std": vision.get("initializer_range", 0.02),
        "freeze": False,
    }


def _text_decoder(read: Reader, tied: bool) -> TextDecoderConfig:
    text = read.text
    return parse_section(
        TextDecoderConfig,
        {
            "model_id": "llama",
            "num_layers": text["num_hidden_layers"],
            "hidden_size": text["hidden_size"],
            "ffn_hidden_size": text["intermediate_size"],
            "num_attention_heads": text["num_attention_heads"],
            "num_query_groups": read.get(text, "num_key_value_heads", "num_attention_heads"),
            "kv_channels": text.get("head_dim"),
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text["max_position_embeddings"],
            "rope_theta": read.rope["rope_theta"],
            "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": not tied,
            "activation_func": text["hidden_act"],
            "layernorm_epsilon": text["rms_norm_eps"],
            "init_method_std": read.init_std,
            "attention_dropout": text.get("attention_dropout", 0.0),
        },
        "config.json, text_config",
    )
