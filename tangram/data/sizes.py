"""How large the samples of a dataset are: what orders that group, pack or balance need to know beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class SampleSizes:
    """One number per sample and kind, ``[samples]`` each."""

    tokens: np.ndarray
    """int32; 0: the sample cannot be used and is skipped."""
    patches: np.ndarray
    """int32, over all its media, before merging."""
    shapes: np.ndarray
    """int64: grid height * 65536 + grid width of its largest medium; 0: it has none."""
