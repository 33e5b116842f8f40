"""Rows to a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tangram.config.model import ModelConfig
from tangram.data.compact import CompactBatch
from tangram.data.encode import IGNORE, EncodedSample, Pixels
from tangram.data.media import Medium
from tangram.data.patches import PixelBytes
from tangram.errors import ConfigError, DataError, suggest

if TYPE_CHECKING:
    import numpy as np

RopeIndex = Callable[..., Any]
PER_TOKEN = ("input_ids", "attention_mask", "labels", "position_ids")


class Collator:
    """Pads samples on the right, lays out their positions and brings their media together.

    Without packing each sample is a row, as long as the longest. With packing all samples of the micro-batch lie in one row, one after
    another, whatever rows they came in: each has the positions that it would have alone, and ``cu_seqlens`` says where it lies. What no
    token may learn, the first token of a sample from the last of the one before, has no label.

    Args:
        rope_index: the family's.
        pad_id: token id of padding.
        pad_to_multiple_of: lengths are rounded up to a multiple of this: that of the longest sample, or with packing that of every sample.
    """

    def __init__(self, rope_index: RopeIndex, model: ModelConfig, pad_id: int, pad_to_multiple_of: int = 1, packing: bool = False) -> None:
        self.rope_index = rope_index
        self.model = model
        self.pad_id = pad_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self.packing = packing

    def __call__(self, rows: Sequence[Sequence[EncodedSample]]) -> dict[str, Any]:
        """One micro-batch of ``b`` rows and ``s`` columns; with packing b is 1.

        Args:
            rows: the samples of each row, one without packing.

        Returns:
            ``input_ids``, ``attention_mask`` (1 real, 0 padding), ``labels`` (not shifted, -100 where not learnt): int64 ``[b, s]``;
            ``position_ids``: int64 ``[3, b, s]``; ``sample_ids``: the id of every sample, -1 for one that stands for no sample.

            With packing, of k samples: ``cu_seqlens``: int32 ``[k + 1]``, their real lengths added up; ``cu_seqlens_padded``: int32
            ``[k + 1]``, where each begins in the row, and where the row ends.

            With images, in the order of their tokens: ``image_grid_thw``: int64 ``[images, 3]`` and, where pixels are wanted,
            ``pixel_values``: fp32 ``[patches, C * T * P * P]``. With videos: ``video_grid_thw``, ``pixel_values_videos`` likewise, and
            ``second_per_grid_ts``: fp32 ``[videos]``.

        Raises:
            DataError: image or video tokens do not fit the grids; the message names the sample.
        """
        return self.compact(rows).tensors()

    def compact(self, rows: Sequence[Sequence[EncodedSample]]) -> CompactBatch:
        """The same, not made into tensors yet, to be handed to another process.

        Raises:
            DataError: as a call.
        """
        import numpy as np

        samples = [sample for row in rows for sample in row]
        assert self.packing or len(samples) == len(rows), "several samples in a row need packing=True"
        lengths = [len(sample.input_ids) for sample in samples]
        padded = [self._round_up(length if self.packing else max(lengths)) for length in lengths]
        alone = [self._tokens(sample, length) for sample, length in zip(samples, padded, strict=True)]
        axis = -1 if self.packing else -2
        batch: dict[str, Any] = {name: np.concatenate([arrays[name] for arrays in alone], axis=axis) for name in PER_TOKEN}
        batch["sample_ids"] = [sample.id for sample in samples]
        if self.packing:
            batch |= {"cu_seqlens": _added_up(lengths), "cu_seqlens_padded": _added_up(padded)}
        return CompactBatch(batch | _media(samples))

    def _round_up(self, length: int) -> int:
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def _tokens(self, sample: EncodedSample, length: int) -> dict[str, np.ndarray]:
        """What there is per token of one sample, ``[1, length]``; positions ``[3, 1, length]``."""
        import numpy as np
        import torch

        real = len(sample.input_ids)
        labels = [IGNORE, *sample.labels[1:]] if self.packing else sample.labels

        def padded(values: list[int] | int, fill: int) -> np.ndarray:
            row = np.full((1, length), fill, dtype=np.int64)
            row[0, :real] = values
            return row

        arrays = {"input_ids": padded(sample.input_ids, self.pad_id), "attention_mask": padded(1, 0), "labels": padded(labels, IGNORE)}
        ids, mask = (torch.from_numpy(arrays[name]) for name in ("input_ids", "attention_mask"))
        images, videos, seconds = (
            None if array is None else torch.from_numpy(array) for array in (_grids(sample.images), _grids(sample.videos), _seconds(sample.videos))
        )
        try:
            positions = self.rope_index(ids, mask, images, self.model, videos, seconds)
        except DataError as error:
            raise DataError(f"sample {sample.id}: {error}") from None
        return {**arrays, "position_ids": positions.numpy()}


def _added_up(lengths: Sequence[int]) -> np.ndarray:
    import numpy as np

    return np.cumsum([0, *lengths], dtype=np.int32)


def _media(samples: Sequence[EncodedSample]) -> dict[str, np.ndarray | PixelBytes]:
    """Grids and patches of all images and of all videos."""
    images = [medium for sample in samples for medium in sample.images]
    videos = [medium for sample in samples for medium in sample.videos]
    found = {
        "image_grid_thw": _grids(images),
        "pixel_values": _patches([sample.image_pixels for sample in samples if sample.images]),
        "video_grid_thw": _grids(videos),
        "pixel_values_videos": _patches([sample.video_pixels for sample in samples if sample.videos]),
        "second_per_grid_ts": _seconds(videos),
    }
    return {name: entry for name, entry in found.items() if entry is not None}


def _grids(media: Sequence[Medium]) -> np.ndarray | None:
    import numpy as np

    return np.array([medium.grid for medium in media], dtype=np.int64) if media else None


def _seconds(videos: Sequence[Medium]) -> np.ndarray | None:
    import numpy as np

    seconds = [video.seconds_per_grid for video in videos]
    assert None not in seconds, "a video without seconds_per_grid"
    return np.array(seconds, dtype=np.float32) if videos else None


def _patches(pixels: Sequence[Sequence[Pixels] | None]) -> Pixels | None:
    """The patches of all media; None where there are none or none are wanted."""
    import numpy as np

    wanted = [of_sample for of_sample in pixels if of_sample is not None]
    assert len(wanted) in (0, len(pixels)), f"pixels of {len(wanted)} samples out of {len(pixels)} that hold media"
    if not wanted:
        return None
    patches = [of_medium for of_sample in wanted for of_medium in of_sample]
    as_bytes = [of_medium for of_medium in patches if isinstance(of_medium, PixelBytes)]
    return PixelBytes.join(as_bytes) if len(as_bytes) == len(patches) else np.concatenate(patches)


COLLATORS: dict[str, type[Collator]] = {"qwen2vl": Collator, "qwen3vl": Collator}
"""Collators by the ``model_name`` of data.json's ``collate_param``; one class under both names of public files."""


def get_collator(name: str) -> type[Collator]:
    """The collator class of that name.

    Raises:
        ConfigError: no such collator.
    """
    if name not in COLLATORS:
        raise ConfigError(f"collate_param.model_name: unknown collator {name!r}{suggest(name, COLLATORS)}; known: {', '.join(sorted(COLLATORS))}")
    return COLLATORS[name]
