"""Garbage collection, which is set back, and the peaks of devices."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tangram.platform.peaks import peak_tflops
from tangram.training.collection import GarbageCollection


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
