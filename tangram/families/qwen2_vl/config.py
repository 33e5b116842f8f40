"""Qwen2-VL's Hugging Face config as a model config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tangram.config.model import ModelConfig, TextDecoderConfig, VisionEncoderConfig, VisionProjectorConfig
from tangram.config.parsing import parse_section
from tangram.errors import ConfigError

HFConfig = Mapping[str, Any]
Text = TypeVar("Text", bound=TextDecoderConfig)


class Reader:
    """Reads keys of config.json and says which one is missing.

    Files of the hub are flat; files written by transformers 4.57 hold the text keys both at the top and under ``text_config``;
    files of 5.x only under ``text_config``. The nested value wins.
    """

    def __init__(self, hf: HFConfig) -> None:
        self.hf = hf
        flat = {k: v for k, v in hf.items() if not isinstance(v, Mapping) or k in ("rope_scaling", "rope_parameters")}
        self.text = {**flat, **self.section(hf, "text_config")}
        self.vision = self.section({"vision_config": self.get(hf, "vision_config")}, "vision_config")

    @staticmethod
    def get(section: HFConfig, key: str, *others: str) -> Any:
        for name in (key, *others):
            if section.get(name) is not None:
                return section[name]
        raise ConfigError(f"config.json: key {key!r} is missing")

    @staticmethod
    def section(section: HFConfig, *keys: str) -> HFConfig:
        """The mapping under the first of ``keys`` that holds something; empty where none does.

        Raises:
            ConfigError: it holds no mapping.
        """
        for key in keys:
            value = section.get(key)
            if value:
                if not isinstance(value, Mapping):
                    raise ConfigError(f"config.json: {key} is {value!r}; it must be a mapping")
                return value
        return {}

    @property
    def rope(self) -> Mapping[str, Any]:
        """``rope_parameters`` of 5.x, or ``rope_scaling`` of 4.x with ``rope_theta`` beside it."""
        rope = dict(self.section(self.text, "rope_parameters", "rope_scaling"))
        rope.setdefault("rope_theta", self.text.get("rope_theta"))
        if rope["rope_theta"] is None:
            raise ConfigError("config.json: key 'rope_theta' is missing")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise ConfigError(f"config.json: rope type {kind!r} is not supported; supported: default, mrope")
        return rope

    @property
    def tied(self) -> bool:
        """The top-level key decides: transformers ties by it."""
        return bool(self.hf.get("tie_word_embeddings", self.text.get("tie_word_embeddings", False)))

    @property
    def init_std(self) -> Any:
        return self.text.get("initializer_range", 0.02)


def text_decoder(read: Reader, model_id: str) -> TextDecoderConfig:
    """The Qwen2 decoder that Qwen2-VL and Qwen2.5-VL share.

    Raises:
        ConfigError: heads of another width than hidden_size gives them; transformers takes that one for attention, whatever head_dim says.
    """
    width, hidden, heads = read.text.get("head_dim"), read.get(read.text, "hidden_size"), read.get(read.text, "num_attention_heads")
    if width is not None and width * heads != hidden:
        raise ConfigError(f"config.json: head_dim {width!r} must be hidden_size {hidden} / num_attention_heads {heads}; correct it, or leave it out")
    return decoder_section(read, TextDecoderConfig, model_id=model_id, add_qkv_bias=True)


def decoder_section(read: Reader, section: type[Text], **further: Any) -> Text:
    """What the decoders of all Qwen-VL have in common, and ``further`` keys of the section."""
    text = read.text
    if text.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window true is not supported; no published Qwen-VL uses it")
    other = sorted({str(kind) for kind in text.get("layer_types") or () if kind != "full_attention"})
    if other:
        raise ConfigError(f"config.json: layer_types {', '.join(other)} is not supported; every published Qwen-VL has full_attention alone")
    return parse_section(
        section,
        {
            "num_layers": read.get(text, "num_hidden_layers"),
            "hidden_size": read.get(text, "hidden_size"),
            "ffn_hidden_size": read.get(text, "intermediate_size"),
            "num_attention_heads": read.get(text, "num_attention_heads"),
            "num_query_groups": read.get(text, "num_key_value_heads", "num_attention_heads"),
            "kv_channels": text.get("head_dim"),
            "vocab_size": read.get(text, "vocab_size"),
            "max_position_embeddings": read.get(text, "max_position_embeddings"),
            "rope_theta": read.rope["rope_theta"],
            "mrope_section": None if further.get("position_embedding_type") == "rope" else read.get(read.rope, "mrope_section"),
            "untie_embeddings_and_output_weights": not read.tied,
            "activation_func": read.get(text, "hidden_act"),
            "layernorm_epsilon": read.get(text, "rms_norm_eps"),
            "init_method_std": read.init_std,
            "attention_dropout": text.get("attention_dropout", 0.0),
            **further,
        },
        "config.json, text",
    )


def projector(read: Reader, vision: VisionEncoderConfig, text: TextDecoderConfig) -> VisionProjectorConfig:
    """The merger between the two.

    Raises:
        ConfigError: the vision encoder is said to give another width than the text decoder has.
    """
    key = "hidden_size" if "embed_dim" in read.vision else "out_hidden_size"
    width = read.vision.get(key, text.hidden_size)
    if width != text.hidden_size:
        raise ConfigError(f"config.json: {key} {width!r} of vision_config must be the text decoder's hidden_size {text.hidden_size}")
    return parse_section(
        VisionProjectorConfig,
        {
            "model_id": "lnmlp",
            "input_size": vision.hidden_size,
            "ffn_hidden_size": vision.hidden_size * vision.spatial_merge_size**2,
            "hidden_size": text.hidden_size,
            "normalization": vision.normalization,
            "layernorm_epsilon": 1e-6,
            "init_method_std": read.init_std,
        },
        "config.json, projector",
    )


def assemble(
    read: Reader, model_id: str, vision: VisionEncoderConfig, text: TextDecoderConfig, section: type[ModelConfig] = ModelConfig
) -> ModelConfig:
    """The whole model; ``section`` is the family's config class."""
    return parse_section(
        section,
        {
            "model_id": model_id,
            "img_context_token_id": read.get(read.hf, "image_token_id"),
            "video_token_id": read.get(read.hf, "video_token_id"),
            "vision_start_token_id": read.get(read.hf, "vision_start_token_id"),
            "image_encoder": {"vision_encoder": vision, "vision_projector": projector(read, vision, text)},
            "text_decoder": text,
        },
        "config.json",
    )


