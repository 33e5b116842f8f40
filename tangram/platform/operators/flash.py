"""Attention by flash-attn on CUDA, for types of 16 bits and without masks: over segments, and (2.7 or newer) to a block of the keys, where the rest
is done in plain torch.

Not run on such a device: none was at hand. Tested with a stand-in for flash-attn that computes plainly and records what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from flash_attn import flash_attn_interface as flash
from torch import Tensor

from tangram.platform.operators import blocks
from tangram.platform.operators.segments import Segments, as_rows, as_tokens, rows_as_segments


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """As ``varlen.segment_attention``."""
    segments = rows_as_segments(query, segments)
    out = flash.flash_attn_varlen_func(
        *as_tokens(query, key, value),
        segments.cu_seqlens,
        segments.cu_seqlens,
        segments.longest,
        segments.longest,
        dropout_p=dropout,
        softmax_scale=scale,
        causal=causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return as_rows(out, query.shape)


def attention_block(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int] | None, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """As ``blocks.attention_block``, but the output has the inputs' type."""
    if not _fits(query, mask):
        return blocks.attention_block(query, key, value, lengths, mask, scale)
    out, total, *_ = flash._wrapped_flash_attn_varlen_forward(
        *(part.flatten(0, 1) for part in (query, key, value)),
        *_ends(query, key, lengths),
        dropout_p=0.0,
        softmax_scale=scale,
        causal=lengths is not None,
    )
    # Its log-sum-exp is [heads, tokens of all rows].
    return out.view(query.shape), total.unflatten(1, query.shape[:2]).transpose(0, 1)


def attention_block_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    lengths: Sequence[int] | None,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``blocks.attention_block_backward``, but the gradients have the inputs' type."""
    if not _fits(query, mask):
        return blocks.attention_block_backward(gradient, query, key, value, out, total, lengths, mask, scale)
    inputs = [part.flatten(0, 1) for part in (query, key, value)]
    gradients = [torch.empty_like(part) for part in inputs]
    flash._wrapped_flash_attn_varlen_backward(
        gradient.flatten(0, 1).contiguous(),
        *inputs,
        out.flatten(0, 1),
        total.transpose(0, 1).flatten(1).contiguous(),
        *gradients,
        *_ends(query, key, lengths),
        dropout_p=0.0,
        softmax_scale=scale,
        causal=lengths is not None,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    of_query, of_key, of_value = (part.view(like.shape) for part, like in zip(gradients, (query, key, value), strict=True))
    return of_query, of_key, of_value


def _fits(query: Tensor, mask: Tensor | None) -> bool:
    return mask is None and query.dtype in (torch.float16, torch.bfloat16)


def _ends(query: Tensor, key: Tensor, lengths: Sequence[int] | None) -> tuple[Tensor, Tensor, int, int]:
    """Where samples end among the queries and among the keys of all rows, and the longest of each."""
    rows = query.shape[0]
    pair = [list(lengths) if lengths is not None else [part.shape[1]] for part in (query, key)]
    queries, keys = (torch.tensor([0, *accumulate(each * rows)], dtype=torch.int32, device=query.device) for each in pair)
    return queries, keys, max(pair[0]), max(pair[1])
