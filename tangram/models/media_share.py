"""Whole pictures and videos dealt out to context-parallel ranks and to copies of the vision encoder, so that each is encoded once.

No picture or video sees another in a vision tower, so a tower that has some of them gives the same rows as one that has all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.config.model import Grid, VisionEncoderConfig
from tangram.models.context import ContextGroups
from tangram.platform.exchange import gather, gather_alike


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of the media that each rank gets, in order: the largest first, each to the rank that has least (Graham 1969)."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        rank = loads.index(min(loads))
        dealt[rank].append(number)
        loads[rank] += sizes[number]
    return [sorted(numbers) for numbers in dealt]


@dataclass(frozen=True)
class MediaShare:
    """What of a micro-batch's media this rank encodes.

    Args:
        grids: of all pictures, then all videos.
        context: ranks that share them, and the tokens of the text; None: there is one.
        copies: tensor-parallel ranks that share them, each with a copy of the encoder (or the same part of one); None: there is one copy.
    """

    section: VisionEncoderConfig
    grids: Sequence[Grid]
    context: ContextGroups | None = None
    copies: dist.ProcessGroup | None = None

    @property
    def _copies(self) -> int:
        return self.copies.size() if self.copies is not None else 1

    @property
    def _place(self) -> tuple[int, int]:
        """Context rank, and number of the copy."""
        return self.context.whole.rank() if self.context is not None else 0, self.copies.rank() if self.copies is not None else 0

    @property
    def dealt(self) -> list[list[int]]:
        """By context rank, and within each by copy, the numbers of its media."""
        return deal([prod(grid) for grid in self.grids], (self.context.whole.size() if self.context is not None else 1) * self._copies)

    @property
    def own(self) -> list[int]:
        """Numbers of this rank's media."""
        context_rank, copy = self._place
        return self.dealt[context_rank * self._copies + copy]

    @property
    def own_grids(self) -> list[Grid]:
        """What the tower runs on here: a blank picture where there is nothing else, so that collectives match over ranks and micro-batches."""
        return [self.grids[number] for number in self.own] or [self.section.blank_grid]

    def own_pixels(self, pixels: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Of the patches of all media [n, patch_width] those of this rank's."""
        if not self.own:
            return torch.zeros(prod(self.section.blank_grid), self.section.patch_width, dtype=dtype, device=device)
        parts = torch.cat(list(pixels)).split([prod(grid) for grid in self.grids])
        return torch.cat([parts[number] for number in self.own])

    def collect(self, rows: Tensor) -> Tensor:
        """Rows of all media in their order, from the rows of each rank's: [n, ...].

        The gradient of a row comes from all context ranks; that of the copies' is the same, and counts once.
        Without any media, this rank's rows of the blank picture.
        """
        if (self.context is None and self.copies is None) or not self.grids:
            return rows
        tokens, dealt = [self.section.tokens(grid) for grid in self.grids], self.dealt
        sizes = [sum(tokens[number] for number in numbers) for numbers in dealt]
        context_rank, copy = self._place
        by_context = [sizes[first : first + self._copies] for first in range(0, len(sizes), self._copies)]
        rows = rows[: by_context[context_rank][copy]]
        if self.copies is not None:
            rows = gather_alike(rows, self.copies, by_context[context_rank])
        if self.context is not None:
            rows = gather(rows, self.context.whole, [sum(of_copies) for of_copies in by_context])
        parts = rows.split([tokens[number] for numbers in dealt for number in numbers])
        place = {number: place for place, number in enumerate(number for numbers in dealt for number in numbers)}
        return torch.cat([parts[place[number]] for number in range(len(tokens))])
