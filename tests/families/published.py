"""config.json of the published Qwen3-VL, and the parameters that the hub counts in each."""

from __future__ import annotations

from typing import Any

VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
SMALL_VISION = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}


def qwen3_vl(layers: int, hidden: int, heads: int, groups: int, ffn: int, *, vision: dict[str, Any] = VISION, tied: bool = False) -> dict[str, Any]:
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


CONFIGS = {
    "2b": qwen3_vl(28, 2048, 16, 8, 6144, vision=SMALL_VISION, tied=True),
    "4b": qwen3_vl(36, 2560, 32, 8, 9728, vision=SMALL_VISION, tied=True),
    "8b": qwen3_vl(36, 4096, 32, 8, 12288),
    "32b": qwen3_vl(64, 5120, 64, 8, 25600),
    "30b": qwen3_vl_moe(48, 2048, 32, 4, 6144, 768),
    "235b": qwen3_vl_moe(94, 4096, 64, 4, 12288, 1536),
}
PARAMETERS = {"2b": 2_127_532_032, "4b": 4_437_815_808, "8b": 8_767_123_696, "30b": 31_070_754_032}
