"""Parameters in the types that checkpoints store them in, where a backend's own are wider.

A backend that computes in bf16 from fp32 parameters stores what the others do: the bf16 values, and the fp32 ones as the optimizer's masters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tangram.checkpoints.dcp_state import LocalChunk, model_key
from tangram.errors import CheckpointError
from tangram.placement.blocks import LocalTensor

StoredAs = Mapping[str, torch.dtype]
"""Local parameter name -> the type it is stored in. Such parameters are read from any floating-point type."""


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in a type, itself where it has that.

    Raises:
        CheckpointError: a number that the type cannot hold.
    """
    found = tensor.detach().to(dtype)
    if dtype == torch.float16 and tensor.dtype != dtype and bool((found.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(f"{name}: holds {float(tensor.abs().max()):.3g}, more than fp16 can (65504); set save_ckpt_dtype bf16 or fp32")
    return found


def to_save(chunks: Sequence[LocalChunk], stored_as: StoredAs | None) -> Sequence[LocalChunk]:
    """The chunks with their parameters as they are stored.

    Raises:
        CheckpointError: as ``cast``.
    """
    if stored_as is None:
        return chunks
    return [
        (chunk, placement, {name: cast(name, tensor, stored_as[name]) for name, tensor in parameters.items()})  # type: ignore[misc]
        for chunk, placement, parameters in chunks
    ]


def to_load(chunks: Sequence[LocalChunk], stored_as: StoredAs | None, metadata: Metadata) -> Sequence[LocalChunk]:
    """The chunks with what their parameters are read into: themselves, or memory of the stored type."""
    if stored_as is None:
        return chunks
    return [
        (chunk, placement, {name: _target(tensor, placement.tensors[name], metadata) for name, tensor in parameters.items()})  # type: ignore[misc]
        for chunk, placement, parameters in chunks
    ]


def _target(parameter: torch.Tensor, layout: LocalTensor, metadata: Metadata) -> torch.Tensor:
    entries = [metadata.state_dict_metadata.get(model_key(source.name)) for source in layout.sources]
    dtypes = {entry.properties.dtype for entry in entries if isinstance(entry, TensorStorageMetadata)}
    if len(dtypes) != 1 or not all(dtype.is_floating_point for dtype in (parameter.dtype, *dtypes)):
        return parameter
    (dtype,) = dtypes
    return parameter if dtype == parameter.dtype else torch.empty_like(parameter, dtype=dtype, requires_grad=False)


@torch.no_grad()
def loaded(chunks: Sequence[LocalChunk], targets: Sequence[LocalChunk], masters: Collection[tuple[int, str]]) -> None:
    """Move what was read into the parameters.

    Args:
        targets: of ``to_load``.
        masters: chunk and name of the parameters that hold their master already.
    """
    for number, ((_, _, parameters), (_, _, read)) in enumerate(zip(chunks, targets, strict=True)):
        for name, tensor in read.items():
            if tensor is not parameters[name] and (number, name) not in masters:
                parameters[name].copy_(tensor)
