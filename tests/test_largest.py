"""The largest of some errors does not lose what is no number."""

from __future__ import annotations

import math

from tests.largest import largest


def test_what_is_no_number_is_larger_than_any() -> None:
    assert math.isnan(largest([0.0, math.nan, 1.0])) and largest([0.0, 2.0, 1.0]) == 2.0
    assert largest([(0.5, "a"), (math.nan, "b"), (0.7, "c")])[1] == "b" and largest([(0.5, "a"), (0.7, "c")]) == (0.7, "c")
