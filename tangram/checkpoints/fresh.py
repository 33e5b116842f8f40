"""Random initialisation that does not depend on the topology.

The value of an element is a function of the seed, the canonical name of its tensor and its place there: tensors are cut into chunks of
whole rows, each drawn by a generator of its own, and a rank draws the chunks that its rectangles touch. So every split starts from the
same weights, replicas and tied copies are equal, and no rank holds a whole tensor that it does not own.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch

from tangram.checkpoints.load_hf import LoadReport, Parameters, fill_all
from tangram.checkpoints.reader import TensorInfo, check_rectangle, count_elements, slices
from tangram.placement.blocks import Placement
from tangram.placement.table import Component, Init, Shape

CHUNK_ELEMENTS = 1 << 16
"""About how many elements are drawn at a time. Part of the meaning of a seed: another value gives other weights."""
_KEPT_CHUNKS = 8
"""A fused parameter reads small pieces of a few tensors in turn; their chunks are kept rather than drawn again."""


def generator_seed(seed: int, name: str, chunk: int) -> int:
    """Seed of one chunk of one tensor, the same in every process and Python version."""
    digest = hashlib.blake2b(f"{seed}/{name}/{chunk}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class FreshSource:
    """Canonical tensors of a model that has not been trained, drawn as they are read, in fp32.

    Args:
        tensors: per canonical name, its shape, what it starts as, and the standard deviation where that is normal.
    """

    def __init__(self, seed: int, tensors: Mapping[str, tuple[Shape, Init, float]]) -> None:
        self._seed, self._tensors = seed, tensors
        self._infos = {name: TensorInfo(shape, torch.float32) for name, (shape, _, _) in tensors.items()}
        self._chunks: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()

    def names(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        check_rectangle(self._infos, name, start, shape, "fresh model")
        _, init, _ = self._tensors[name]
        if init != "normal":
            return torch.full(shape, 1.0 if init == "ones" else 0.0)
        out = torch.empty(shape)
        rows = self._rows_per_chunk(name)
        done = 0
        while done < shape[0]:
            number, inside = divmod(start[0] + done, rows)
            take = min(rows - inside, shape[0] - done)
            drawn = self._draw(name, number)
            out[done : done + take] = drawn[slices((inside, *start[1:]), (take, *shape[1:]))]
            done += take
        return out

    def _rows_per_chunk(self, name: str) -> int:
        return max(1, CHUNK_ELEMENTS // count_elements(self._infos[name].shape[1:]))

    def _draw(self, name: str, number: int) -> torch.Tensor:
        if (name, number) not in self._chunks:
            shape, _, std = self._tensors[name]
            rows = self._rows_per_chunk(name)
            generator = torch.Generator().manual_seed(generator_seed(self._seed, name, number))
            size = (min(rows, shape[0] - number * rows), *shape[1:])
            self._chunks[name, number] = torch.empty(size).normal_(0.0, std, generator=generator)
            if len(self._chunks) > _KEPT_CHUNKS:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end((name, number))
        return self._chunks[name, number]


def initialize(placements: Sequence[Placement], parameters: Parameters, seed: int, std: Mapping[Component, float]) -> LoadReport:
    """Fill this rank's parameters with the fresh values of ``seed``, drawn in fp32 and cast to the parameters' type.

    Args:
        placements: of this rank's chunks.
        std: standard deviation of normally drawn tensors, per component.

    Raises:
        PlacementError: the parameters are not those of the placements.
    """
    tensors = {name: entry for placement in placements for name, entry in _entries(placement, std)}
    count, elements, _ = fill_all(placements, parameters, FreshSource(seed, tensors), f"initialisation, seed {seed}", cast=True)
    return LoadReport(parameters=count, elements=elements, bytes=0, tied=None)


def _entries(placement: Placement, std: Mapping[Component, float]) -> Iterator[tuple[str, tuple[Shape, Init, float]]]:
    for layout in placement.tensors.values():
        for source in layout.sources:
            yield source.name, (source.shape, layout.rule.init, std[layout.rule.component])
