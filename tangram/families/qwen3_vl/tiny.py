"""A small random Qwen3-VL."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tangram.families.qwen2_vl.tiny import hf_config as qwen2_vl_config
from tangram.families.qwen3_vl.config import from_hf_config
from tangram.families.tiny import DEFAULT_SPEC, TinySpec, write_checkpoint
from tangram.families.tokenizer_files import LAST_ADDED_QWEN3, write_tokenizer

SIZES = ("deepstack", "position_rows")
HALF_PIXELS = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
write_qwen3_tokenizer = partial(write_tokenizer, last_added=LAST_ADDED_QWEN3, default_system="")


def vision_config(spec: TinySpec) -> dict[str, Any]:
    """The vision tower. DeepStack follows every second block, as far as there are text layers to take it."""
    deepstack = spec.deepstack or tuple(range(0, spec.vision_layers, 2))[: spec.text_layers]
    return {
        "depth": spec.vision_layers,
        "hidden_size": spec.vision_hidden,
        "out_hidden_size": spec.hidden,
        "intermediate_size": spec.vision_ffn or 2 * spec.vision_hidden,
        "num_heads": spec.vision_heads,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": spec.position_rows or 64,
        "deepstack_visual_indexes": list(deepstack),
    }


def hf_config(spec: TinySpec, tied: bool, model_type: str) -> dict[str, Any]:
    """The whole config.json, with the constants of the published models."""
    config = qwen2_vl_config(spec, tied, model_type, vision_config(spec))
    text = config["text_config"]
    del text["use_sliding_window"]
    text |= {
        "head_dim": spec.head_dim,
        "attention_bias": False,
        "max_position_embeddings": 262144,
        "rope_theta": 5000000.0,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": spec.mrope_section},
    }
    return config


def write_tiny(out: Path, seed: int, tied: bool, spec: TinySpec = DEFAULT_SPEC, *, force: bool = False) -> None:
    """See ``TinyWriter``.

    Raises:
        ConfigError: DeepStack blocks or a position table that the vision tower cannot have.
    """
    config = hf_config(spec, tied, "qwen3_vl")
    from_hf_config(config)
    write_checkpoint(out, config, "Qwen3VLProcessor", seed, spec, force, sizes=SIZES, pixels=HALF_PIXELS, tokenizer=write_qwen3_tokenizer)
