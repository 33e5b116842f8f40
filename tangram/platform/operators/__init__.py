"""Operators that some platform has fused: chosen for each tensor by its device, with the plain implementation everywhere else.

| operator | npu | cuda |
|---|---|---|
| ``rms_norm`` | ``torch_npu.npu_rms_norm`` | ``torch.nn.functional.rms_norm`` |
| ``swiglu`` | ``torch_npu.npu_swiglu`` | |
| ``vision_rope`` | ``torch_npu.npu_rotary_mul`` | |
| ``segment_attention`` | ``torch_npu.npu_fusion_attention`` | flash-attn, TransformerEngine or ``varlen_attn`` of torch, see ``varlen`` |
| ``attention``, with a mask | ``torch_npu.npu_fusion_attention`` | torch's own, which is the plain one |
| ``attention_block`` and its backward | | flash-attn 2.7 or newer, if it is installed and the type has 16 bits |
| ``grouped_linear`` | ``torch_npu.npu_grouped_matmul`` | TransformerEngine's ``GroupedLinear``, or torch's ``grouped_mm``, which the cpu has too |
"""

from dataclasses import replace

from tangram.platform.operators import plain, varlen
from tangram.platform.operators.operator import Fused, Operator
from tangram.platform.operators.segments import SegmentGroup, Segments
from tangram.platform.operators.varlen import check_backend, ring_blocks, segment_attention

_NPU = "tangram.platform.operators.npu"

rms_norm = Operator(
    "rms_norm",
    plain.rms_norm,
    {
        "npu": Fused(_NPU, "torch_npu", "npu_rms_norm", repeats=True),
        # On cuda the plain one is fused already; a model of transformers has one of several kernels in its place.
        "cuda": Fused("tangram.platform.operators.plain", "torch.nn.functional", "rms_norm", repeats=True),
    },
)
"""``(x [..., h], weight [h], eps) -> [..., h]``"""
swiglu = Operator("swiglu", plain.swiglu, {"npu": Fused(_NPU, "torch_npu", "npu_swiglu", repeats=True)})
"""``(gate [..., f], up [..., f]) -> [..., f]``"""
vision_rope = Operator("vision_rope", plain.vision_rope, {"npu": Fused(_NPU, "torch_npu", "npu_rotary_mul", repeats=True)})
"""``(query [s, heads, d], key [s, heads, d], cos [s, d], sin [s, d]) -> (query, key)``, computed in fp32"""
attention = varlen.MASKED
"""``(query [b, heads, s, d], key [b, groups, s, d], value, mask [b, 1, s, s] or None, dropout, causal, scale) -> [b, heads, s, d]``"""
attention_block, attention_block_backward = varlen.BLOCK, varlen.BLOCK_BACKWARD
"""``(query [b, s, heads, d], key [b, t, groups, d], value, lengths, mask, scale) -> (out, log-sum-exp [b, heads, s])``, of some of the keys; and
``(gradient, query, key, value, out, log-sum-exp, lengths, mask, scale) -> gradients of query, key and value``"""
_GROUPED = Fused("tangram.platform.operators.grouped", "torch.nn.functional", "grouped_mm")
_LOOP = replace(_GROUPED, repeats=True)
grouped_linear = Operator(
    "grouped_linear",
    plain.grouped_linear,
    {
        "npu": Fused(_NPU, "torch_npu", "npu_grouped_matmul"),
        "cuda": (Fused("tangram.platform.operators.grouped_te", "transformer_engine.pytorch", "GroupedLinear"), _GROUPED),
        "cpu": _LOOP,
    },
)
"""``(tokens [n, in], weights, each [out, in], counts) -> [n, out]``, each weight for its own run of tokens. No maker of a kernel says that it
repeats itself; that of the cpu is a loop over groups."""

OPERATORS = {
    operator.name: operator for operator in (rms_norm, swiglu, vision_rope, attention, attention_block, attention_block_backward, grouped_linear)
}

__all__ = [
    "OPERATORS",
    "Fused",
    "Operator",
    "SegmentGroup",
    "Segments",
    "attention",
    "attention_block",
    "attention_block_backward",
    "check_backend",
    "grouped_linear",
    "ring_blocks",
    "rms_norm",
    "segment_attention",
    "swiglu",
    "vision_rope",
]
