"""Which samples share a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Literal

Strategy = Literal["knapsack", "sequential"]


def knapsack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Few rows that hold all items: the largest first, each into the fullest row that still has room for it (best fit decreasing).

    Of equal items the earlier goes first, of equally full rows the older is filled. So nothing is left to chance.

    Args:
        sizes: of the items, at least 1. One larger than ``capacity`` has a row of its own.

    Returns:
        The items of each row by number, ascending; rows in the order of their first items.
    """
    rows: list[list[int]] = []
    many = len(sizes) + 1
    free: list[int] = []
    """Of each row that has room: ``room * many + row``, ascending."""
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        size = sizes[item]
        at = bisect_left(free, size * many)
        if at < len(free):
            room, row = divmod(free.pop(at), many)
            rows[row].append(item)
        else:
            room, row = capacity, len(rows)
            rows.append([item])
        if room > size:
            insort(free, (room - size) * many + row)
    return sorted(sorted(row) for row in rows)


def sequential(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows filled in order: an item that does not fit begins the next row. Arguments and result as ``knapsack``."""
    rows: list[list[int]] = []
    room = 0
    for item, size in enumerate(sizes):
        if size > room:
            rows.append([])
            room = capacity
        rows[-1].append(item)
        room -= size
    return rows


PACKERS: dict[Strategy, Callable[[Sequence[int], int], list[list[int]]]] = {"knapsack": knapsack, "sequential": sequential}
"""By the ``packing_strategy`` of data.json's ``basic_parameters``."""