def from_hf_config(hf: HFConfig) -> ModelConfig:
    """Read a ``qwen2_vl`` config.json.

    Raises:
        ConfigError: a key is missing or its value cannot be represented.
    """
    read = Reader(hf)
    width, ratio = read.get(read.vision, "embed_dim"), read.get(read.vision, "mlp_ratio")
    if not all(isinstance(number, (int, float)) for number in (width, ratio)):
        raise ConfigError(f"config.json, vision_config: embed_dim {width!r} and mlp_ratio {ratio!r} must be numbers")
    vision = parse_section(
        VisionEncoderConfig,
        {
            "model_id": "qwen2vit",
            "num_layers": read.get(read.vision, "depth"),
            "hidden_size": width,
            "ffn_hidden_size": int(width * ratio),
            "num_attention_heads": read.get(read.vision, "num_heads"),
            "in_channels": read.get(read.vision, "in_channels", "in_chans"),
            "patch_size": read.get(read.vision, "patch_size"),
            "temporal_patch_size": read.get(read.vision, "temporal_patch_size"),
            "spatial_merge_size": read.get(read.vision, "spatial_merge_size"),
            # The hub's files leave it out.
            "activation_func": read.vision.get("hidden_act", "quick_gelu"),
            "normalization": "LayerNorm",
            "layernorm_epsilon": 1e-6,
            "init_method_std": read.init_std,
            "freeze": False,
        },
        "config.json, vision_config",
    )
    return assemble(read, "qwen2_vl", vision, text_decoder(read, "qwen2lm"))
