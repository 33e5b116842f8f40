"""What the platform says of this machine."""

from __future__ import annotations

import subprocess
import sys

import torch

from tangram.platform import CpuPlatform, NpuPlatform, current


def test_platform_is_cpu_without_an_accelerator() -> None:
    assert (current().name == "cpu") == (not torch.cuda.is_available() and not NpuPlatform().is_available())


def test_cpu_peak_memory_is_in_bytes_and_grows_with_what_is_held() -> None:
    platform = CpuPlatform()
    before = platform.peak_memory()
    held = torch.ones(128 * 2**20, dtype=torch.uint8)
    grown = platform.peak_memory() - before
    assert before > 64 * 2**20 and grown <= 256 * 2**20
    assert platform.peak_memory() >= before and held.numel() == 2**27


def test_cpu_moves_tensors_over_gloo_and_sums_in_double() -> None:
    assert CpuPlatform().communication_backend == "gloo"
    assert CpuPlatform().sum_dtype == torch.float64
    assert CpuPlatform().use(3) == torch.device("cpu")


def test_importing_the_platform_imports_no_torch() -> None:
    code = "import sys, tangram.platform; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=250).returncode == 0
