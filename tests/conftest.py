"""What all tests share: small checkpoints, one thread, and a time limit per test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.watchdog import Watch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The same examples in every run, and no verdict that depends on how busy the machine is.
settings.register_profile("same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

DEFAULT_TIMEOUT = 300
STILL = 60
"""Seconds without any work of a test or its processes after which it hangs, and fails. The limits are for those that never come to an end."""
LOOK = 5
"""Seconds between two looks at that; a test that is quicker is not looked at."""
LONGEST = ("test_data_paths.py", "test_baselines.py", "test_alignment.py", "test_resume.py")
"""They take more than a minute, so they start first: one worker would still be at them when the others have nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@contextmanager
def _time_limit(item: pytest.Item, phase: str) -> Iterator[None]:
    """SIGALRM raises inside the test, so its own clean-up runs and its processes end."""
    marker = item.get_closest_marker("timeout")
    seconds = int(marker.args[0]) if marker else DEFAULT_TIMEOUT
    begun, watch = time.monotonic(), None

    def look(*_: object) -> None:
        nonlocal watch
        watch = watch or Watch()
        if watch.still() >= STILL:
            pytest.fail(f"{phase} and its processes have done nothing for {STILL} s: they hang", pytrace=True)
        if time.monotonic() >= begun + seconds:
            pytest.fail(f"{phase} took more than {seconds} s", pytrace=True)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, min(LOOK, seconds), LOOK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    with _time_limit(item, "set-up"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    with _time_limit(item, "the test"):
        return (yield)


TinyHF = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> TinyHF:
    """``tiny_hf(family, tied=False, seed=0, **sizes) -> Path``: a random Hugging Face checkpoint, written once per session.

    ``sizes`` are fields of ``TinySpec``. The vocabulary is 160 unless ``vocab`` says otherwise (``vocab=None``: the real one, with
    tokenizer files). Read it only: other tests get the same directory.
    """
    from tangram.families.base import get_family
    from tangram.families.tiny import TinySpec

    written: dict[Any, Path] = {}

    def make(family: str, tied: bool = False, seed: int = 0, **sizes: Any) -> Path:
        spec = TinySpec(**{"vocab": 160, **sizes})
        key = (family, tied, seed, spec)
        if key not in written:
            out = tmp_path_factory.mktemp(family) / "hf"
            get_family(family).tiny(out, seed, tied, spec)
            written[key] = out
        return written[key]

    return make
