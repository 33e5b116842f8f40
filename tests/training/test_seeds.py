"""The seed reaches the generators that callbacks and datasets of users draw from. That two runs draw alike is shown by ``test_deterministic``."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from tangram.training.seeds import seed_process


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def drawn(seed: int, data_parallel_rank: int) -> tuple[float, float]:
    seed_process(seed, data_parallel_rank)
    return random.random(), float(np.random.random())


def test_ranks_of_one_copy_draw_alike_and_others_apart() -> None:
    one = drawn(42, 0)
    assert drawn(42, 0) == one
    others = {drawn(43, 0), drawn(42, 1), drawn(43, 1)}
    assert len(others) == 3 and not {number for pair in others for number in pair} & set(one)
