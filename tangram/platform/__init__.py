"""Which accelerator this process runs on. Imports no torch, so that commands that only parse start fast."""

from __future__ import annotations

from functools import lru_cache

from tangram.platform.devices import CpuPlatform, CudaPlatform, NpuPlatform, Platform


@lru_cache(maxsize=1)
def current() -> Platform:
    """The platform of this process: npu where torch_npu and a device are there, else cuda where torch sees a GPU, else cpu."""
    for platform in (NpuPlatform(), CudaPlatform()):
        if platform.is_available():
            return platform
    return CpuPlatform()


__all__ = ["CpuPlatform", "CudaPlatform", "NpuPlatform", "Platform", "current"]
