"""Which rectangles of the attention matrix a rank of a zigzag ring computes.

Of ``2 * ring`` equal parts of a sequence ring rank r holds parts r and ``2 * ring - 1 - r`` (``tangram.models.sequence``). What its queries see
of the keys of another rank is then at most four tiles, part by part, each seen whole, not at all, or causally. In a packed row two different
parts have at most one sample in common, for samples are consecutive, so no tile but the causal ones ever needs a mask.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Consecutive local queries against consecutive keys of a block.

    Args:
        queries: first and number of them.
        keys: as ``queries``, within the block that another rank sent.
        lengths: of the consecutive samples that both consist of, each causal; None: every query sees every key.
        mask: bool [b or 1, 1, queries, keys], True where a query sees a key, in place of all that.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    lengths: tuple[int, ...] | None = None
    mask: Tensor | None = None


def ring_tiles(padded: int, ring: int, rank: int, samples: Sequence[int] | None = None, mask: Tensor | None = None) -> tuple[tuple[Tile, ...], ...]:
    """Tiles of ring rank ``rank`` against the block of each ring rank.

    Args:
        padded: length of the sequence, a multiple of ``2 * ring``.
        samples: lengths of the samples of a packed row, which add up to ``padded``; None: one sample.
        mask: bool [b or 1, 1, padded, padded], which replaces causality; every query sees itself.
    """
    part, rest = divmod(padded, 2 * ring)
    assert rest == 0, f"{padded} tokens do not make {2 * ring} parts"
    ends = list(accumulate(samples)) if samples is not None else [padded]
    assert ends[-1] == padded, f"samples of {ends[-1]} tokens in a row of {padded}"
    return tuple(
        tuple(
            tile
            for place, own in enumerate((rank, 2 * ring - 1 - rank))
            # Behind a mask the tile on the diagonal comes first: every token sees itself, so after it no row of the softmax is empty.
            for other_place, other in sorted(enumerate((owner, 2 * ring - 1 - owner)), key=lambda part: part[1] != own)
            for tile in _tile(part, (place, own), (other_place, other), ends, mask)
        )
        for owner in range(ring)
    )


def _tile(part: int, own: tuple[int, int], other: tuple[int, int], ends: Sequence[int], mask: Tensor | None) -> list[Tile]:
    """One tile or none. ``own`` and ``other``: place in the rank's block, and number in the sequence, of a part of ``part`` tokens."""
    (place, number), (other_place, other_number) = own, other
    queries, keys = (place * part, part), (other_place * part, part)
    start, key_end = number * part, (other_number + 1) * part
    if mask is not None:
        seen = mask[:, :, start : start + part, key_end - part : key_end]
        return [Tile(queries, keys, mask=seen)] if bool(seen.any()) else []
    if other_number > number:
        return []
    sample = bisect_right(ends, start)
    if other_number == number:
        inside = [end for end in ends[sample:] if end < start + part]
        return [Tile(queries, keys, lengths=tuple(b - a for a, b in pairwise([start, *inside, start + part])))]
    # Only the sample that our part begins in can reach back to the other one.
    begins, stops = (ends[sample - 1] if sample else 0), min(ends[sample], start + part)
    seen_keys = min(key_end - begins, part)
    if seen_keys <= 0:
        return []
    return [Tile((queries[0], stops - start), (keys[0] + part - seen_keys, seen_keys))]
