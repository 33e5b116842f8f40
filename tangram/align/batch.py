"""Batches for a comparison: read from a file, cut into micro-batches, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tangram.config.model import ModelConfig
from tangram.errors import DataError, suggest

BATCH_FILE = "batch.safetensors"
REQUIRED = ("input_ids", "labels", "attention_mask")
OPTIONAL = ("pixel_values", "image_grid_thw", "position_ids")
IGNORE = -100

Tensors = dict[str, torch.Tensor]


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
        ``[patches, width]`` and ``image_grid_thw`` int64 ``[images, 3]`` where there are images; ``position_ids`` int64 ``[3, B, S]``
        where the file holds them.

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
    batch = {name: tensor.float() if name == "pixel_values" else tensor.long() for name, tensor in raw.items()}
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
    mask = batch["attention_mask"]
    if not bool(((mask == 0) | (mask == 1)).all()) or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise DataError(f"{where}: attention_mask must be 1 for tokens and then 0 for padding on the right")
    if bool((labels[mask == 0] != IGNORE).any()):
        raise DataError(f"{where}: labels supervise padding; set them to {IGNORE} where attention_mask is 0")
    _check_images(batch, model, where)


def _check_images(batch: Mapping[str, torch.Tensor], model: ModelConfig, where: str) -> None:
    if ("pixel_values" in batch) != ("image_grid_thw" in batch):
        raise DataError(f"{where}: pixel_values and image_grid_thw belong together; give both or neither")
    if model.video_token_id is not None and bool((batch["input_ids"] == model.video_token_id).any()):
        raise DataError(f"{where}: input_ids holds video placeholders (id {model.video_token_id}), which a comparison does not run yet; use images")
    if "pixel_values" in batch:
        if model.image_encoder is None:
            raise DataError(f"{where}: the batch has images but the model has no image_encoder")
        vision = model.image_encoder.vision_encoder
        grids, width = batch["image_grid_thw"], vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        if grids.dim() != 2 or grids.shape[1] != 3:
            raise DataError(f"{where}: image_grid_thw has shape {tuple(grids.shape)}; expected [images, 3]")
        wanted = (int(grids.prod(dim=1).sum()), width)
        if tuple(batch["pixel_values"].shape) != wanted:
            raise DataError(f"{where}: pixel_values has shape {tuple(batch['pixel_values'].shape)}; image_grid_thw and the model need {wanted}")
    images_per_row(batch, model, where)


def images_per_row(batch: Mapping[str, torch.Tensor], model: ModelConfig, where: str = "batch") -> list[int]:
    """How many images belong to each row, counted by the placeholders in ``input_ids``.

    Raises:
        DataError: a row's placeholders are not a whole number of images, or images are left over.
    """
    merge = model.image_encoder.vision_encoder.spatial_merge_size**2 if model.image_encoder else 1
    sizes = (batch["image_grid_thw"].prod(dim=1) // merge).tolist() if "image_grid_thw" in batch else []
    counts, used = [], 0
    for row, ids in enumerate(batch["input_ids"]):
        wanted, first = int((ids == model.img_context_token_id).sum()), used
        while used < len(sizes) and sum(sizes[first : used + 1]) <= wanted:
            used += 1
        if sum(sizes[first:used]) != wanted:
            raise DataError(f"{where}: row {row} has {wanted} image placeholders but its images make {sum(sizes[first : used + 1])} tokens")
        counts.append(used - first)
    if used != len(sizes):
        raise DataError(f"{where}: {len(sizes)} images but the placeholders in input_ids belong to {used}")
    return counts


def micro_batches(batch: Mapping[str, torch.Tensor], model: ModelConfig, size: int) -> list[dict[str, Any]]:
    """Cut a batch into micro-batches of ``size`` rows (the last may have fewer), each as long as its longest row."""
    images = images_per_row(batch, model)
    grids = batch.get("image_grid_thw")
    patches = grids.prod(dim=1).tolist() if grids is not None else []
    rows = batch["input_ids"].shape[0]
    return [_take_rows(batch, range(start, min(start + size, rows)), images, patches) for start in range(0, rows, size)]


def _take_rows(batch: Mapping[str, torch.Tensor], rows: range, images: Sequence[int], patches: Sequence[int]) -> dict[str, Any]:
    part = slice(rows.start, rows.stop)
    length = max(1, int(batch["attention_mask"][part].sum(dim=1).max()))
    taken: dict[str, Any] = {name: batch[name][part, :length].contiguous() for name in REQUIRED}
    taken["position_ids"] = batch["position_ids"][:, part, :length].contiguous()
    first, last = sum(images[: rows.start]), sum(images[: rows.stop])
    if last > first:
        taken["image_grid_thw"] = batch["image_grid_thw"][first:last]
        taken["pixel_values"] = batch["pixel_values"][sum(patches[:first]) : sum(patches[:last])]
    taken["sample_ids"] = list(rows)
    return taken


def blank_like(micro_batch: Mapping[str, Any]) -> dict[str, Any]:
    """The same micro-batch without supervision: it fills a schedule up and adds nothing to loss or gradients."""
    return {**micro_batch, "labels": torch.full_like(micro_batch["labels"], IGNORE), "sample_ids": []}
