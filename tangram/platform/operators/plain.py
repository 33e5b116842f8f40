"""The operators in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tangram.platform.operators.segments import SegmentGroup, Segments


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim."""
    common = torch.promote_types(x.dtype, weight.dtype)
    return functional.rms_norm(x.to(common), weight.shape, weight.to(common), eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return functional.silu(gate) * up


def vision_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate both halves of each head, in fp32. Source: ``apply_rotary_pos_emb_vision`` of transformers."""
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()

    def rotate(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return rotate(query), rotate(key)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None) -> Tensor:
    """Softmax attention.

    Args:
        mask: bool, True where a query may see a key; it replaces causality.
        dropout: probability.
        scale: of the scores; None: ``d ** -0.5``.
    """
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def grouped_linear(tokens: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Linears without biases, each of its own run of tokens: ``[n, in] -> [n, out]``. One without tokens gets gradients of zeros.

    Args:
        weights: ``[out, in]`` each.
        counts: tokens of each; they sum to ``n``.
    """
    return torch.cat([functional.linear(part, weight) for part, weight in zip(tokens.split(list(counts)), weights, strict=True)])


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """As ``varlen.segment_attention``: segments of one length at a time."""
    if segments is None:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return attention(query, key, value, None, dropout, causal, scale).permute(2, 0, 1, 3)
    assert query.shape[1] == 1, f"segments need one row, got {query.shape[1]}"

    def attend(group: SegmentGroup) -> Tensor:
        q, k, v = (_gather(x, group) for x in (query, key, value))
        return attention(q, k, v, None, dropout, causal, scale).transpose(1, 2).flatten(0, 1)

    out = torch.cat([attend(group) for group in segments.groups])
    return (out if segments.inverse is None else out.index_select(0, segments.inverse)).unsqueeze(1)


def _gather(x: Tensor, group: SegmentGroup) -> Tensor:
    """[s, 1, heads, d] -> [segments of the group, heads, length, d]."""
    if group.index.numel() != x.shape[0]:
        x = x.index_select(0, group.index.flatten())
    return x.reshape(-1, group.length, *x.shape[2:]).transpose(1, 2)
