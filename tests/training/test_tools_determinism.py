"""Deterministic mode and garbage collection: what is set, what is refused, and what is set back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tangram.errors import ConfigError
from tangram.platform.peaks import peak_tflops
from tangram.training.collection import GarbageCollection
from tangram.training.determinism import make_deterministic

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC", "HCCL_DETERMINISTIC")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("cpu", {}),
        ("cuda", {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}),
        ("npu", {"HCCL_DETERMINISTIC": "true"}),
    ],
)
def test_what_each_platform_needs_is_set(platform: str, expected: dict[str, str]) -> None:
    make_deterministic(platform)
    assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == expected
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark


def test_an_environment_that_asks_for_the_opposite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(
        ConfigError, match="deterministic mode needs CUBLAS_WORKSPACE_CONFIG=:4096:8 or :16:8, and the environment has :0:0; remove it"
    ):
        make_deterministic("cuda")


def test_garbage_is_collected_around_a_validation_and_python_decides_again_after_an_error(tmp_path: Path) -> None:
    seen: list[int] = []
    gc.callbacks.append(lambda phase, info: seen.append(info["generation"]) if phase == "start" else None)
    try:
        with pytest.raises(RuntimeError), GarbageCollection(3) as garbage:
            assert not gc.isenabled()
            seen.clear()
            for step in range(1, 8):
                garbage.step(step)
            assert len(seen) == 2
            garbage.collect()
            assert len(seen) == 3
            raise RuntimeError
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("Ascend910B3", "bf16", 313.0),
        ("Ascend910B3", "fp32", None),
        ("NVIDIA GeForce GTX 980", "fp16", None),
    ],
)
def test_peaks_are_those_of_the_makers(name: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(name, dtype) == peak
