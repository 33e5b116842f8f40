"""Hugging Face configs that nobody has published: what transformers would compute otherwise than we is refused, what it computes alike is not."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.errors import ConfigError
from tangram.families.base import get_family
from tangram.families.llava.tiny import hf_config as llava_config
from tangram.families.qwen2_5_vl.tiny import vision_config
from tangram.families.qwen2_vl.tiny import hf_config
from tangram.families.tiny import TinySpec

SPEC = TinySpec(hidden=32, heads=4, vocab=97)


def qwen(**text: Any) -> dict[str, Any]:
    config = hf_config(SPEC, False, "qwen2_5_vl", vision_config(SPEC))
    config["text_config"] |= text
    return config


def llava(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    config = llava_config(SPEC, False)
    config["text_config"] |= text
    config["vision_config"] |= vision
    return config


def sections(*section: int) -> dict[str, Any]:
    return {"type": "mrope", "mrope_section": list(section)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (qwen(head_dim=12, rope_scaling=sections(2, 2, 2)), "head_dim 12 must be hidden_size 32 / num_attention_heads 4; correct it"),
        (qwen(layer_types=["full_attention", *["sliding_attention"] * 3]), "layer_types sliding_attention is not supported"),
        (qwen(rope_scaling=sections(5, -2, 1)), r"mrope_section \[5, -2, 1\] must hold 3 numbers that sum to half of head_dim 8, none below 0"),
        (llava({"head_dim": 9}, {}), "head_dim 9 is odd, and rotary positions turn pairs; make it even"),
    ],
)
def test_what_transformers_computes_otherwise_or_not_at_all_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_family(config["model_type"]).from_hf_config(config)


def test_a_clip_tower_turns_nothing_so_its_heads_have_any_width() -> None:
    model = get_family("llava").from_hf_config(llava({}, {"hidden_size": 30, "num_attention_heads": 6}))
    assert model.image_encoder is not None and model.image_encoder.vision_encoder.head_dim == 5
