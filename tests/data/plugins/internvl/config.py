"""InternVL's config.json as a model config."""

from pydantic import Field

from tangram.config.model import ImageEncoderConfig, ModelConfig, TextDecoderConfig
from tangram.config.parsing import parse_section
from tangram.errors import ConfigError
from tangram.families.llava.config import ClipEncoderConfig
from tangram.families.qwen2_vl.config import Reader, decoder_section

ONLY = {"use_qk_norm": False, "use_mean_pooling": True, "attention_bias": True, "norm_type": "layer_norm", "use_absolute_position_embeddings": True}
"""Keys of ``vision_config`` of which InternVL3 up to 14B has this value, and this plug-in no other."""


class InternEncoderConfig(ClipEncoderConfig):
    spatial_merge_size: int = Field(default=2, ge=1)
    vision_feature_layer: int = -1


class InternImageEncoderConfig(ImageEncoderConfig):
    vision_encoder: InternEncoderConfig


class InternVLModelConfig(ModelConfig):
    image_encoder: InternImageEncoderConfig | None = None


def side(section, key: str) -> int:
    """A size in pixels, which the file gives once, or once for each axis."""
    value = section[key]
    sides = set(value) if isinstance(value, (list, tuple)) else {value}
    if len(sides) != 1:
        raise ConfigError(f"config.json, vision_config: {key} {value!r} is no square; InternVL takes squares alone")
    return sides.pop()


def from_hf_config(hf) -> InternVLModelConfig:
    """Read an ``internvl`` config.json.

    Raises:
        ConfigError: a key is missing or its value cannot be represented.
    """
    read = Reader(hf)
    for key, value in ONLY.items():
        if read.vision.get(key, value) != value:
            raise ConfigError(f"config.json, vision_config: {key} {read.vision[key]!r} is not supported; supported: {value!r}")
    rope = {"model_id": "qwen2lm", "add_qkv_bias": True, "position_embedding_type": "rope"}
    text = decoder_section(read, TextDecoderConfig, **rope, untie_embeddings_and_output_weights=not hf.get("tie_word_embeddings", True))
    vision = {
        "model_id": "intern_vit",
        "num_layers": read.get(read.vision, "num_hidden_layers"),
        "hidden_size": read.get(read.vision, "hidden_size"),
        "ffn_hidden_size": read.get(read.vision, "intermediate_size"),
        "num_attention_heads": read.get(read.vision, "num_attention_heads"),
        "patch_size": side(read.vision, "patch_size"),
        "image_size": side(read.vision, "image_size"),
        "spatial_merge_size": round(1 / hf.get("downsample_ratio", 0.5)),
        "vision_feature_layer": hf.get("vision_feature_layer", -1),
        "add_bias_conv": True,
        "activation_func": read.vision.get("hidden_act", "gelu"),
        "normalization": "LayerNorm",
        "layernorm_epsilon": read.vision.get("layer_norm_eps", 1e-6),
        "freeze": False,
    }
    projector = {
        "model_id": "intern_mlp",
        "input_size": vision["hidden_size"] * vision["spatial_merge_size"] ** 2,
        "ffn_hidden_size": text.hidden_size,
        "hidden_size": text.hidden_size,
        "activation_func": hf.get("projector_hidden_act", "gelu"),
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
    }
    encoder = {"vision_encoder": vision, "vision_projector": projector}
    whole = {"model_id": "internvl", "img_context_token_id": read.get(hf, "image_token_id"), "image_encoder": encoder, "text_decoder": text}
    return parse_section(InternVLModelConfig, whole, "config.json")
