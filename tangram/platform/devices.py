"""The three platforms: communication backend, device, memory figures, synchronisation."""

from __future__ import annotations

import importlib.util
import resource
import sys
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch


class Platform(Protocol):
    """What the rest of Tangram asks of an accelerator."""

    @property
    def name(self) -> Literal["cpu", "cuda", "npu"]:
        """Also torch's device type."""

    @property
    def communication_backend(self) -> str:
        """Backend of torch.distributed that moves this platform's tensors."""

    @property
    def sum_dtype(self) -> torch.dtype:
        """Widest type that the communication backend sums."""

    def is_available(self) -> bool:
        """Whether this process sees a device of the platform."""

    def device(self, local_rank: int) -> torch.device:
        """Device of process ``local_rank`` of this machine."""

    def use(self, local_rank: int) -> torch.device:
        """Make that device the process's own and return it."""

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""

    def peak_memory(self) -> int:
        """Largest memory held so far, bytes: allocated by torch on an accelerator, resident in the process on cpu."""


class CpuPlatform:
    """Plain processors over gloo."""

    name: Literal["cpu"] = "cpu"
    communication_backend = "gloo"

    @property
    def sum_dtype(self) -> torch.dtype:
        import torch

        return torch.float64

    def is_available(self) -> bool:
        return True

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def use(self, local_rank: int) -> torch.device:
        return self.device(local_rank)

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def peak_memory(self) -> int:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class CudaPlatform:
    """NVIDIA GPUs over NCCL. Not tested: the project's own tests run on cpu."""

    name: Literal["cuda"] = "cuda"
    communication_backend = "nccl"

    @property
    def sum_dtype(self) -> torch.dtype:
        import torch

        return torch.float64

    def is_available(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cuda", local_rank)

    def use(self, local_rank: int) -> torch.device:
        import torch

        torch.cuda.set_device(local_rank)
        return self.device(local_rank)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def peak_memory(self) -> int:
        import torch

        return int(torch.cuda.max_memory_allocated())


class NpuPlatform:
    """Ascend NPUs over HCCL, by torch_npu. Not tested: no such device was at hand.

    megatron-core calls ``torch.cuda`` by name; on an NPU it needs ``torch_npu.contrib.transfer_to_npu``, which ``use`` imports.
    """

    name: Literal["npu"] = "npu"
    communication_backend = "hccl"

    @property
    def sum_dtype(self) -> torch.dtype:
        import torch

        return torch.float32

    def is_available(self) -> bool:
        if importlib.util.find_spec("torch_npu") is None:
            return False
        import torch
        import torch_npu  # noqa: F401  registers torch.npu

        return bool(torch.npu.is_available())  # type: ignore[attr-defined]

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("npu", local_rank)

    def use(self, local_rank: int) -> torch.device:
        import torch
        from torch_npu.contrib import transfer_to_npu  # noqa: F401  maps torch.cuda to torch.npu

        torch.npu.set_device(local_rank)  # type: ignore[attr-defined]
        return self.device(local_rank)

    def synchronize(self) -> None:
        import torch

        torch.npu.synchronize()  # type: ignore[attr-defined]

    def peak_memory(self) -> int:
        import torch

        return int(torch.npu.max_memory_allocated())  # type: ignore[attr-defined]
