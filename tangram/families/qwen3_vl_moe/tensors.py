"""The tensor table of Qwen3-VL with experts: Qwen3-VL's with a router and experts for the text decoder's MLP.

The hub stacks the experts of a layer in one tensor ``[experts, in, out]``; a rank holds whole experts, each as linears ``[out, in]``.
"""

from __future__ import annotations

from tangram.config.model import ModelConfig, TextDecoderConfig
from tangram.families.qwen2_vl.tensors import LOCAL_TEXT_LAYER, TEXT_LAYER, text_rules
from tangram.families.qwen3_vl.tensors import image_encoder_rules
from tangram.families.qwen3_vl_moe.config import Qwen3MoeTextDecoderConfig
from tangram.placement.table import PackedGatedSplit, Replicated, Rule, Source, Split


def expert_rules(text: TextDecoderConfig) -> list[Rule]:
    """The router, and of every expert gate and up projections side by side, then the down projection."""
    assert isinstance(text, Qwen3MoeTextDecoderConfig)
    experts, width, ffn = text.num_moe_experts, text.hidden_size, text.moe_intermediate_size
    local, source = f"{LOCAL_TEXT_LAYER}.mlp", f"{TEXT_LAYER}.mlp"
    expert = f"{local}.experts.local_experts.{{e}}"
    up = Source(f"{source}.experts.gate_up_proj", (experts, width, 2 * ffn), stacked=True)
    down = Source(f"{source}.experts.down_proj", (experts, ffn, width), stacked=True)
    return [
        Rule(f"{local}.router.weight", (Source(f"{source}.gate.weight", (experts, width)),), Replicated(), "text"),
        Rule(f"{expert}.linear_fc1.weight", (up,), PackedGatedSplit(), "text", "expert"),
        Rule(f"{expert}.linear_fc2.weight", (down,), Split(1), "text", "expert"),
    ]


def tensor_table(model: ModelConfig, padded_vocab: int) -> list[Rule]:
    """The whole of Qwen3-VL with experts.

    Args:
        padded_vocab: rows of the word embedding over all tensor-parallel ranks.
    """
    text = model.text_decoder
    return [*image_encoder_rules(model), *text_rules(text, padded_vocab, expert_rules(text))]
