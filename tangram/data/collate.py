"""Rows to a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tangram.config.model import ModelConfig
from tangram.data.encode import IGNORE, EncodedSample
from tangram.errors import ConfigError, suggest

RopeIndex = Callable[..., Any]


class Collator:
    """Pads rows on the right and lays out positions. A row is one sample, or with packing several that do not see each other.

    Args:
        rope_index: the family's.
        pad_id: token id of padding.
        pad_to_multiple_of: the length is rounded up to a multiple of this.
    """

    def __init__(self, rope_index: RopeIndex, model: ModelConfig, pad_id: int, pad_to_multiple_of: int = 1) -> None:
        self.rope_index = rope_index
        self.model = model
        self.pad_id = pad_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, packed: Sequence[Sequence[EncodedSample]]) -> dict[str, Any]:
        """One micro-batch of ``b`` rows and ``s`` columns.

        Args:
            packed: the samples of each row.

        Returns:
            ``input_ids``, ``attention_mask`` (1 real, 0 padding), ``labels`` (not shifted, -100 where not learnt): int64 ``[b, s]``;
            ``position_ids``: int64 ``[3, b, s]``; ``sample_ids``: list of b numbers, -1 for a row that stands for no sample; with images
            ``image_grid_thw``: int64 ``[images, 3]`` and, where pixels are wanted, ``pixel_values``: fp32 ``[patches, C * T * P * P]``.

        Raises:
            DataError: image tokens do not fit the grids.
        """
        import torch

        rows = [sample for row in packed for sample in row]
        longest = max(len(row.input_ids) for row in rows)
        length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of

        def padded(values: list[list[int]], fill: int) -> torch.Tensor:
            return torch.tensor([row + [fill] * (length - len(row)) for row in values], dtype=torch.long)

        grids = [image.grid for row in rows for image in row.images]
        batch: dict[str, Any] = {
            "input_ids": padded([row.input_ids for row in rows], self.pad_id),
            "attention_mask": padded([[1] * len(row.input_ids) for row in rows], 0),
            "labels": padded([row.labels for row in rows], IGNORE),
            "sample_ids": [row.id for row in rows],
        }
        if grids:
            batch["image_grid_thw"] = torch.tensor(grids, dtype=torch.long)
            if all(row.image_pixels is not None for row in rows):
                import numpy as np

                batch["pixel_values"] = torch.from_numpy(np.concatenate([patches for row in rows for patches in row.image_pixels or ()]))
        batch["position_ids"] = self.rope_index(batch["input_ids"], batch["attention_mask"], batch.get("image_grid_thw"), self.model)
        return batch


COLLATORS: dict[str, type[Collator]] = {"qwen2vl": Collator}
"""Collators by the ``model_name`` of data.json's ``collate_param``."""


def get_collator(name: str) -> type[Collator]:
    """The collator class of that name.

    Raises:
        ConfigError: no such collator.
    """
    if name not in COLLATORS:
        raise ConfigError(f"collate_param.model_name: unknown collator {name!r}{suggest(name, COLLATORS)}; known: {', '.join(sorted(COLLATORS))}")
    return COLLATORS[name]
