"""Which records a run takes, and in what order: drawn subsets, the part set aside for evaluation, and several datasets in turn.

All of it is a function of the run's seed, by the sampler's permutations. Where those take an epoch, below 2**32, stands what keeps the purposes
apart.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from fractions import Fraction

from tangram.data.sampler import permutation
from tangram.errors import DataError

SUBSET, SPLIT, MIX = 1 << 32, 2 << 32, 3 << 32
BLOCK = 100
"""Samples over which the shares of interleaved datasets hold."""
MOST_SAMPLES = 1 << 28
"""Of an interleaved order, which is held in memory."""


def _order(seed: int, purpose: int, count: int) -> list[int]:
    """A permutation of ``range(count)``."""
    order: list[int] = permutation(count, seed, purpose).tolist()
    return order


def subset(total: int, count: int, seed: int, number: int) -> array[int]:
    """``count`` of ``range(total)``, drawn without repeats, ascending.

    Args:
        number: of the dataset, whose draw is its own.
    """
    return array("q", sorted(_order(seed, SUBSET + number, total)[:count]))


def split(total: int, rate: float, seed: int) -> tuple[array[int], array[int]]:
    """``range(total)`` in two: for training, and ``rate`` of it, rounded up, for evaluation; ascending both.

    Raises:
        DataError: nothing would be left to train on.
    """
    # As a decimal: 0.07 of 100 are 7, where 0.07 * 100 is a little more.
    count = math.ceil(Fraction(str(rate)) * total)
    if count >= total:
        raise DataError(
            f"basic_parameters.val_rate {rate} of {total} samples sets {count} aside and leaves {total - count} to train on; lower it or add samples"
        )
    order = _order(seed, SPLIT, total)
    return array("q", sorted(order[count:])), array("q", sorted(order[:count]))


def read_shares(text: str | None, count: int) -> list[float]:
    """The shares of ``count`` datasets; equal where ``text`` is None.

    Raises:
        DataError: other than ``count`` positive numbers that sum to 1.
    """
    if text is None:
        return [1 / count] * count
    where = f"basic_parameters.interleave_probs {text!r}"
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise DataError(f"{where}: not numbers separated by commas, as in '0.7,0.3'") from None
    if len(shares) != count:
        raise DataError(f"{where}: {len(shares)} shares but dataset names {count} datasets; give one each")
    if not all(0 < share < math.inf for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise DataError(f"{where}: the shares must be above 0 and sum to 1, not to {sum(shares):g}")
    return shares


def interleave(lengths: Sequence[int], shares: Sequence[float], seed: int, *, until_last: bool) -> tuple[array[int], array[int]]:
    """Datasets drawn in turn: of each sample the dataset's number, and its index there.

    Within a dataset its own order holds. A block of samples is shared out so that each dataset has had its share of all samples up to the block's
    end, to the nearest sample; within the block the datasets are shuffled.

    Args:
        until_last: False: end when the first dataset is used up. True: when the last is; the others begin again.

    Raises:
        DataError: a dataset is empty, or one would be repeated so often that the order does not fit in memory.
    """
    empty = next((number for number, length in enumerate(lengths) if length == 0), None)
    if empty is not None:
        raise DataError(f"basic_parameters.dataset: dataset {empty} of {len(lengths)} is empty: 0 samples, so it cannot be interleaved; remove it")
    needed = max(length / share for length, share in zip(lengths, shares, strict=True))
    if until_last and needed > MOST_SAMPLES:
        raise DataError(f"basic_parameters.interleave_probs: to use up every dataset takes {needed:.0f} samples; raise the smallest share")
    numbers, indices = array("q"), array("q")
    drawn, left = [0] * len(lengths), set(range(len(lengths)))
    planned = [0] * len(lengths)
    block = 0
    while True:
        counts = _counts(shares, planned, (block + 1) * BLOCK)
        planned = [done + count for done, count in zip(planned, counts, strict=True)]
        members = [number for number, count in enumerate(counts) for _ in range(count)]
        for number in (members[place] for place in _order(seed, MIX + block, BLOCK)):
            numbers.append(number)
            indices.append(drawn[number] % lengths[number])
            drawn[number] += 1
            if drawn[number] == lengths[number]:
                left.discard(number)
                if not left or not until_last:
                    return numbers, indices
        block += 1


def _counts(shares: Sequence[float], planned: Sequence[int], total: int) -> list[int]:
    """How many samples each dataset adds to those planned, ``total`` in all: each goes to the dataset that lacks most."""
    lacking = [share * total - done for share, done in zip(shares, planned, strict=True)]
    counts = [0] * len(shares)
    for _ in range(total - sum(planned)):
        number = max(range(len(shares)), key=lacking.__getitem__)
        lacking[number] -= 1
        counts[number] += 1
    return counts
