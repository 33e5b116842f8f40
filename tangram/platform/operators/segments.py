"""Runs of tokens that must not see each other, in the forms that attention functions take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class SegmentGroup:
    """Segments of equal length. ``index`` [segments, length] holds the positions of their tokens."""

    index: Tensor
    length: int


@dataclass(frozen=True)
class Segments:
    """Consecutive runs of tokens. Each form is made when it is first asked for and serves all layers.

    Args:
        lengths: of the runs, in the order of the tokens, all of which they cover.
        device: of the tensors that are made.
    """

    lengths: tuple[int, ...]
    device: torch.device

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Int32 [segments + 1]: where each begins, and where the last one ends."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def groups(self) -> tuple[SegmentGroup, ...]:
        """By rising length."""
        sizes = torch.tensor(self.lengths, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        return tuple(
            SegmentGroup((starts[sizes == length][:, None] + torch.arange(length)).to(self.device), length) for length in sorted(set(self.lengths))
        )

    @cached_property
    def inverse(self) -> Tensor | None:
        """[tokens], where each token stands in the concatenation of the groups; None: in order already."""
        if len(self.groups) == 1:
            return None
        return torch.argsort(torch.cat([group.index.flatten() for group in self.groups]))

    def tensors(self) -> list[Tensor]:
        """All that were made so far."""
        made = [self.__dict__.get("cu_seqlens"), self.__dict__.get("inverse"), *(group.index for group in self.__dict__.get("groups", ()))]
        return [tensor for tensor in made if tensor is not None]


@lru_cache(maxsize=8)
def _whole_rows(rows: int, length: int, device: torch.device) -> Segments:
    return Segments((length,) * rows, device)


def rows_as_segments(query: Tensor, segments: Segments | None) -> Segments:
    """``segments``, or where there are none each row of ``query`` [s, b, heads, d] as one."""
    if segments is not None:
        assert query.shape[1] == 1, f"segments need one row, got {query.shape[1]}"
        return segments
    return _whole_rows(query.shape[1], query.shape[0], query.device)


def as_tokens(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[s, b, heads, d] -> [b * s, heads, d], row after row."""
    query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
    return query, key, value


def as_rows(tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """The way back: [b * s, heads, d] -> [s, b, heads, d], where ``shape`` begins with s and b."""
    length, rows, *_ = shape
    return tokens.unflatten(0, (rows, length)).transpose(0, 1)
