"""Moves weights between local parameters and canonical tensors, block by block, in both directions.

``fill`` goes from canonical to local, ``LocalSource`` from local to canonical. Both are driven by the same blocks, so they cannot
disagree about a layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from tangram.checkpoints.reader import CanonicalReader, TensorInfo, check_rectangle, count_elements, same_bits, slices
from tangram.errors import CheckpointError, PlacementError, name_some
from tangram.placement.blocks import Block, LocalTensor, Placement
from tangram.placement.proof import cover_extremes
from tangram.placement.table import Shape

WEIGHT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Element types whose values are the weights."""


def check_tiling(layout: LocalTensor) -> None:
    """Prove that the blocks of a parameter cover each of its elements once.

    Raises:
        PlacementError: they do not.
    """
    least, most = cover_extremes(layout.shape, tuple((block.local_start, block.shape) for block in layout.blocks))
    if (least, most) != (1, 1):
        raise PlacementError(f"{layout.name}: elements are covered between {least} and {most} times instead of once")


def check_sources(layout: LocalTensor, source: CanonicalReader) -> None:
    """Check that ``source`` holds the canonical tensors of a parameter in the shapes that the table gives them.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    infos = source.names()
    for name, shape in ((expected.name, expected.shape) for expected in layout.sources):
        if name not in infos:
            raise CheckpointError(f"{layout.name}: its source {name} is not among the {len(infos)} tensors of the checkpoint")
        if infos[name].shape != shape:
            raise CheckpointError(f"{name}: shape {infos[name].shape} in the checkpoint but {shape} in the model; they are of different models")


def local_dtype(layout: LocalTensor, source: CanonicalReader) -> torch.dtype:
    """Element type that a parameter takes from its sources, padding included.

    Raises:
        CheckpointError: tensors that are fused into one parameter have different types.
    """
    infos = source.names()
    dtypes = {expected.name: infos[expected.name].dtype for expected in layout.sources}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {show(dtype)}" for name, dtype in dtypes.items())
        raise CheckpointError(f"{layout.name}: fuses tensors of different element types: {listed}; save them in one type")
    return next(iter(dtypes.values()))


def fill(layout: LocalTensor, target: torch.Tensor, source: CanonicalReader, *, cast: bool = False) -> int:
    """Write every element of a local parameter from its canonical sources; padding becomes zero.

    Args:
        target: ``layout.shape``, on any device; need not be contiguous.
        cast: allow the element type to change.

    Returns:
        Elements that came from ``source``.

    Raises:
        CheckpointError: the target has another shape, a source is missing or of another shape, or of another type and ``cast`` is off.
        PlacementError: the blocks do not cover the parameter once.
    """
    if tuple(target.shape) != layout.shape:
        raise CheckpointError(f"{layout.name}: the parameter has shape {tuple(target.shape)}, its placement {layout.shape}; model and split disagree")
    check_tiling(layout)
    check_sources(layout, source)
    infos = source.names()
    moved = 0
    with torch.no_grad():
        for block in layout.blocks:
            if block.canonical is None:
                target[block.local_slices].zero_()
                continue
            dtype = infos[block.canonical].dtype
            if dtype != target.dtype and not cast:
                raise CheckpointError(
                    f"{block.canonical}: the checkpoint holds {show(dtype)} but the parameter {layout.name} is {show(target.dtype)}; "
                    f"build the model in {show(dtype)}, or ask for the cast"
                )
            if dtype != target.dtype and dtype not in WEIGHT_TYPES:
                raise CheckpointError(
                    f"{block.canonical}: the checkpoint holds {show(dtype)}, which are no weights as they stand but quantised ones, whose scales are "
                    "not read; give the bf16, fp16 or fp32 weights"
                )
            target[block.local_slices].copy_(block.to_local(source.read(block.canonical, block.canonical_start, block.canonical_shape)))
            moved += block.numel
    return moved


def read_local(layout: LocalTensor, source: CanonicalReader, start: Shape, shape: Shape, buffer: torch.Tensor) -> torch.Tensor:
    """A rectangle of a local parameter, contiguous: a view of the source where that has it in one piece, else ``buffer``, filled.

    Run ``check_tiling`` and ``check_sources`` once before.

    Args:
        buffer: of ``shape``, contiguous; its element type is that of the result.
    """
    for block in layout.blocks:
        first, size = _overlap(block.local_start, block.shape, start, shape)
        if any(n <= 0 for n in size):
            continue
        target = buffer[slices(tuple(a - b for a, b in zip(first, start, strict=True)), size)]
        if block.canonical is None:
            target.zero_()
            continue
        part = block.part(first, size)
        values = block.to_local(source.read(block.canonical, part.canonical_start, part.canonical_shape))
        if size == shape and values.dtype == buffer.dtype and values.is_contiguous():
            return values
        target.copy_(values)
    return buffer


def _overlap(one_start: Shape, one_shape: Shape, start: Shape, shape: Shape) -> tuple[Shape, Shape]:
    """Start and shape of what two rectangles share; a size of 0 or less where they do not meet."""
    first = tuple(map(max, one_start, start))
    size = tuple(min(a + m, b + n) - at for a, m, b, n, at in zip(one_start, one_shape, start, shape, first, strict=True))
    return first, size


def show(dtype: torch.dtype) -> str:
    """``bfloat16`` rather than ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Owner:
    """A local tensor's view of one canonical rectangle."""

    where: str
    view: torch.Tensor


