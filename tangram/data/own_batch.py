"""Micro-batches of a plug-in's samples, and what no model can take, told with its name before it reaches one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tangram.data.encode import IGNORE
from tangram.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

FILL = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE}
"""What the places past a sample's end hold, by name; of another name, 0."""
Sample = Mapping[str, Any]


def collate(samples: Sequence[Sample], pad_to_multiple_of: int = 1) -> dict[str, Any]:
    """One micro-batch: what is as long as a sample's labels is padded on the right (``FILL``) and stacked, ``[rows, tokens]``; all else is joined
    along its first dimension, such as the pictures of all samples. ``attention_mask`` is made where there is none and samples differ in length.

    Raises:
        DataError: a value that makes no tensor, a name that some samples have as one value per token and some not, or tokens that some lack.
    """
    import torch

    tensors = [{name: _tensor(name, value) for name, value in sample.items() if value is not None} for sample in samples]
    lengths = [_length(sample.get("labels")) for sample in tensors]
    longest = -(-max(lengths) // pad_to_multiple_of) * pad_to_multiple_of
    if any(length != longest for length in lengths) and not any("attention_mask" in sample for sample in tensors):
        tensors = [{**sample, "attention_mask": torch.ones(length, dtype=torch.long)} for sample, length in zip(tensors, lengths, strict=True)]
    batch: dict[str, Any] = {}
    for name in dict.fromkeys(name for sample in tensors for name in sample):
        held = [(sample[name], length) for sample, length in zip(tensors, lengths, strict=True) if name in sample]
        per_token = {value.dim() == 1 and len(value) == length for value, length in held}
        if per_token == {True} and len(held) == len(samples):
            batch[name] = torch.stack([torch.nn.functional.pad(value, (0, longest - length), value=FILL.get(name, 0)) for value, length in held])
        elif per_token == {False}:
            batch[name] = torch.cat([value for value, _ in held])
        else:
            shapes = ", ".join(shown(sample.get(name)) for sample in tensors)
            raise DataError(f"{name} has the shapes {shapes} for {lengths} labels: some are one value per token and some are not; give a collate_fn")
    return batch


def _tensor(name: str, value: Any) -> Tensor:
    import torch

    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} is {shown(value)}, which makes no tensor ({error}); leave it out of the sample, or give a collate_fn") from None


def _length(labels: Tensor | None) -> int:
    if labels is None or not labels.dim() or not len(labels):
        raise DataError(f"labels are {shown(labels)}; a sample needs one for each of its tokens, {IGNORE} where nothing is learnt")
    return len(labels)


def check_batch(batch: Mapping[Any, Any], vocabulary: int | None = None) -> dict[str, Any]:
    """The micro-batch with tokens and labels as int64.

    Args:
        vocabulary: of the model; None: not known.

    Raises:
        DataError: names that are none, values that are no tensors (a model would not be given them), tokens, labels or masks of other shapes or
            types, or numbers outside the vocabulary.
    """
    import torch

    for name, value in batch.items():
        if not isinstance(name, str):
            raise DataError(f"{name!r} is no name; a micro-batch maps names to tensors")
        if value is not None and not isinstance(value, torch.Tensor):
            raise DataError(f"{name} is {shown(value)}, and a model is given tensors alone; make it one, or leave it out of the micro-batch")
    made = {name: value for name, value in batch.items() if value is not None}
    if getattr(made.get("labels"), "ndim", None) != 2:
        raise DataError(f"a micro-batch needs labels, a tensor [rows, tokens], and these gave {shown(made.get('labels'))}")
    for name in FILL:
        value = made.get(name)
        if value is None or (name == "attention_mask" and value.ndim > 2):
            continue
        if value.shape != made["labels"].shape:
            raise DataError(f"{name} has the shape {shown(value)}, and labels {shown(made['labels'])}; give one value for each token")
        if name != "attention_mask":
            made[name] = _numbers(name, value, vocabulary)
    return made


def _numbers(name: str, value: Tensor, vocabulary: int | None) -> Tensor:
    if value.is_floating_point() or value.is_complex():
        raise DataError(f"{name} are {str(value.dtype).removeprefix('torch.')}, not whole numbers")
    given = value[value != IGNORE] if name == "labels" else value
    if given.numel() and (int(given.min()) < 0 or (vocabulary is not None and int(given.max()) >= vocabulary)):
        known = "" if vocabulary is None else f" of the model's {vocabulary}"
        raise DataError(f"{name} reach from {int(given.min())} to {int(given.max())}, which are no tokens{known}; {IGNORE} marks what is not learnt")
    return value.long()


def shown(value: Any) -> str:
    """A shape, or the kind of what has none."""
    return "nothing" if value is None else str(list(value.shape)) if hasattr(value, "shape") else f"a {type(value).__name__}"
