"""Attention over segments by PyTorch's own varlen function, on CUDA and in types of 16 bits.

Not run on such a device: none was at hand. Tested with a stand-in for the function that computes plainly and records what it is given.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tangram.platform.operators import plain
from tangram.platform.operators.segments import Segments, as_rows, as_tokens


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """As ``varlen.segment_attention``. Whole rows are left to ``scaled_dot_product_attention``, which needs no copies of them."""
    if segments is None:
        return plain.segment_attention(query, key, value, None, dropout, causal, scale)
    assert not dropout, "varlen_attn has no dropout"
    ends, longest = segments.cu_seqlens, segments.longest
    window = (-1, 0) if causal else (-1, -1)
    grouped = query.shape[2] != key.shape[2]
    out = varlen_attn(*as_tokens(query, key, value), ends, ends, longest, longest, scale=scale, window_size=window, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return as_rows(out, query.shape)
