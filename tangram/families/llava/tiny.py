"""A small random LLaVA. Its tokenizer comes with no package, so that no tokenizer files are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangram.errors import ConfigError
from tangram.families.tiny import CLIP_PIXELS, DEFAULT_SPEC, TinySpec, model_files

REAL_VOCABULARY = 32064
"""Rows of the embedding in the hub's llava-1.5 checkpoints: 32000 of Llama, ``<image>``, ``<pad>``, and 62 that fill up."""
IMAGE_SIDE = 56
"""Pixels: 4 x 4 patches."""
PATCH = 14


def token_ids(spec: TinySpec) -> tuple[int, int]:
    """Ids of ``<image>`` and ``<pad>``: the published ones, or the last two of a small vocabulary."""
    return (32000, 32001) if spec.vocab is None else (spec.vocab - 2, spec.vocab - 1)


def hf_config(spec: TinySpec, tied: bool) -> dict[str, Any]:
    """The whole config.json, with the constants of the published model."""
    image, pad = token_ids(spec)
    return {
        "model_type": "llava",
        "text_config": {
            "model_type": "llama",
            "vocab_size": spec.vocab or REAL_VOCABULARY,
            "hidden_size": spec.hidden,
            "intermediate_size": spec.ffn or 2 * spec.hidden,
            "num_hidden_layers": spec.text_layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            # transformers 4.57 ties by this key, 5.x by the outer one.
            "tie_word_embeddings": tied,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": spec.vision_hidden,
            "intermediate_size": spec.vision_ffn or 2 * spec.vision_hidden,
            "num_hidden_layers": spec.vision_layers,
            "num_attention_heads": spec.vision_heads,
            "image_size": IMAGE_SIDE,
            "patch_size": PATCH,
        },
        "image_token_index": image,
        "image_seq_length": (IMAGE_SIDE // PATCH) ** 2,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "pad_token_id": pad,
        "tie_word_embeddings": tied,
    }


def image_processor() -> dict[str, Any]:
    """Content of preprocessor_config.json in the form that the hub's file has."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_resize": True,
        "size": {"shortest_edge": IMAGE_SIDE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "image_mean": CLIP_PIXELS[0],
        "image_std": CLIP_PIXELS[1],
    }


def write_tiny(out: Path, seed: int, tied: bool, spec: TinySpec = DEFAULT_SPEC, *, force: bool = False) -> None:
    """See ``TinyWriter``."""
    if spec.max_pixels != DEFAULT_SPEC.max_pixels:
        raise ConfigError(f"tiny model: llava takes pictures of one size, {IMAGE_SIDE} x {IMAGE_SIDE} pixels; leave max_pixels out")
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": token_ids(spec)[1]}
    with model_files(out, hf_config(spec, tied), image_processor(), tokens, seed, spec, force):
        pass
