"""What tokens and positions need to know of an image or a video."""

from __future__ import annotations

from dataclasses import dataclass

Grid = tuple[int, int, int]
"""Patches along time, height and width, before merging."""


@dataclass(frozen=True)
class Medium:
    """An image or video as its tokens and positions need it; known without decoding a pixel."""

    grid: Grid
    """Patches along time, height and width, before merging."""
    seconds_per_grid: float | None = None
    """Of a video: seconds between two steps of the time axis."""
    timestamps: tuple[float, ...] = ()
    """Of a video: seconds at the middle of each step of the time axis."""
