"""Batches for a comparison: read from a file, cut into micro-batches, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tangram.config.model import ModelConfig
from tangram.errors import DataError, suggest

BATCH_FILE = "batch.safetensors"
REQUIRED = ("input_ids", "labels", "attention_mask")
OPTIONAL = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "position_ids")
FLOATING = ("pixel_values", "pixel_values_videos", "second_per_grid_ts")
IGNORE = -100

Tensors = dict[str, torch.Tensor]


class MediaKind(NamedTuple):
    """Images or videos, and the tensors that hold them."""

    name: str
    pixels: str
    grids: str

    def token_id(self, model: ModelConfig) -> int | None:
        """Id of the placeholder; None: the model has none."""
        return model.img_context_token_id if self.name == "image" else model.video_token_id


IMAGES = MediaKind("image", "pixel_values", "image_grid_thw")
VIDEOS = MediaKind("video", "pixel_values_videos", "video_grid_thw")
KINDS = (IMAGES, VIDEOS)


def write_batch(batch: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Write ``batch.safetensors``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / BATCH_FILE
    save_file({name: tensor.contiguous() for name, tensor in batch.items()}, path)
    return path


def read_batch(path: Path, model: ModelConfig) -> Tensors:
    """Read a batch and hold it against the model.

    Returns:
        ``input_ids``, ``labels`` (not shifted, -100 where not supervised), ``attention_mask``: int64 ``[B, S]``; ``pixel_values`` fp32
        ``[patches, width]`` and ``image_grid_thw`` int64 ``[images, 3]`` where there are images; ``pixel_values_videos`` and
        ``video_grid_thw`` likewise where there are videos; ``second_per_grid_ts`` fp32 ``[videos]`` and ``position_ids`` int64
        ``[3, B, S]`` where the file holds them.

    Raises:
        DataError: the file or a tensor is missing, unknown or of another shape, or the tensors do not belong together.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        raw = load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path}: not a safetensors file: {error}") from None
    for name in raw:
        if name not in REQUIRED + OPTIONAL:
            raise DataError(f"{path}: unknown tensor {name!r}{suggest(name, REQUIRED + OPTIONAL)}; a batch holds {', '.join(REQUIRED + OPTIONAL)}")
    for name in REQUIRED:
        if name not in raw:
            raise DataError(f"{path}: tensor {name!r} is missing")
    batch = {name: tensor.float() if name in FLOATING else tensor.long() for name, tensor in raw.items()}
    check_batch(batch, model, str(path))
    return batch


def check_batch(batch: Mapping[str, torch.Tensor], model: ModelConfig, where: str) -> None:
    """Refuse a batch that the model cannot run.

    Raises:
        DataError: naming ``where``, the tensor and the numbers.
    """
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2:
        raise DataError(f"{where}: input_ids has shape {shape}; expected [rows, tokens]")
    expected = {"labels": shape, "attention_mask": shape, "position_ids": (3, *shape)}
    for name, wanted in expected.items():
        if name in batch and tuple(batch[name].shape) != wanted:
            raise DataError(f"{where}: {name} has shape {tuple(batch[name].shape)}; input_ids of shape {shape} needs {wanted}")
    vocabulary = model.text_decoder.vocab_size
    labels = batch["labels"]
    for name, values in (("input_ids", batch["input_ids"]), ("labels", labels[labels != IGNORE])):
        if values.numel() and (int(values.min()) < 0 or int(values.max()) >= vocabulary):
            raise DataError(f"{where}: {name} holds ids {int(values.min())} to {int(values.max())}, but the vocabulary is 0 to {vocabulary - 1}")
    if not bool((labels[:, 1:] != IGNORE).any()):
        raise DataError(f"{where}: labels supervise no token, so there is no loss to compare")
    _check_padding(batch["attention_mask"], labels, where)
    for kind in KINDS:
        _check_media(batch, model, kind, where)
    seconds = batch.get("second_per_grid_ts")
    if seconds is not None and tuple(seconds.shape) != (len(batch.get("video_grid_thw", ())),):
        raise DataError(f"{where}: second_per_grid_ts has shape {tuple(seconds.shape)} for {len(batch.get('video_grid_thw', ()))} videos")


def _check_padding(mask: torch.Tensor, labels: torch.Tensor, where: str) -> None:
    begins = mask > torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    if not bool(((mask == 0) | (mask == 1)).all()) or bool((begins.sum(dim=1) > 1).any()):
        raise DataError(f"{where}: attention_mask must be 1 for the tokens of a row, which follow one another, and 0 for padding beside them")
    if bool((labels[mask == 0] != IGNORE).any()):
        raise DataError(f"{where}: labels supervise padding; set them to {IGNORE} where attention_mask is 0")
    unpredicted = (begins & (labels != IGNORE))[:, 1:].nonzero()
    if len(unpredicted):
        row, column = unpredicted[0].tolist()
        raise DataError(f"{where}: labels supervise the first token of row {row} (column {column + 1}), which follows padding; set it to {IGNORE}")


