"""The parameters of all ranks as canonical tensors, read on one of them while the others serve it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from tangram.checkpoints.dcp_ranks import gather, lost_contact, rank, world_size
from tangram.checkpoints.dcp_state import LocalChunk
from tangram.checkpoints.reader import TensorInfo, check_rectangle, count_elements, slices
from tangram.checkpoints.stored_types import StoredAs, cast
from tangram.errors import CheckpointError, PlacementError, name_some
from tangram.placement.table import Shape

_DIMENSIONS = 8
_OVER = -1
Rectangle = tuple[Shape, Shape]
"""Start and shape."""


class ShardedReader:
    """``CanonicalReader`` on rank 0; the other ranks call ``serve``, until rank 0 calls ``close``. To be made by all ranks together.

    What is read travels rectangle by rectangle in host memory: no rank holds more than what is asked for at once. A rectangle that several
    ranks hold is taken from the first.

    Args:
        chunks, shapes, stored_as: as ``CheckpointManager`` has them; parameters are read in the types that they are stored in.
        group: of all ranks, for messages in host memory; None: there is one rank.

    Raises:
        CheckpointError: a tensor that no rank holds.
    """

    def __init__(
        self, chunks: Sequence[LocalChunk], shapes: Mapping[str, Shape], stored_as: StoredAs | None, group: dist.ProcessGroup | None
    ) -> None:
        self._names, self._group = list(shapes), group
        self._held: dict[str, dict[Rectangle, torch.Tensor]] = defaultdict(dict)
        dtypes: dict[str, torch.dtype] = {}
        for _, placement, parameters in chunks:
            for layout in placement.tensors.values():
                for block in layout.blocks:
                    if block.canonical is None or layout.rule.tied:
                        continue
                    local = parameters[layout.name].detach()
                    view = block.to_canonical(local[block.local_slices])
                    self._held[block.canonical][block.canonical_start, block.canonical_shape] = view
                    dtypes[block.canonical] = local.dtype if stored_as is None else stored_as[layout.name]
        self._dtypes = dtypes
        self._owners: dict[str, dict[Rectangle, int]] = defaultdict(dict)
        for number, (held, known) in enumerate(gather(({name: list(parts) for name, parts in self._held.items()}, dtypes))):
            for name, parts in held.items():
                for part in parts:
                    self._owners[name].setdefault(part, number)
            dtypes = {**known, **dtypes}
        if lost := set(shapes) - set(self._owners):
            raise CheckpointError(f"{len(lost)} tensors of the model are held by no rank: {name_some(lost)}")
        self._infos = {name: TensorInfo(shape, dtypes[name]) for name, shape in shapes.items()}

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """A rectangle, put together from the ranks that hold it.

        Raises:
            CheckpointError: no such tensor, outside it, a number that its stored type cannot hold, or a rank is gone.
            PlacementError: some of it is held by no rank.
        """
        check_rectangle(self._infos, name, start, shape, "the ranks")
        out = torch.empty(shape, dtype=self._infos[name].dtype)
        covered = 0
        for owner in self._owners[name]:
            first, size = _overlap(owner, (start, shape))
            if min(size, default=1) <= 0:
                continue
            inside = tuple(at - begin for at, begin in zip(first, start, strict=True))
            out[slices(inside, size)] = self._fetch(name, owner, first, size)
            covered += count_elements(size)
        if covered != out.numel():
            raise PlacementError(f"{name}: {covered} of {out.numel()} elements of the rectangle of shape {shape} at {start} are held by a rank")
        return out

    def _fetch(self, name: str, owner: Rectangle, start: Shape, shape: Shape) -> torch.Tensor:
        holder = self._owners[name][owner]
        if holder == rank():
            return self._part(name, start, shape)
        dtype = self._infos[name].dtype
        received = torch.empty(count_elements(shape) * dtype.itemsize, dtype=torch.uint8)
        try:
            dist.send(_request(self._names.index(name), start, shape), holder, group=self._group)
            dist.recv(received, holder, group=self._group)
        except RuntimeError as error:
            raise lost_contact(error) from error
        return received.view(dtype).view(shape)

    def _part(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """A rectangle inside one that this rank holds, in host memory and contiguous."""
        for owner, view in self._held[name].items():
            if _overlap(owner, (start, shape)) == (start, shape):
                inside = tuple(at - begin for at, begin in zip(start, owner[0], strict=True))
                return cast(name, view[slices(inside, shape)], self._dtypes[name]).cpu().contiguous()
        raise AssertionError(f"{name}: rank {rank()} holds no rectangle of shape {shape} at {start}")

    def serve(self) -> None:
        """Send what rank 0 asks for, until it closes.

        Raises:
            CheckpointError: rank 0 is gone.
        """
        request = torch.empty(2 + 2 * _DIMENSIONS, dtype=torch.int64)
        try:
            while True:
                dist.recv(request, 0, group=self._group)
                index, dimensions, *numbers = request.tolist()
                if index == _OVER:
                    return
                start, shape = tuple(numbers[:dimensions]), tuple(numbers[_DIMENSIONS : _DIMENSIONS + dimensions])
                part = self._part(self._names[index], start, shape)
                dist.send(part.view(-1).view(torch.uint8), 0, group=self._group)
        except RuntimeError as error:
            raise lost_contact(error) from error

    def close(self) -> None:
        """Let the other ranks go; on rank 0."""
        for number in range(1, world_size()):
            dist.send(_request(_OVER, (), ()), number, group=self._group)


def _request(index: int, start: Shape, shape: Shape) -> torch.Tensor:
    filled = [tuple(part) + (0,) * (_DIMENSIONS - len(part)) for part in (start, shape)]
    return torch.tensor([index, len(start), *filled[0], *filled[1]], dtype=torch.int64)


def _overlap(one: Rectangle, other: Rectangle) -> Rectangle:
    """What two rectangles share; a size of 0 or less where they do not meet."""
    first = tuple(map(max, one[0], other[0]))
    size = tuple(min(a + m, b + n) - at for a, m, b, n, at in zip(*one, *other, first, strict=True))
    return first, size
