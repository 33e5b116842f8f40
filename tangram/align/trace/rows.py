"""Which token, or which patch of which picture, a row of an activation is: the same on every split.

A token's key is (sample, its number among the sample's real tokens, -1). A picture's or video's key is that of its first token, and the key of
its patch (or place, where there is a class token, or merged cell) is (sample, first token, number of the patch). So rows of different splits,
lengths of padding and packings compare.

A vision encoder may hold pictures of other ranks' samples. Its rows are written as (data-parallel rank, micro-batch, number among that
micro-batch's images and then videos, patch) and become keys when the trace is read, where all ranks' tables of media are at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from tangram.config.model import Grid, ModelConfig, VisionEncoderConfig
from tangram.models.windows import window_order

NOTHING = -1
"""First number of the key of a row that stands for nothing: padding, or a picture that only fills up."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """Keys of the rows of tensors ``[..., features]``, flattened.

    Args:
        keys: int64, ``[n, 3]``, or ``[n, 4]`` of a vision encoder.
        partial: these may be fewer than the other side has, which is no fault: the head runs on learnt positions alone.
        led_to: bool [n], rows whose gradient this rank finds, of rows that several ranks have and each needs some of; None: all.
    """

    keys: Tensor
    partial: bool = False
    led_to: Tensor | None = None

    @cached_property
    def real(self) -> Tensor:
        """Bool [n]."""
        return self.keys[:, 0] != NOTHING

    @cached_property
    def backward(self) -> RowTable:
        """Of the gradients."""
        if self.led_to is None:
            return self
        return RowTable(torch.where(self.led_to[:, None], self.keys, NOTHING), self.partial)

    @property
    def leads(self) -> bool:
        """Whether this rank finds the gradient of any row."""
        return self.led_to is None or bool(self.led_to.any())

    def __len__(self) -> int:
        return len(self.keys)


def token_keys(batch: Mapping[str, Any], first_sample: int = 0) -> Tensor:
    """Keys ``[b, s, 3]`` of the tokens of a micro-batch as ``tangram.data.collate`` makes it.

    Args:
        first_sample: number of the first row, of a batch that has no ``sample_ids``.
    """
    rows, columns = batch["input_ids"].shape
    keys = torch.full((rows, columns, 3), NOTHING, dtype=torch.int64)
    if "cu_seqlens" in batch:
        lengths, starts = batch["cu_seqlens"].diff().tolist(), batch["cu_seqlens_padded"].tolist()
        ids = list(batch.get("sample_ids", range(first_sample, first_sample + len(lengths))))
        # zip: a micro-batch that only fills up has no ids.
        for sample, start, length in zip(ids, starts, lengths, strict=False):
            keys[0, start : start + length, 0], keys[0, start : start + length, 1] = sample, torch.arange(length)
        return keys
    mask = batch.get("attention_mask")
    real = torch.ones(rows, columns, dtype=torch.bool) if mask is None else mask.cpu().bool()
    real = real if real.dim() == 2 else real.any(dim=-1)
    given = torch.tensor(list(batch.get("sample_ids", range(first_sample, first_sample + rows))), dtype=torch.int64)
    samples = torch.nn.functional.pad(given, (0, rows - len(given)), value=NOTHING)
    keys[..., 0] = torch.where(real, samples[:, None], NOTHING)
    keys[..., 1] = real.cumsum(dim=1) - 1
    return keys


def grids_of(batch: Mapping[str, Any]) -> tuple[list[Grid], list[Grid]]:
    """Of the images and of the videos of a micro-batch."""
    images, videos = ([(t, h, w) for t, h, w in batch[name].tolist()] if name in batch else [] for name in ("image_grid_thw", "video_grid_thw"))
    return images, videos


def media_keys(batch: Mapping[str, Any], keys: Tensor, model: ModelConfig) -> list[list[int]]:
    """(sample, first token) of every image, then of every video."""
    found: list[list[int]] = []
    if model.image_encoder is None:
        return found
    section = model.image_encoder.vision_encoder
    for token, grids in zip((model.img_context_token_id, model.video_token_id), grids_of(batch), strict=True):
        if grids:
            places = keys.flatten(0, 1)[(batch["input_ids"].cpu() == token).flatten()]
            starts = torch.tensor([0, *map(section.tokens, grids)]).cumsum(0)[:-1]
            found += places[starts, :2].tolist()
    return found


@dataclass(frozen=True)
class Medium:
    """A picture or video that a vision encoder runs on.

    Args:
        owner: data-parallel rank, micro-batch, number among its images and videos; None: it only fills up.
    """

    owner: tuple[int, int, int] | None
    grid: Grid


Parts = Callable[[int, int], list[Tensor]]
"""Of a sequence of so many rows, of which so many stay together: positions of this rank's rows, then those of other parts of the sequence that
modules see. A position past the end is padding."""


def whole(rows: int, unit: int) -> list[Tensor]:
    """``Parts`` of a rank that has all."""
    return [torch.arange(rows)]


class VisionRows:
    """Tables of one pass of a vision encoder, by what its rows are.

    Args:
        media: in the order of the pass.
        parts: how ranks divide the sequence between layers.
        led_by_parts: where it is whole, before them, the gradient of a row is found on the rank that has it between them, and not on all.
    """

    def __init__(self, media: Sequence[Medium], section: VisionEncoderConfig, parts: Parts = whole, led_by_parts: bool = False) -> None:
        self.media, self.section, self.parts, self.led_by_parts = media, section, parts, led_by_parts
        self.square = section.spatial_merge_size**2 if section.picture_grid is None else 1
        self._order: Tensor | None = None
        if section.window_attn_size is not None:
            window = section.window_attn_size // section.patch_size // section.spatial_merge_size
            self._order, _ = window_order([medium.grid for medium in media], section.spatial_merge_size, window)

    def _keys(self, sizes: Iterable[int]) -> Tensor:
        found = [torch.empty(0, 4, dtype=torch.int64)]
        for medium, size in zip(self.media, sizes, strict=True):
            part = torch.full((size, 4), NOTHING, dtype=torch.int64)
            if medium.owner is not None:
                part[:, :3], part[:, 3] = torch.tensor(medium.owner), torch.arange(size)
            found.append(part)
        return torch.cat(found)

    @cached_property
    def raster(self) -> list[RowTable]:
        """Patches as the pixels come, before windows. Each rank has all, and those between layers lead to its own."""
        keys = self._keys(prod(medium.grid) for medium in self.media)
        own, *others = self.parts(len(keys), self.square)
        if not others or not self.led_by_parts:
            return [RowTable(keys)]
        order = torch.arange(len(keys))
        if self._order is not None:
            order = order.unflatten(0, (-1, self.square))[self._order].flatten()
        return [RowTable(keys, led_to=torch.isin(torch.arange(len(keys)), order[own]))]

    @cached_property
    def places(self) -> list[RowTable]:
        """Hidden states between layers: a row for each patch, and those that belong to none."""
        keys = self._keys(self.section.places(medium.grid) for medium in self.media)
        if self._order is not None:
            keys = keys.unflatten(0, (-1, self.square))[self._order].flatten(0, 1)
        return self._parted(keys, self.square)

    @cached_property
    def cells(self) -> list[RowTable]:
        """Merged patches, which become tokens."""
        keys = self._keys(self.section.tokens(medium.grid) for medium in self.media)
        keys = keys if self._order is None else keys[self._order]
        return self._parted(keys, 1)

    def _parted(self, keys: Tensor, unit: int) -> list[RowTable]:
        own, *others = take_parts(keys, self.parts(len(keys), unit))
        if self.led_by_parts:
            # Gathered rows, of which the gradient is a sum over ranks that none of them has.
            others = [RowTable(other.keys, led_to=torch.zeros(len(other), dtype=torch.bool)) for other in others]
        return [own, *others]


def take_parts(keys: Tensor, parts: Iterable[Tensor]) -> list[RowTable]:
    """Rows of ``keys`` ``[n, ...]`` by positions, of which those from n on are padding."""
    tables = []
    for part in parts:
        padded = torch.nn.functional.pad(keys, (0, 0) * (keys.dim() - 1) + (0, max(0, int(part.max()) + 1 - len(keys))), value=NOTHING)
        tables.append(RowTable(padded[part].reshape(-1, keys.shape[-1])))
    return tables


def by_rows(tensor: Tensor) -> Tensor:
    """``[rows, features]`` of ``[..., features]``, or of ``[..., heads, width]`` with four axes."""
    axes = tensor.dim() - (2 if tensor.dim() == 4 else 1)
    return tensor.reshape(tensor.shape[:axes].numel(), tensor.shape[axes:].numel())


def find(tables: Iterable[RowTable], rows: int) -> RowTable | None:
    """The first table of so many rows."""
    return next((table for table in tables if len(table) == rows), None)
