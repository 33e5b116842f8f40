"""Whole pictures and videos dealt out to context-parallel ranks, so that each is encoded once.

No picture or video sees another in a vision tower, so a tower that has some of them gives the same rows as one that has all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tangram.config.model import Grid, VisionEncoderConfig
from tangram.models.context import ContextGroups
from tangram.platform.exchange import gather


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
        context: ranks that share them; None: this rank has all.
    """

    section: VisionEncoderConfig
    grids: Sequence[Grid]
    context: ContextGroups | None = None

    @property
    def dealt(self) -> list[list[int]]:
        """By context rank, the numbers of its media."""
        return deal([prod(grid) for grid in self.grids], self.context.whole.size() if self.context is not None else 1)

    @property
    def own(self) -> list[int]:
        """Numbers of this rank's media."""
        return self.dealt[self.context.whole.rank() if self.context is not None else 0]

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
        """Rows of all media in their order, from the rows of each rank's: [n, ...]. The gradient of a row comes from all ranks.

        Without any media, this rank's rows of the blank picture.
        """
        if self.context is None or not self.grids:
            return rows
        tokens, dealt = [self.section.tokens(grid) for grid in self.grids], self.dealt
        sizes = [sum(tokens[number] for number in numbers) for numbers in dealt]
        gathered = gather(rows[: sizes[self.context.whole.rank()]], self.context.whole, sizes)
        parts = gathered.split([tokens[number] for numbers in dealt for number in numbers])
        place = {number: place for place, number in enumerate(number for numbers in dealt for number in numbers)}
        return torch.cat([parts[place[number]] for number in range(len(tokens))])
