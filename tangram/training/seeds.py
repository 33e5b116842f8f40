"""The global random generators of a training process."""

from __future__ import annotations

import random

import numpy as np


def seed_process(seed: int, data_parallel_rank: int) -> None:
    """Seed ``random`` and numpy; torch's are the engine's, which knows what its ranks may draw alike.

    Ranks of one copy of the model draw the same numbers. Nothing here draws any; callbacks and datasets of users may. A checkpoint that is loaded
    afterwards brings the states that it was saved with.
    """
    first, second = np.random.SeedSequence([seed, data_parallel_rank]).generate_state(2)
    random.seed(int(first))
    np.random.seed(int(second))
