"""Faults that a user can mend.

Every message is one line: what is wrong, where (file, key, sample id or tensor name), the numbers, and the mend. The command line
prints it without a stack trace and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TangramError(ValueError):
    """Base of all faults that the user can mend."""


class ConfigError(TangramError):
    """A configuration value, flag or file that cannot be used as it stands."""


class PlacementError(TangramError):
    """Weights that do not fit the split: missing, extra, overlapping or of another shape."""


class CheckpointError(TangramError):
    """A checkpoint directory that is missing, incomplete, damaged or of another model or split."""


class DataError(TangramError):
    """A dataset, sample or media file that cannot be used."""


class DivergedError(TangramError):
    """Training that changes no weight, since losses or gradients are not finite."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest of ``known``, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def name_some(names: Iterable[str], limit: int = 8) -> str:
    """Return the first ``limit`` names, sorted, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
