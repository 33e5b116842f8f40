"""How saved activations travel between a device and the host."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Transfer(Protocol):
    """Copies in both directions. What they return says when a copy is done; ``wait`` takes it."""

    def to_host(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy a 1-D tensor to the host, and give the copy."""

    def to_device(self, flat: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Begin to copy it back to ``device``."""

    def wait(self, done: Any) -> None:
        """Let what the device is given from now on start after that copy."""


class HostTransfer:
    """For tensors that are on the host already: each way is a copy, done at once."""

    def to_host(self, flat: Tensor) -> tuple[Tensor, None]:
        return flat.clone(), None

    def to_device(self, flat: Tensor, device: torch.device) -> tuple[Tensor, None]:
        return flat.clone(), None

    def wait(self, done: None) -> None:
        """It is done."""


class StreamTransfer:
    """For an accelerator: copies from and to pinned memory on a stream of their own, while the device computes.

    Not tested: the project's own tests run on cpu. The order of its calls is tested with a stand-in for this class.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device=device)

    def to_host(self, flat: Tensor) -> tuple[Tensor, torch.Event]:
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        return host, self._copy(host, flat)

    def to_device(self, flat: Tensor, device: torch.device) -> tuple[Tensor, torch.Event]:
        # Made on the computing stream, where it is used and freed; the copy starts when what that memory held before is done with.
        back = torch.empty(flat.shape, dtype=flat.dtype, device=device)
        return back, self._copy(back, flat)

    def wait(self, done: torch.Event) -> None:
        torch.accelerator.current_stream(self.device).wait_event(done)

    def _copy(self, to: Tensor, source: Tensor) -> torch.Event:
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            to.copy_(source, non_blocking=True)
            on_device = source if to.device.type == "cpu" else to
            on_device.record_stream(self.stream)  # its memory is not given out again before this copy is done
            done = torch.Event(device=self.device)
            done.record(self.stream)
        return done


def transfer_of(device: torch.device) -> Transfer:
    """The way between ``device`` and the host."""
    if device.type != "cpu":
        return StreamTransfer(device)
    log.warning("activations are on the host already: offloading them copies them and saves nothing")
    return HostTransfer()
