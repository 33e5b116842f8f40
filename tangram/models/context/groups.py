"""The ranks that share a sequence, and how its tokens and heads change hands among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.platform.exchange import exchange


@dataclass(frozen=True)
class ContextGroups:
    """Groups of one context-parallel rank; with both, the Ulysses ranks hold consecutive parts of what a ring rank holds.

    Args:
        whole: all context ranks, ring rank after ring rank.
        ulysses: ranks that attend with a share of the heads each to all their tokens (Jacobs et al. 2023); None: this rank alone.
        ring: ranks round which keys and values travel; None: this rank alone.
    """

    whole: dist.ProcessGroup
    ulysses: dist.ProcessGroup | None = None
    ring: dist.ProcessGroup | None = None

    def share_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens for heads: [s, b, heads, d] -> [s * ulysses, b, heads / ulysses, d], and so for key and value [s, b, groups, d].

        Where there are more ranks than ``groups``, each is held by several, whose gradients are summed.
        """
        if self.ulysses is None:
            return query, key, value
        ranks, groups = self.ulysses.size(), key.shape[2]
        if groups < ranks:
            key, value = (part.repeat_interleave(ranks // groups, 2) for part in (key, value))
        parts = [part.unflatten(2, (ranks, -1)) for part in (query, key, value)]
        length = query.shape[0]
        moved = exchange(torch.cat(parts, 3), self.ulysses, 2, [1] * ranks, 0, [length] * ranks).squeeze(2)
        query, key, value = moved.split([part.shape[3] for part in parts], 2)
        return query, key, value

    def share_tokens(self, out: Tensor) -> Tensor:
        """Heads for tokens, the way back: [s * ulysses, b, heads / ulysses, d] -> [s, b, heads, d]."""
        if self.ulysses is None:
            return out
        ranks = self.ulysses.size()
        return exchange(out, self.ulysses, 0, [out.shape[0] // ranks] * ranks, 2, [out.shape[2]] * ranks)
