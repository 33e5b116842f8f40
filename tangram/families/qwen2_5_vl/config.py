"""Qwen2.5-VL's Hugging Face config as a model config."""

from __future__ import annotations

from tangram.config.model import ModelConfig, VisionEncoderConfig
from tangram.config.parsing import parse_section
from tangram.families.qwen2_vl.config import HFConfig, Reader, assemble, text_decoder


def from_hf_config(hf: HFConfig) -> ModelConfig:
    """Read a ``qwen2_5_vl`` config.json.

    Raises:
        ConfigError: a key is missing or its value cannot be represented.
    """
    read = Reader(hf)
    vision = parse_section(
        VisionEncoderConfig,
        {
            "model_id": "qwen2_5_vit",
            "num_layers": read.get(read.vision, "depth"),
            "hidden_size": read.get(read.vision, "hidden_size"),
            "ffn_hidden_size": read.get(read.vision, "intermediate_size"),
            "num_attention_heads": read.get(read.vision, "num_heads"),
            "in_channels": read.get(read.vision, "in_channels", "in_chans"),
            "patch_size": read.get(read.vision, "patch_size"),
            "temporal_patch_size": read.get(read.vision, "temporal_patch_size"),
            "spatial_merge_size": read.get(read.vision, "spatial_merge_size"),
            "window_attn_size": read.get(read.vision, "window_size"),
            "fullatt_block_indexes": read.get(read.vision, "fullatt_block_indexes"),
            "tokens_per_second": read.get(read.vision, "tokens_per_second"),
            "gated_linear_unit": True,
            "activation_func": read.get(read.vision, "hidden_act"),
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-6,
            "init_method_std": read.init_std,
            "freeze": False,
        },
        "config.json, vision_config",
    )
    return assemble(read, "qwen2_5_vl", vision, text_decoder(read, "qwen2_5_lm"))
