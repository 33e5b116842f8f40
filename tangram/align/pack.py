"""The rows of a batch once more, packed into one as ``tangram.data.collate`` packs samples, and which logits belong to which row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tangram.align.batch import IGNORE, KINDS
from tangram.backends.engine import Batch

MULTIPLE = 4
"""Lengths of samples are rounded up to a multiple of it, so that padding lies between samples too."""


def pack_rows(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """A micro-batch of one row that holds all ``B`` rows of ``batch``, one after another, without their own padding.

    Returns:
        What the collator gives with packing; ``sample_ids`` are ``B`` to ``2 B - 1``. And ``first_columns``: where each sample began in its row.
    """
    mask = batch["attention_mask"]
    lengths, first_columns = mask.sum(dim=1).tolist(), mask.argmax(dim=1).tolist()
    padded = [-(-length // MULTIPLE) * MULTIPLE for length in lengths]
    starts, rows = [0, *accumulate(padded)], len(lengths)
    packed: dict[str, Any] = {
        "input_ids": torch.zeros(1, starts[-1], dtype=torch.long),
        "attention_mask": torch.zeros(1, starts[-1], dtype=torch.long),
        "labels": torch.full((1, starts[-1]), IGNORE),
        "position_ids": torch.zeros(3, 1, starts[-1], dtype=torch.long),
    }
    for row, (start, length, column) in enumerate(zip(starts[:-1], lengths, first_columns, strict=True)):
        for name, tensor in packed.items():
            tensor[..., 0, start : start + length] = batch[name][..., row, column : column + length]
        packed["labels"][0, start] = IGNORE
    media = [name for kind in KINDS for name in (kind.pixels, kind.grids)]
    packed |= {name: batch[name] for name in (*media, "second_per_grid_ts") if name in batch}
    packed["cu_seqlens"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packed["cu_seqlens_padded"] = torch.tensor(starts, dtype=torch.int32)
    return packed | {"sample_ids": list(range(rows, 2 * rows)), "first_columns": first_columns}


def by_rows(batch: Batch, logits: Tensor, columns: int) -> Iterator[tuple[int, Tensor]]:
    """Logits ``[b, s, V]`` of a micro-batch as rectangles of those of the batch: number of the first row, and ``[rows, columns, V]`` with zeros
    where the micro-batch has no token. Of a micro-batch that only fills up a schedule there are none."""
    if "cu_seqlens" not in batch:
        if batch["sample_ids"]:
            yield batch["sample_ids"][0], F.pad(logits, (0, 0, 0, columns - logits.shape[1]))
        return
    lengths, starts = batch["cu_seqlens"].diff().tolist(), batch["cu_seqlens_padded"].tolist()
    # zip: a filler has no ids.
    for row, start, length, column in zip(batch["sample_ids"], starts, lengths, batch["first_columns"], strict=False):
        yield row, F.pad(logits[:, start : start + length], (0, 0, column, columns - column - length))
