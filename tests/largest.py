"""The largest of some errors, of which some may be no number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

Error = TypeVar("Error", float, tuple[float, str])


def largest(errors: Iterable[Error]) -> Error:
    """The largest error, or of (error, name) the pair with it; NaN is larger than any number. Python's ``max`` passes over a NaN that does not
    come first, so that a test of what it gives passes on what is no number."""
    return max(errors, key=lambda error: (math.isnan(error[0] if isinstance(error, tuple) else error), error))
