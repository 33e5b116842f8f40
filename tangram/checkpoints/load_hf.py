"""Hugging Face weights straight into the parameters of one rank, at any topology, without conversion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tangram.checkpoints.copier import fill, show
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.reader import CanonicalReader
from tangram.errors import CheckpointError, name_some
from tangram.placement.blocks import LocalTensor, Placement, check_names
from tangram.placement.table import Shape


@dataclass(frozen=True)
class LoadReport:
    """What one rank wrote."""

    parameters: int
    elements: int
    """Elements of local parameters, padding included."""
    bytes: int
    """Read from the checkpoint."""
    tied: str | None
    """How a tied head was treated; None for a model with a head of its own."""

    def __str__(self) -> str:
        note = f"; {self.tied}" if self.tied else ""
        return f"{self.parameters} parameters, {self.elements} elements, {self.bytes} bytes read{note}"


Parameters = Sequence[Mapping[str, torch.Tensor]]
"""Parameters by local name, one mapping per chunk, in the order of the placements."""


def pair_up(placements: Sequence[Placement], parameters: Parameters, where: str) -> list[tuple[LocalTensor, torch.Tensor]]:
    """Every parameter of every chunk with its layout.

    Raises:
        PlacementError: the names are not the same.
    """
    pairs: list[tuple[LocalTensor, torch.Tensor]] = []
    for placement, chunk in zip(placements, parameters, strict=True):
        check_names(list(chunk), list(placement.tensors), f"{where}, parameters of stage {placement.chunk.position}")
        pairs += [(layout, chunk[name]) for name, layout in placement.tensors.items()]
    return pairs


def fill_all(placements: Sequence[Placement], parameters: Parameters, source: CanonicalReader, where: str, *, cast: bool) -> tuple[int, int, int]:
    """Write every parameter of this rank once; returns parameters, elements written, and elements that came from ``source``.

    Raises:
        PlacementError, CheckpointError: as ``pair_up`` and ``fill``.
    """
    pairs = pair_up(placements, parameters, where)
    moved = sum(fill(layout, parameter, source, cast=cast) for layout, parameter in pairs)
    return len(pairs), sum(parameter.numel() for _, parameter in pairs), moved


def load_hf(
    hf: HFDirectory,
    placements: Sequence[Placement],
    parameters: Parameters,
    cast: bool = False,
    shapes: Mapping[str, Shape] | None = None,
) -> LoadReport:
    """Fill this rank's parameters from a Hugging Face directory, reading only what the rank holds.

    Args:
        placements: of this rank's chunks.
        cast: allow the element type of the files to be changed to the parameters'.
        shapes: every canonical tensor of the whole model (``canonical_shapes``), which the files must hold exactly; None: those of the
            model that the directory's own config.json describes.

    Raises:
        PlacementError: tensors missing or unexpected in the files, or parameters in the chunks.
        CheckpointError: a shape or element type differs, a head that is tied by the config differs from the embedding, or a weight is NaN or
            infinite.
    """
    hf.check_model(shapes)
    before = hf.bytes_read
    count, elements, _ = fill_all(placements, parameters, hf, str(hf.path), cast=cast)
    check_finite(placements, parameters, str(hf.path))
    if hf.repeats_head:
        for start, shape in _embedding_rows(placements, hf.embedding):
            hf.check_head(start, shape)
    tied = f"lm_head: tied to {hf.embedding}" if hf.embedding else None
    return LoadReport(parameters=count, elements=elements, bytes=hf.bytes_read - before, tied=tied)


def check_finite(placements: Sequence[Placement], parameters: Parameters, where: str) -> None:
    """Refuse weights of which no loss could come: every step would be skipped.

    Raises:
        CheckpointError: a weight is NaN or infinite, as read or since its type was changed.
    """
    for layout, parameter in pair_up(placements, parameters, where):
        bad = parameter.numel() - int(parameter.detach().isfinite().sum())
        if bad:
            names = name_some([source.name for source in layout.sources])
            raise CheckpointError(
                f"{where}: {bad} of {parameter.numel()} elements of {names} on this rank are NaN or infinite in {show(parameter.dtype)}; the run "
                "that wrote them diverged, or its numbers do not fit the type; give an earlier checkpoint"
            )


def _embedding_rows(placements: Iterable[Placement], embedding: str | None) -> list[tuple[Shape, Shape]]:
    """The rectangles of the embedding that this rank's word embeddings hold; tied copies are left to the owner."""
    return [
        (block.canonical_start, block.canonical_shape)
        for placement in placements
        for layout in placement.tensors.values()
        if not layout.rule.tied
        for block in layout.blocks
        if block.canonical == embedding
    ]