class LocalSource:
    """Local parameters of all ranks and chunks of a split, read as canonical tensors.

    Rectangles that several ranks hold (replicas over tensor-parallel ranks, tied copies) are compared when read: a checkpoint whose
    copies differ is damaged, and picking one of them would hide it.

    Args:
        parts: the placement of every rank and chunk, its tensors by local name, and a word for messages, such as the file.
        shapes: name and shape of every canonical tensor.
        identity: see ``reader.identity_of``.

    Raises:
        CheckpointError: a tensor is missing or has another shape or type than its placement or its other parts.
        PlacementError: a canonical tensor has no owner.
    """

    def __init__(
        self, parts: Iterable[tuple[Placement, Mapping[str, torch.Tensor], str]], shapes: Mapping[str, Shape], identity: str | None = None
    ) -> None:
        self.identity = identity
        self._owners: dict[str, dict[tuple[Shape, Shape], list[_Owner]]] = defaultdict(lambda: defaultdict(list))
        dtypes: dict[str, torch.dtype] = {}
        for placement, tensors, where in parts:
            for layout in placement.tensors.values():
                self._add(layout, tensors, where, dtypes)
        lost = set(shapes) - set(self._owners)
        if lost:
            raise PlacementError(f"{len(lost)} tensors are held by no rank: {name_some(lost)}")
        self._infos = {name: TensorInfo(shape, dtypes[name]) for name, shape in shapes.items()}

    def _add(self, layout: LocalTensor, tensors: Mapping[str, torch.Tensor], where: str, dtypes: dict[str, torch.dtype]) -> None:
        if layout.name not in tensors:
            raise CheckpointError(f"{where}: no tensor {layout.name}; the file is incomplete, convert again")
        tensor = tensors[layout.name]
        if tuple(tensor.shape) != layout.shape:
            raise CheckpointError(f"{where}: {layout.name} has shape {tuple(tensor.shape)}, this model and split need {layout.shape}")
        for block in layout.blocks:
            if block.canonical is None:
                continue
            if dtypes.setdefault(block.canonical, tensor.dtype) != tensor.dtype:
                raise CheckpointError(
                    f"{where}: {layout.name} is {show(tensor.dtype)} but other parts of {block.canonical} are {show(dtypes[block.canonical])}"
                )
            self._owners[block.canonical][_rectangle(block)].append(_Owner(where, block.to_canonical(tensor[block.local_slices])))

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """A rectangle, put together from its owners; a view where one owner holds all of it.

        Raises:
            CheckpointError: outside the tensor, or copies of it differ.
            PlacementError: some of it has no owner.
        """
        check_rectangle(self._infos, name, start, shape, "local tensors")
        owners = self._owners[name]
        if (start, shape) in owners:
            return _agreed(name, owners[start, shape], (0,) * len(shape), shape)
        out = torch.empty(shape, dtype=self._infos[name].dtype) if not count_elements(shape) else None
        covered = 0
        for (owner_start, owner_shape), holders in owners.items():
            if shape and not owner_start[0] - shape[0] < start[0] < owner_start[0] + owner_shape[0]:
                continue  # most of many
            first, size = _overlap(owner_start, owner_shape, start, shape)
            if any(n <= 0 for n in size):
                continue
            inside = tuple(at - a for at, a in zip(first, owner_start, strict=True))
            if size == shape:
                return _agreed(name, holders, inside, size)
            if out is None:
                out = torch.empty(shape, dtype=self._infos[name].dtype)
            target = tuple(at - b for at, b in zip(first, start, strict=True))
            out[slices(target, size)] = _agreed(name, holders, inside, size)
            covered += count_elements(size)
        if out is None or covered != out.numel():
            raise PlacementError(
                f"{name}: {covered} of {count_elements(shape)} elements of the rectangle of shape {shape} at {start} have an owner, or some have two"
            )
        return out


def _rectangle(block: Block) -> tuple[Shape, Shape]:
    return block.canonical_start, block.canonical_shape


def _agreed(name: str, holders: list[_Owner], start: Shape, shape: Shape) -> torch.Tensor:
    """The rectangle of the first holder, after comparing it with the others'."""
    first, *others = (holder.view[slices(start, shape)] for holder in holders)
    for holder, other in zip(holders[1:], others, strict=True):
        if not same_bits(first, other):
            raise CheckpointError(
                f"{name}: its copies in {holders[0].where} and {holder.where} differ; the checkpoint is damaged, convert or save it again"
            )
    return first
