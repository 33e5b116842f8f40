"""Attention to a block of the keys in plain torch, for ring attention: it also gives the log-sum-exp by which blocks are merged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_block(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int] | None, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention over these keys alone.

    Args:
        query: [b, s, heads, d].
        key, value: [b, t, groups, d].
        lengths: of consecutive samples that queries and keys both consist of, each causal; None: every query sees every key.
        mask: bool [b or 1, 1, s, t], True where a query sees a key, in place of that.
        scale: of the scores.

    Returns:
        Output [b, s, heads, d], and the logarithm of the sum of the scores' exponentials [b, heads, s], both at least fp32: 0 and -inf where a
        query sees nothing.
    """
    groups, sums = key.shape[2], torch.promote_types(query.dtype, torch.float32)
    scores = _scores(query, key, lengths, mask, scale)
    total = scores.logsumexp(-1, keepdim=True)
    weights = (scores - total.masked_fill(total == -torch.inf, 0)).exp_()
    out = weights.flatten(2, 3) @ value.transpose(1, 2).to(sums)
    return _join(out, groups, query.shape), total.squeeze(-1).flatten(1, 2)


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
    """What this block adds to the gradients of query, key and value, in their shapes and at least fp32.

    Args:
        gradient: of the output over all blocks.
        out: that output; ``total``: its log-sum-exp [b, heads, s].

    Source: Dao 2023 (FlashAttention-2), section 2.3.2; the rest as ``attention_block``.
    """
    groups, sums = key.shape[2], torch.promote_types(query.dtype, torch.float32)
    weights = (_scores(query, key, lengths, mask, scale) - total.unflatten(1, (groups, -1))[..., None]).exp_()
    along = (gradient.to(sums) * out).sum(-1).transpose(1, 2).unflatten(1, (groups, -1))[..., None]
    grad, queries = _rows(gradient.to(sums), groups), _rows(query.to(sums), groups)
    keys, values = key.transpose(1, 2).to(sums), value.transpose(1, 2).to(sums)
    of_scores = ((grad @ values.transpose(-1, -2)).view_as(weights) - along).mul_(weights).mul_(scale).flatten(2, 3)
    of_value = weights.flatten(2, 3).transpose(-1, -2) @ grad
    of_key = of_scores.transpose(-1, -2) @ queries
    return _join(of_scores @ keys, groups, query.shape), of_key.transpose(1, 2), of_value.transpose(1, 2)


def _rows(x: Tensor, groups: int) -> Tensor:
    """[b, s, heads, d] -> [b, groups, heads / groups * s, d]: heads of one group stand below each other, so that its keys are used as they are."""
    return x.transpose(1, 2).unflatten(1, (groups, -1)).flatten(2, 3)


def _join(rows: Tensor, groups: int, shape: torch.Size) -> Tensor:
    """The reverse of ``_rows``."""
    return rows.unflatten(2, (shape[2] // groups, shape[1])).flatten(1, 2).transpose(1, 2)


def _scores(query: Tensor, key: Tensor, lengths: Sequence[int] | None, mask: Tensor | None, scale: float) -> Tensor:
    """[b, groups, heads / groups, s, t], -inf where a query does not see a key."""
    groups, sums = key.shape[2], torch.promote_types(query.dtype, torch.float32)
    scores = (_rows(query.to(sums) * scale, groups) @ key.transpose(1, 2).to(sums).transpose(-1, -2)).unflatten(2, (-1, query.shape[1]))
    if mask is None and lengths is None:
        return scores
    if mask is None:
        assert lengths is not None
        mask = _causal(lengths, query.device)
    else:
        mask = mask[:, None]
    return scores.masked_fill_(~mask, -torch.inf)


def _causal(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[s, s], True within a sample and not after the query."""
    counts = torch.tensor(lengths, device=device)
    sample = torch.arange(len(lengths), device=device).repeat_interleave(counts)
    return (sample[:, None] == sample).tril_()
