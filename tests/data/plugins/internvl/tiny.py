"""A small random InternVL, for trials and tests."""

from tangram.families.llava.tiny import image_processor
from tangram.families.tiny import DEFAULT_SPEC, model_files

SIDE, PATCH = 56, 14
"""Pixels: 4 x 4 patches, 4 tokens."""


def write_tiny(out, seed, tied, spec=DEFAULT_SPEC, *, force=False) -> None:
    """See ``TinyWriter``."""
    vocab = spec.vocab or 151674
    text = {
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn or 2 * spec.hidden,
        "num_hidden_layers": spec.text_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }
    vision = {
        "hidden_size": spec.vision_hidden,
        "intermediate_size": spec.vision_ffn or 2 * spec.vision_hidden,
        "num_hidden_layers": spec.vision_layers,
        "num_attention_heads": spec.vision_heads,
        "attention_bias": True,
        "image_size": [SIDE, SIDE],
        "patch_size": [PATCH, PATCH],
    }
    config = {"model_type": "internvl", "text_config": text, "vision_config": vision, "image_token_id": vocab - 2, "tie_word_embeddings": tied}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": vocab - 1}
    with model_files(out, config, image_processor(), tokens, seed, spec, force):
        pass
