"""Two tensors compared bit by bit, in slabs of bounded size."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from tangram.checkpoints.engine import slabs
from tangram.checkpoints.reader import CanonicalReader, bits, same_bits
from tangram.placement.table import Shape

SLAB = 4 << 20
"""Elements of one slab: 16 MiB in fp32."""
PIECE = 1 << 18
"""Elements of a slab that are compared at a time where something differs."""
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class NonFinite:
    """Counts of one tensor on one side."""

    nan: int = 0
    inf: int = 0

    @classmethod
    def among(cls, values: torch.Tensor) -> NonFinite:
        """Of a tensor's elements."""
        if not values.is_floating_point() or not values.numel():
            return cls()
        if values.dtype.itemsize == 1:  # torch tests no fp8
            values = values.float()
        # The least and the greatest are NaN where any element is, and take no memory.
        if all(bound.isfinite() for bound in values.aminmax()):
            return cls()
        return cls(int(values.isnan().sum()), int(values.isinf().sum()))

    def __add__(self, other: NonFinite) -> NonFinite:
        return NonFinite(self.nan + other.nan, self.inf + other.inf)

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
    for start, size in slabs(shape, 4, 4 * limit):
        first, second = one[0].read(one[1], start, size), other[0].read(other[1], start, size)
        equal = same_bits(first, second)
        counts = NonFinite.among(first)
        others = counts if equal else NonFinite.among(second)
        found.not_finite = found.not_finite[0] + counts, found.not_finite[1] + others
        if equal:
            continue
        if first.dtype != second.dtype:
            common = exact_type(first.dtype, second.dtype)
            assert common is not None, "the caller compares element types first"
            first, second = first.to(common), second.to(common)
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
    """Count what differs in a slab, in pieces that stay in the processor's cache."""
    shape = tuple(first.shape)
    ones, others = first.reshape(-1), second.reshape(-1)
    for begin in range(0, ones.numel(), PIECE):
        one, other = ones[begin : begin + PIECE], others[begin : begin + PIECE]
        differs = bits(one) != bits(other)
        if not differs.any():
            continue
        a, b = one.double(), other.double()
        gap, size = (a - b).abs(), torch.maximum(a.abs(), b.abs())
        if tolerance is not None:
            differs &= ~((gap <= tolerance * size) & gap.isfinite()) & (a != b) & ~(a.isnan() & b.isnan())
        count = int(differs.sum())
        if not count:
            continue
        finite = differs & gap.isfinite()
        found.largest = max(found.largest, float(gap.where(finite, 0.0).max()))
        found.relative = max(found.relative, float((gap / size.clamp(min=_TINY)).where(finite, 0.0).max()))
        if found.where is None:
            at = int(differs.numpy().argmax())
            inside = np.unravel_index(begin + at, shape)
            found.where = First(tuple(x + int(y) for x, y in zip(start, inside, strict=True)), float(a[at]), float(b[at]))
        found.differing += count
