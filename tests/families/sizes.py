"""config.json of every published size, with the keys that the hub's files have, and the splits that their public guides show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Lists = tuple[list[Any], list[Any]]
"""Layers per stage of vision and text."""


@dataclass(frozen=True)
class Size:
    """One published model; ``splits`` are its pipeline lists beside the single stage."""

    family: str
    hf: dict[str, Any]
    splits: tuple[Lists, ...]


def qwen_text(hidden: int, layers: int, heads: int, groups: int, ffn: int, vocab: int, tied: bool, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "use_sliding_window": False,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    }


def qwen2_vl(hidden: int, layers: int, heads: int, groups: int, ffn: int, vocab: int, tied: bool) -> dict[str, Any]:
    vision = {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": hidden,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    }
    return {"model_type": "qwen2_vl", **qwen_text(hidden, layers, heads, groups, ffn, vocab, tied, 32768), "vision_config": vision}


def qwen2_5_vl(hidden: int, layers: int, heads: int, groups: int, ffn: int, vit_ffn: int, vocab: int, tied: bool) -> dict[str, Any]:
    vision = {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": vit_ffn,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": hidden,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    }
    return {"model_type": "qwen2_5_vl", **qwen_text(hidden, layers, heads, groups, ffn, vocab, tied, 128000), "vision_config": vision}


LLAVA_7B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}

LLAVA_13B: dict[str, Any] = {
    **LLAVA_7B,
    "text_config": {
        **LLAVA_7B["text_config"],
        "_name_or_path": "lmsys/vicuna-13b-v1.5",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
}

FIRST_OF_8 = [32] + [0] * 7
VIRTUAL_28: Lists = ([[10, 10, 10, 2], [0, 0, 0, 0], [0, 0, 0, 0]], [[0, 0, 0, 1], [4, 4, 4, 4], [4, 3, 2, 2]])
"""4 ranks with 3 virtual stages, from the guide to Qwen2-VL-7B; fits 32 vision and 28 text layers."""
LONG_72B: Lists = ([32, 0, 0, 0], [6, 25, 25, 24])

SIZES = {
    "qwen2_vl-2b": Size("qwen2_vl", qwen2_vl(1536, 28, 12, 2, 8960, 151936, True), (([32, 0, 0, 0], [1, 10, 10, 7]), VIRTUAL_28)),
    "qwen2_vl-7b": Size("qwen2_vl", qwen2_vl(3584, 28, 28, 4, 18944, 152064, False), (([32, 0, 0, 0], [1, 10, 10, 7]), VIRTUAL_28)),
    "qwen2_vl-72b": Size("qwen2_vl", qwen2_vl(8192, 80, 64, 8, 29568, 152064, False), ((FIRST_OF_8, [5, 11, 11, 11, 11, 11, 11, 9]), LONG_72B)),
    "qwen2_5_vl-3b": Size(
        "qwen2_5_vl",
        qwen2_5_vl(2048, 36, 16, 2, 11008, 3420, 151936, True),
        (([20, 12], [0, 36]), ([[20, 12], [0, 0]], [[0, 6], [14, 16]])),
    ),
    "qwen2_5_vl-7b": Size("qwen2_5_vl", qwen2_5_vl(3584, 28, 28, 4, 18944, 3420, 152064, False), (([32, 0], [12, 16]), VIRTUAL_28)),
    "qwen2_5_vl-32b": Size("qwen2_5_vl", qwen2_5_vl(5120, 64, 40, 8, 27648, 3456, 152064, False), ((FIRST_OF_8, [1] + [9] * 7),)),
    "qwen2_5_vl-72b": Size(
        "qwen2_5_vl", qwen2_5_vl(8192, 80, 64, 8, 29568, 3456, 152064, False), ((FIRST_OF_8, [6, 11, 11, 11, 11, 11, 11, 8]), LONG_72B)
    ),
    "llava-7b": Size("llava", LLAVA_7B, (([24, 0], [13, 19]), ([[16, 8], [0, 0]], [[0, 4], [15, 13]]))),
    "llava-13b": Size("llava", LLAVA_13B, (([24, 0], [16, 24]),)),
}

LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}


def qwen3_vl(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, *, vision: dict[str, Any] = LARGE_TOWER, tied: bool = False
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            "intermediate_size": ffn,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": groups,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "tie_word_embeddings": tied,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": tied,
        "video_token_id": 151656,
        "vision_config": {
            **vision,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "initializer_range": 0.02,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


def qwen3_vl_moe(layers: int, hidden: int, heads: int, groups: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    config = qwen3_vl(layers, hidden, heads, groups, ffn)
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_ffn, "norm_topk_prob": True}
    config["text_config"] |= {**experts, "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen3_vl_moe_text"}
    return config | {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}


QWEN3_VL = {
    "2b": qwen3_vl(28, 2048, 16, 8, 6144, vision=SMALL_TOWER, tied=True),
    "4b": qwen3_vl(36, 2560, 32, 8, 9728, vision=SMALL_TOWER, tied=True),
    "8b": qwen3_vl(36, 4096, 32, 8, 12288),
    "32b": qwen3_vl(64, 5120, 64, 8, 25600),
    "30b": qwen3_vl_moe(48, 2048, 32, 4, 6144, 768),
    "235b": qwen3_vl_moe(94, 4096, 64, 4, 12288, 1536),
}
QWEN3_VL_PARAMETERS = {"2b": 2_127_532_032, "4b": 4_437_815_808, "8b": 8_767_123_696, "30b": 31_070_754_032}
"""Parameters that the hub counts in each."""
