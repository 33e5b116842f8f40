"""Pictures and videos of all data-parallel ranks' micro-batches dealt out over those ranks, so that the vision tower has equal work on each.

A data-parallel rank whose samples hold large pictures would let all others wait in every step. No picture or video sees another in a vision
tower, so it may be encoded on any rank: pixels go there, tokens come back, and their gradients go there again. A rank's tower then finds
gradients of other ranks' losses, which is right because gradients are sums over all ranks. The text decoder's work stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.config.model import Grid, VisionEncoderConfig
from tangram.models.media_share import deal
from tangram.platform.exchange import exchange, gather_alike


@dataclass(frozen=True)
class BalancedMedia:
    """What of all ranks' media this rank encodes. Collective to make and to use, forward and backward.

    Args:
        grids: of this rank's pictures, then videos.
        group: data-parallel ranks; of those that share the tokens of a micro-batch, which all have its media, neighbours: rank
            ``data * context + context_rank``.
        context: context-parallel size.
        copies: tensor-parallel ranks with a copy of the encoder each (or the same part of one), which all have this rank's media; each is in a
            ``group`` of its own. None: there is one copy.
    """

    section: VisionEncoderConfig
    grids: Sequence[Grid]
    group: dist.ProcessGroup
    context: int
    device: torch.device
    copies: dist.ProcessGroup | None = None

    @cached_property
    def everyone(self) -> list[list[Grid]]:
        """Grids of the media of each data-parallel rank."""
        own = torch.tensor(list(self.grids), dtype=torch.int64, device=self.device).reshape(-1, 3)
        counts = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.group.size())]
        dist.all_gather(counts, torch.tensor([len(own)], device=self.device), group=self.group)
        numbers = [int(count) for count in counts]
        filled = torch.nn.functional.pad(own, (0, 0, 0, max(numbers) - len(own)))
        found = [torch.empty_like(filled) for _ in numbers]
        dist.all_gather(found, filled, group=self.group)
        lists = [[(t, h, w) for t, h, w in grids[:number].tolist()] for grids, number in zip(found, numbers, strict=True)]
        return lists[:: self.context]

    @cached_property
    def shares(self) -> list[list[list[tuple[int, int]]]]:
        """By copy, and within each by rank of its group, media in order: data-parallel rank that they belong to, and number there."""
        count = self.copies.size() if self.copies is not None else 1
        media = [(data, number) for data, grids in enumerate(self.everyone) for number in range(len(grids))]
        shares = deal([prod(self.everyone[data][number]) for data, number in media], self.group.size() * count)
        return [[[media[place] for place in share] for share in shares[copy::count]] for copy in range(count)]

    @property
    def dealt(self) -> list[list[tuple[int, int]]]:
        """Of this rank's copy, ``shares``."""
        return self.shares[self.copies.rank() if self.copies is not None else 0]

    @property
    def _data(self) -> int:
        return self.group.rank() // self.context

    @property
    def own_grids(self) -> list[Grid]:
        """What the tower runs on here: a blank picture where there is nothing else, so that collectives match over ranks and micro-batches."""
        return [self.everyone[data][number] for data, number in self.dealt[self.group.rank()]] or [self.section.blank_grid]

    def _of(self, share: Sequence[tuple[int, int]], data: int) -> list[int]:
        return [number for owner, number in share if owner == data]

    def own_pixels(self, pixels: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Of the patches of this rank's media [n, patch_width] and those of the others, the ones that it encodes.

        Of the context ranks that have a medium, the one with the receiver's context rank sends it.
        """
        width, context_rank = self.section.patch_width, self.group.rank() % self.context
        held = torch.cat(list(pixels)) if pixels else torch.zeros(0, width, dtype=dtype, device=device)
        parts = held.split([prod(grid) for grid in self.grids])
        sent = [
            [number for number in self._of(share, self._data) if receiver % self.context == context_rank] for receiver, share in enumerate(self.dealt)
        ]
        mine = self.dealt[self.group.rank()]
        coming = [
            sum(prod(self.everyone[sender // self.context][number]) for number in self._of(mine, sender // self.context))
            if sender % self.context == context_rank
            else 0
            for sender in range(self.group.size())
        ]
        going = [sum(len(parts[number]) for number in numbers) for numbers in sent]
        packed = torch.cat([held[:0], *(parts[number] for numbers in sent for number in numbers)])
        received = exchange(packed, self.group, 0, going, 0, coming)
        return received if mine else torch.zeros(prod(self.section.blank_grid), width, dtype=dtype, device=device)

    def collect(self, rows: Tensor) -> Tensor:
        """Rows of this rank's own media in their order, from the rows that the tower gave: [n, ...].

        Without any media of its own, the rows of a blank picture, as zeros: they go nowhere.
        """
        tokens = [[self.section.tokens(grid) for grid in grids] for grids in self.everyone]
        mine = self.dealt[self.group.rank()]
        parts = [sum(tokens[data][number] for number in self._of(mine, data)) for data in range(len(tokens))]
        # Every context rank of a micro-batch needs its media; the gradients of these copies are summed.
        copies = [part for part in rows[: sum(parts)].split(parts) for _ in range(self.context)]
        going = [part for part in parts for _ in range(self.context)]
        coming = [sum(tokens[self._data][number] for number in self._of(share, self._data)) for share in self.dealt]
        received = exchange(torch.cat(copies), self.group, 0, going, 0, coming)
        orders = [[number for share in shares for number in self._of(share, self._data)] for shares in self.shares]
        if self.copies is not None:
            received = gather_alike(received, self.copies, [sum(tokens[self._data][number] for number in order) for order in orders])
        order = [number for order in orders for number in order]
        found = received.split([tokens[self._data][number] for number in order])
        place = {number: place for place, number in enumerate(order)}
        blank = [] if order else [rows.new_zeros(self.section.tokens(self.section.blank_grid), *rows.shape[1:])]
        return torch.cat([received[:0], *(found[place[number]] for number in range(len(order))), *blank])
