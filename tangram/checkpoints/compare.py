"""Two tensors compared bit by bit, in slabs of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from tangram.checkpoints.reader import CanonicalReader, bits, same_bits
from tangram.placement.table import Shape

SLAB = 4 << 20
"""Elements of one slab: 16 MiB in fp32."""


def slabs(shape: Shape, limit: int = SLAB) -> Iterator[tuple[Shape, Shape]]:
    """Rectangles ``(start, shape)`` of at most ``limit`` elements that tile a tensor, in the order of its elements."""
    if prod(shape) <= limit:
        yield (0,) * len(shape), shape
        return
    inner = prod(shape[1:])
    rows = max(1, limit // inner)
    for row in range(0, shape[0], rows):
        count = min(rows, shape[0] - row)
        for start, size in slabs(shape[1:], limit) if inner > limit else [((0,) * (len(shape) - 1), shape[1:])]:
            yield (row, *start), (count, *size)


@dataclass
class NonFinite:
    """Counts of one tensor on one side."""

    nan: int = 0
    inf: int = 0

    def add(self, values: torch.Tensor) -> None:
        if not values.is_floating_point():
            return
        if values.dtype.itemsize == 1:  # torch tests no fp8
            values = values.float()
        if not values.isfinite().all():
            self.nan += int(values.isnan().sum())
            self.inf += int(values.isinf().sum())

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf)


@dataclass(frozen=True)
class First:
    """The first element that differs."""

    index: Shape
    first: float
    second: float


@dataclass
class TensorComparison:
    """What a comparison of two tensors of one shape found.

    ``largest`` is the largest absolute difference of finite elements, ``relative`` the largest one divided by the larger magnitude.
    """

    name: str
    elements: int
    differing: int = 0
    where: First | None = None
    largest: float = 0.0
    relative: float = 0.0
    not_finite: tuple[NonFinite, NonFinite] = field(default_factory=lambda: (NonFinite(), NonFinite()))


def compare_tensors(
    name: str,
    shape: Shape,
    one: tuple[CanonicalReader, str],
    other: tuple[CanonicalReader, str],
    *,
    tolerance: float | None = None,
    limit: int = SLAB,
) -> TensorComparison:
    """Compare a tensor of two readers, each given with the tensor's name there.

    Element types may differ; values are then compared after a conversion that keeps every value (``exact_type``).

    Args:
        tolerance: elements whose difference is at most this times the larger magnitude are equal; None: bits must be equal.
        limit: elements in memory at a time, of each side.
    """
    found = TensorComparison(name, prod(shape))
    for start, size in slabs(shape, limit):
        first, second = one[0].read(one[1], start, size), other[0].read(other[1], start, size)
        found.not_finite[0].add(first)
        found.not_finite[1].add(second)
        if first.dtype != second.dtype:
            common = exact_type(first.dtype, second.dtype)
            assert common is not None, "the caller compares element types first"
            first, second = first.to(common), second.to(common)
        if not same_bits(first, second):
            _add_differences(found, first, second, start, tolerance)
    return found


def exact_type(one: torch.dtype, other: torch.dtype) -> torch.dtype | None:
    """A type that holds every value of both; None for integers beside floating-point numbers."""
    if one == other:
        return one
    if one.is_floating_point != other.is_floating_point:
        return None
    if min(one.itemsize, other.itemsize) == 1 and one.is_floating_point:
        return torch.float64 if torch.float64 in (one, other) else torch.float32
    return torch.promote_types(one, other)


def _add_differences(found: TensorComparison, first: torch.Tensor, second: torch.Tensor, start: Shape, tolerance: float | None) -> None:
    differs = bits(first) != bits(second)
    a, b = first[differs].double(), second[differs].double()
    size = torch.maximum(a.abs(), b.abs())
    gap = (a - b).abs()
    if tolerance is not None:
        kept = ~((gap <= tolerance * size) & gap.isfinite()) & ~((a == b) | (a.isnan() & b.isnan()))
        differs[differs.clone()] = kept
        a, b, size, gap = a[kept], b[kept], size[kept], gap[kept]
    if not a.numel():
        return
    finite = gap.isfinite()
    if finite.any():
        found.largest = max(found.largest, float(gap[finite].max()))
        found.relative = max(found.relative, float((gap[finite] / size[finite].clamp(min=torch.finfo(torch.float64).tiny)).max()))
    if found.where is None:
        inside = np.unravel_index(int(differs.numpy().argmax()), tuple(differs.shape))
        found.where = First(tuple(x + int(y) for x, y in zip(start, inside, strict=True)), float(a[0]), float(b[0]))
    found.differing += int(a.numel())

