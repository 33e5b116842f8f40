"""A small random Qwen2-VL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.errors import ConfigError
from tangram.families.tiny import DEFAULT_SPEC, REAL_VOCABULARY, TinySpec, write_checkpoint


def text_config(spec: TinySpec, tied: bool, model_type: str) -> dict[str, Any]:
    """The Qwen2 decoder, with the constants of the published models."""
    return {
        "model_type": model_type,
        "vocab_size": spec.vocab or REAL_VOCABULARY,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn or 2 * spec.hidden,
        "num_hidden_layers": spec.text_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": spec.mrope_section},
        "use_sliding_window": False,
        "bos_token_id": spec.token_id("<|endoftext|>"),
        "eos_token_id": spec.token_id("<|im_end|>"),
        # transformers 4.57 ties by this key, 5.x by the outer one.
        "tie_word_embeddings": tied,
    }


def vision_config(spec: TinySpec) -> dict[str, Any]:
    """The vision tower.

    Raises:
        ConfigError: the family states its MLP as a whole multiple of the width, and the spec's is none.
    """
    ffn = spec.vision_ffn or 2 * spec.vision_hidden
    if ffn % spec.vision_hidden:
        raise ConfigError(f"tiny model: qwen2_vl needs vision_ffn {ffn} to be a multiple of vision_hidden {spec.vision_hidden}")
    return {
        "depth": spec.vision_layers,
        "embed_dim": spec.vision_hidden,
        "hidden_size": spec.hidden,
        "mlp_ratio": ffn // spec.vision_hidden,
        "num_heads": spec.vision_heads,
        "hidden_act": "quick_gelu",
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def hf_config(spec: TinySpec, tied: bool, model_type: str, vision: dict[str, Any]) -> dict[str, Any]:
    """The whole config.json."""
    return {
        "model_type": model_type,
        "text_config": text_config(spec, tied, f"{model_type}_text"),
        "vision_config": vision,
        "image_token_id": spec.token_id("<|image_pad|>"),
        "video_token_id": spec.token_id("<|video_pad|>"),
        "vision_start_token_id": spec.token_id("<|vision_start|>"),
        "vision_end_token_id": spec.token_id("<|vision_end|>"),
        "tie_word_embeddings": tied,
    }


def write_tiny(out: Path, seed: int, tied: bool, spec: TinySpec = DEFAULT_SPEC, *, force: bool = False) -> None:
    """See ``TinyWriter``."""
    write_checkpoint(out, hf_config(spec, tied, "qwen2_vl", vision_config(spec)), "Qwen2VLProcessor", seed, spec, force)
