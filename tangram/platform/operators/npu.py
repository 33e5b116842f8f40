"""The operators as Ascend's torch_npu has them fused.

Not run on such a device: none was at hand. Tested with a stand-in for torch_npu that computes plainly and records what it is given.
"""

from __future__ import annotations

from functools import cache

import torch
import torch_npu
from torch import Tensor

CAUSAL_MASK = 2048
"""Side of the mask that ``npu_fusion_attention`` takes in place of a whole causal one."""
TOP_LEFT = 2
"""Its ``sparse_mode`` for causality counted from the first query, as torch counts it."""


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
    blocked, mode = (None if mask is None else ~mask), 0
    if mask is None and causal:
        blocked, mode = _causal_mask(query.device), TOP_LEFT
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return torch_npu.npu_fusion_attention(
        query, key, value, query.shape[1], "BNSD", atten_mask=blocked, scale=scale, keep_prob=1.0 - dropout, sparse_mode=mode
    )[0]


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(CAUSAL_MASK, CAUSAL_MASK, dtype=torch.bool, device=device).triu(1)