def _check_media(batch: Mapping[str, torch.Tensor], model: ModelConfig, kind: MediaKind, where: str) -> None:
    if (kind.pixels in batch) != (kind.grids in batch):
        raise DataError(f"{where}: {kind.pixels} and {kind.grids} belong together; give both or neither")
    if kind.pixels in batch:
        if model.image_encoder is None:
            raise DataError(f"{where}: the batch has {kind.name}s but the model has no image_encoder")
        vision = model.image_encoder.vision_encoder
        grids, width = batch[kind.grids], vision.patch_width
        if grids.dim() != 2 or grids.shape[1] != 3:
            raise DataError(f"{where}: {kind.grids} has shape {tuple(grids.shape)}; expected [{kind.name}s, 3]")
        wanted = (int(grids.prod(dim=1).sum()), width)
        if tuple(batch[kind.pixels].shape) != wanted:
            raise DataError(f"{where}: {kind.pixels} has shape {tuple(batch[kind.pixels].shape)}; {kind.grids} and the model need {wanted}")
    media_per_row(batch, model, kind, where)


def media_per_row(batch: Mapping[str, torch.Tensor], model: ModelConfig, kind: MediaKind, where: str = "batch") -> list[int]:
    """How many images or videos belong to each row, counted by the placeholders in ``input_ids``.

    Raises:
        DataError: a row's placeholders are not a whole number of images or videos, or some of these are left over.
    """
    vision = model.image_encoder.vision_encoder if model.image_encoder else None
    sizes = [vision.tokens((t, h, w)) for t, h, w in batch[kind.grids].tolist()] if vision and kind.grids in batch else []
    token_id = kind.token_id(model)
    counts, used = [], 0
    for row, ids in enumerate(batch["input_ids"]):
        wanted, first = int((ids == token_id).sum()) if token_id is not None else 0, used
        while used < len(sizes) and sum(sizes[first : used + 1]) <= wanted:
            used += 1
        if sum(sizes[first:used]) != wanted:
            raise DataError(
                f"{where}: row {row} has {wanted} {kind.name} placeholders but its {kind.name}s make {sum(sizes[first : used + 1])} tokens"
            )
        counts.append(used - first)
    if used != len(sizes):
        raise DataError(f"{where}: {len(sizes)} {kind.name}s but the placeholders in input_ids belong to {used}")
    return counts


def micro_batches(batch: Mapping[str, torch.Tensor], model: ModelConfig, size: int) -> list[dict[str, Any]]:
    """Cut a batch into micro-batches of ``size`` rows (the last may have fewer), each as long as its longest row.

    Padding on the left stays.
    """
    counts = {kind: media_per_row(batch, model, kind) for kind in KINDS}
    rows = batch["input_ids"].shape[0]
    return [_take_rows(batch, slice(start, min(start + size, rows)), counts) for start in range(0, rows, size)]


def _take_rows(batch: Mapping[str, torch.Tensor], part: slice, counts: Mapping[MediaKind, Sequence[int]]) -> dict[str, Any]:
    columns = batch["attention_mask"][part].any(dim=0).nonzero()
    length = int(columns.max()) + 1 if len(columns) else 1
    taken: dict[str, Any] = {name: batch[name][part, :length].contiguous() for name in REQUIRED}
    taken["position_ids"] = batch["position_ids"][:, part, :length].contiguous()
    for kind, count in counts.items():
        first, last = sum(count[: part.start]), sum(count[: part.stop])
        if last == first:
            continue
        patches = batch[kind.grids].prod(dim=1).tolist()
        taken[kind.grids] = batch[kind.grids][first:last]
        taken[kind.pixels] = batch[kind.pixels][sum(patches[:first]) : sum(patches[:last])]
        if kind is VIDEOS and "second_per_grid_ts" in batch:
            taken["second_per_grid_ts"] = batch["second_per_grid_ts"][first:last]
    taken["sample_ids"] = list(range(part.start, part.stop))
    return taken


def blank_like(micro_batch: Mapping[str, Any]) -> dict[str, Any]:
    """The same micro-batch without supervision: it fills a schedule up and adds nothing to loss or gradients."""
    return {**micro_batch, "labels": torch.full_like(micro_batch["labels"], IGNORE), "sample_ids": []}
