"""A vision transformer's learned positions: a square table, interpolated to the grid of each picture."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import torch
from torch import Tensor, nn

from tangram.config.model import Grid


class PositionTable(nn.Module):
    """``rows`` = side * side positions of ``width`` numbers, ``weight`` [rows, width].

    A module of its own: with ``overlap_param_gather`` a parameter is up to date only after its module's forward hook.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype, device=device))
        self.side = isqrt(rows)

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        """Positions of all patches [n, width], fp32.

        Bilinear, the table's corners on the picture's; every frame of a video has the same.

        Args:
            grids: (t, h, w) in patches of each image, in the order of the patches; within a frame, patches are ordered by squares of
                ``merge * merge``.

        Source: transformers ``Qwen3VLVisionModel``.
        """
        table = self.weight.float().view(self.side, self.side, -1)
        frames: dict[tuple[int, int], Tensor] = {}
        for _, h, w in grids:
            if (h, w) not in frames:
                # Two matrix products, so that the gradient is one too and adds nothing up in an order of chance.
                rows = torch.einsum("hi,ijc->hjc", interpolation(h, self.side, table.device), table)
                frame = torch.einsum("wj,hjc->hwc", interpolation(w, self.side, table.device), rows)
                frames[h, w] = frame.reshape(h // merge, merge, w // merge, merge, -1).transpose(1, 2).flatten(0, 3)
        return torch.cat([frames[h, w].repeat(t, 1) for t, h, w in grids])


def interpolation(size: int, side: int, device: torch.device) -> Tensor:
    """Linear interpolation of ``side`` points to ``size`` points, first on first and last on last: fp32 [size, side], each row sums to 1."""
    steps = max(size - 1, 1)
    distance = torch.arange(size, device=device)[:, None] * (side - 1) - torch.arange(side, device=device) * steps  # in whole parts of a step
    return (1 - distance.abs() / steps).clamp(min=0)
