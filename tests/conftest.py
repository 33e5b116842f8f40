"""What all tests share: small checkpoints, one thread, and a time limit per test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The same examples in every run, and no verdict that depends on how busy the machine is.
settings.register_profile("same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")

DEFAULT_TIMEOUT = 300
LONGEST = ("test_data_paths.py", "test_topologies.py", "test_alignment.py", "test_resume.py")
"""They take more than a minute, so they start first: one worker would still be at them when the others have nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@contextmanager
def _time_limit(item: pytest.Item, phase: str) -> Iterator[None]:
    """SIGALRM raises inside the test, so its own clean-up runs and its processes end."""
    marker = item.get_closest_marker("timeout")
    seconds = int(marker.args[0]) if marker else DEFAULT_TIMEOUT

    def expire(*_: object) -> None:
        pytest.fail(f"{phase} took more than {seconds} s", pytrace=True)

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
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
