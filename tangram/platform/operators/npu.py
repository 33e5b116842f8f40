"""The operators as Ascend's torch_npu has them fused.

Not run on such a device: none was at hand. Tested with a stand-in for torch_npu that computes plainly and records what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch_npu
from torch import Tensor

from tangram.platform.operators import plain
from tangram.platform.operators.segments import Segments

CAUSAL_MASK = 2048
"""Side of the mask that ``npu_fusion_attention`` takes in place of a whole causal one."""
TOP_LEFT = 2
"""Its ``sparse_mode`` for causality counted from the first query, as torch counts it."""
MOST_SEGMENTS = 2048
"""Largest number of segments that it takes in one call."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The kernel takes both in one type: the wider of the two, which is the weight's where it is fp32 beside activations of 16 bits."""
    common = torch.promote_types(x.dtype, weight.dtype)
    return torch_npu.npu_rms_norm(x.to(common), weight.to(common), epsilon=eps)[0]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The kernel takes both side by side."""
    return torch_npu.npu_swiglu(torch.cat((gate, up), dim=-1), dim=-1)


def vision_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel takes ``[b, s, heads, d]``."""
    cos, sin = cos.float()[None, :, None], sin.float()[None, :, None]

    def rotate(x: Tensor) -> Tensor:
        return torch_npu.npu_rotary_mul(x.float()[None], cos, sin)[0].to(x.dtype)

    return rotate(query), rotate(key)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None) -> Tensor:
    """The kernel's mask is True where a query may not see a key; fewer heads of keys are its own business."""
    blocked, mode = (~mask, 0) if mask is not None else _blocked(causal, query.device)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch_npu.npu_fusion_attention(
        query, key, value, query.shape[1], "BNSD", atten_mask=blocked, scale=scale, keep_prob=1.0 - dropout, sparse_mode=mode
    )[0]


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """As ``varlen.segment_attention``. The kernel takes where segments end, without the 0 that they begin with."""
    if segments is None:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return attention(query, key, value, None, dropout, causal, scale).permute(2, 0, 1, 3)
    assert query.shape[1] == 1, f"segments need one row, got {query.shape[1]}"
    blocked, mode = _blocked(causal, query.device)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outs, start = [], 0
    for first in range(0, len(segments.lengths), MOST_SEGMENTS):
        ends = list(accumulate(segments.lengths[first : first + MOST_SEGMENTS]))
        tokens = [x[start : start + ends[-1], 0] for x in (query, key, value)]
        start += ends[-1]
        outs.append(
            torch_npu.npu_fusion_attention(
                *tokens,
                query.shape[2],
                "TND",
                atten_mask=blocked,
                scale=scale,
                keep_prob=1.0 - dropout,
                actual_seq_qlen=ends,
                actual_seq_kvlen=ends,
                sparse_mode=mode,
            )[0]
        )
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(1)


def _blocked(causal: bool, device: torch.device) -> tuple[Tensor | None, int]:
    """Mask and ``sparse_mode``."""
    return (_causal_mask(device), TOP_LEFT) if causal else (None, 0)


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(CAUSAL_MASK, CAUSAL_MASK, dtype=torch.bool, device=device).triu(1)


ROWS, SUMMED = 0, 2
"""Axes of ``npu_grouped_matmul`` that are cut into groups: rows of the left matrix, or the axis that is summed over."""


def grouped_linear(tokens: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """As ``plain.grouped_linear``, which computes a single group, of which the kernel makes none."""
    if not sum(counts) or len(weights) == 1:
        return plain.grouped_linear(tokens, weights, counts)
    made: Tensor = _GroupedLinear.apply(tokens, torch.tensor(counts, dtype=torch.int64, device=tokens.device), *weights)
    return made


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, counts: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, counts, *weights)
        return _grouped(tokens, [weight.T for weight in weights], counts, ROWS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, counts, *weights = ctx.saved_tensors
        of_tokens, _, *of_weights = ctx.needs_input_grad
        gradient = gradients[0].contiguous()
        first = _grouped(gradient, weights, counts, ROWS) if of_tokens else None
        second = _grouped(gradient.T, [tokens], counts, SUMMED).unbind() if any(of_weights) else [None] * len(weights)
        return first, None, *second


def _grouped(left: Tensor, right: list[Tensor], counts: Tensor, axis: int) -> Tensor:
    # 3: one tensor comes out; 1: counts, not their sums.
    made: Tensor = torch_npu.npu_grouped_matmul([left], right, group_list=counts, split_item=3, group_type=axis, group_list_type=1)[0]
    return made
