"""Attention over segments by TransformerEngine, on CUDA; it chooses between flash-attn, cuDNN and its own.

Not run on such a device: none was at hand. Tested with a stand-in for its module that computes plainly and records what it is given.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch import DotProductAttention

from tangram.platform.operators.segments import Segments, as_rows, as_tokens, rows_as_segments


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """As ``varlen.segment_attention``."""
    segments = rows_as_segments(query, segments)
    _, _, heads, width = query.shape
    module = _module(heads, key.shape[2], width, dropout, causal, scale, torch.are_deterministic_algorithms_enabled())
    out = module(
        *as_tokens(query, key, value),
        qkv_format="thd",
        cu_seqlens_q=segments.cu_seqlens,
        cu_seqlens_kv=segments.cu_seqlens,
        max_seqlen_q=segments.longest,
        max_seqlen_kv=segments.longest,
        attn_mask_type=_mask_type(causal),
    )
    # It joins the heads.
    return as_rows(out.unflatten(1, (heads, width)), query.shape)


@cache
def _module(heads: int, groups: int, width: int, dropout: float, causal: bool, scale: float | None, deterministic: bool) -> Any:
    """One for all layers alike: it has no weights. It reads whether algorithms must be deterministic when it is made, hence the last argument.

    Heads are already those of this tensor-parallel rank, and the caller has chosen the generator that dropout draws from.
    """
    return DotProductAttention(
        num_attention_heads=heads,
        kv_channels=width,
        num_gqa_groups=groups,
        attention_dropout=dropout,
        qkv_format="thd",
        attn_mask_type=_mask_type(causal),
        softmax_scale=scale,
    )


def _mask_type(causal: bool) -> str:
    """Of packed tokens it takes these two alone, whether there is padding or not."""
    return "padding_causal" if causal else "padding"
