"""The ranks that share a sequence, and how its tokens and heads change hands among them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

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

    def sizes(self) -> dict[str, int]:
        """Sizes and rank as ``SequenceSplit`` takes them."""
        return {"context": self.whole.size(), "context_rank": self.whole.rank(), "ring": self.ring.size() if self.ring is not None else 1}

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


def make_groups(whole: dist.ProcessGroup, ring: int, timeout: timedelta) -> ContextGroups:
    """Groups within each group of context-parallel ranks. Every process must call it.

    Args:
        ring: ring size; it divides that of ``whole``, of which runs of size / ring ranks are Ulysses ranks.
    """
    size, mine = whole.size(), dist.get_process_group_ranks(whole)
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    ulysses = size // ring
    inner = outer = None
    for ranks in sorted({tuple(ranks) for ranks in everyone}):
        runs = [list(ranks[first : first + ulysses]) for first in range(0, size, ulysses)]
        inner = own_group([run for run in runs if ring > 1 and ulysses > 1], timeout) or inner
        outer = own_group([list(column) for column in zip(*runs, strict=True) if ring > 1 and ulysses > 1], timeout) or outer
    if ring == 1:
        inner = whole
    elif ulysses == 1:
        outer = whole
    return ContextGroups(whole, inner, outer)


def own_group(groups: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Make groups of these ranks; the one that this process is in. Every process must call it."""
    made = [dist.new_group(ranks, timeout=timeout) for ranks in groups]
    return next((group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks), None)


_installed: ContextGroups | None = None


def install(groups: ContextGroups | None) -> None:
    """Make these the groups of this process, as megatron-core's parallel state holds its own; None: context-parallel size 1."""
    global _installed
    _installed = groups


def installed(size: int) -> ContextGroups | None:
    """The groups of this process, which must have ``size`` ranks."""
    found = _installed.whole.size() if _installed is not None else 1
    assert found == size, f"context-parallel groups of {found} ranks, {size} wanted"
    return _installed
