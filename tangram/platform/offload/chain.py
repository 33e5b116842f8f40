"""Offload of activations: what modules save for their backward pass waits in host memory.

Which tensors go: all that autograd saves within a call, inputs among them, each stretch of memory once. Which stay: parameters; inputs without
gradients, such as masks and rotary tables, which all blocks share; and what is smaller than ``SMALLEST``. Of a module that is recomputed autograd
saves nothing but the inputs, so these alone go.

Calls are chained in the order in which they happen, whatever the modules' names are. A call's tensors leave the device when the next call
but one begins, so copies have a whole call's time and the last two calls, which the backward pass wants first, never leave. When the backward
pass first asks for a tensor of a call, all of the call before it begin to come back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tangram.platform.offload import STAY
from tangram.platform.offload.transfer import Transfer, transfer_of

SMALLEST = 1024
"""Bytes."""


class Stretch:
    """Memory that one or several saved tensors lie in: on the device, on the host, or both."""

    def __init__(self, call: Call, flat: Tensor, transfer: Transfer) -> None:
        self.call, self.transfer, self.device = call, transfer, flat.device
        self.on_device: Tensor | None = flat
        self.on_host, self._done = transfer.to_host(flat)
        self._coming = False

    def leave(self) -> None:
        """The device's own is no longer needed."""
        self.on_device = None

    def come(self) -> None:
        """Begin to copy it back, unless it is there."""
        if self.on_device is None:
            self.on_device, self._done = self.transfer.to_device(self.on_host, self.device)
            self._coming = True

    def value(self) -> Tensor:
        """1-D, on the device, good for use."""
        self.call.wanted()
        self.come()
        if self._coming:
            self.transfer.wait(self._done)
            self._coming = False
        assert self.on_device is not None
        return self.on_device


class Call:
    """One run of a module, from its forward to its backward pass. Only the tensors that it saved keep it alive."""

    def __init__(self, before: Call | None) -> None:
        self.stretches: weakref.WeakValueDictionary[Any, Stretch] = weakref.WeakValueDictionary()
        self._before = None if before is None else weakref.ref(before)

    def wanted(self) -> None:
        """The backward pass has come to this call: the one before is next."""
        before = self._before and self._before()
        self._before = None
        for stretch in list(before.stretches.values()) if before else ():
            stretch.come()

    def leave(self) -> None:
        for stretch in list(self.stretches.values()):
            stretch.leave()


@dataclass(frozen=True)
class Packed:
    """A tensor in a stretch."""

    stretch: Stretch
    shape: torch.Size
    stride: tuple[int, ...]


class Chain:
    """Calls of modules that offload, in the order in which they happen.

    Args:
        transfer_of: the way between a device and the host.
    """

    def __init__(self, transfer_of: Callable[[torch.device], Transfer] = transfer_of) -> None:
        self._transfer_of = transfer_of
        self._transfers: dict[torch.device, Transfer] = {}
        self._recent: deque[weakref.ref[Call]] = deque(maxlen=STAY)

    def begin(self) -> Call:
        """A new call; the oldest of the last ``STAY`` leaves the device."""
        recent = [call() for call in self._recent]
        if len(recent) == STAY and recent[0] is not None:
            recent[0].leave()
        call = Call(recent[-1] if recent else None)
        self._recent.append(weakref.ref(call))
        return call

    def transfer(self, device: torch.device) -> Transfer:
        if device not in self._transfers:
            self._transfers[device] = self._transfer_of(device)
        return self._transfers[device]

    def saving(self, module: nn.Module, inputs: Iterable[Any], gathered: bool = False) -> AbstractContextManager[None]:
        """A call: what autograd saves within waits in host memory. Without gradients nothing is saved, and this is no call.

        Args:
            module: whose parameters and buffers stay.
            inputs: among them the tensors without gradients that stay.
            gathered: its weights may come while it runs, as those of FSDP units within it do.
        """
        if not torch.is_grad_enabled():
            return nullcontext()
        call = self.begin()
        stay = {_memory(leaf) for leaf in inputs if isinstance(leaf, Tensor) and not leaf.requires_grad}
        stay |= set() if gathered else set(map(_memory, _held(module)))

        def pack(tensor: Tensor) -> Tensor | Packed:
            if not _movable(tensor) or _memory(tensor) in stay or (gathered and _memory(tensor) in map(_memory, _held(module))):
                return tensor
            key = (_memory(tensor), tensor.storage_offset(), tensor.numel(), tensor.dtype)
            stretch = call.stretches.get(key)
            if stretch is None:
                flat = tensor.detach().as_strided((tensor.numel(),), (1,))
                stretch = call.stretches[key] = Stretch(call, flat, self.transfer(tensor.device))
            return Packed(stretch, tensor.shape, tensor.stride())

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(saved: Tensor | Packed) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.stretch.value().as_strided(saved.shape, saved.stride)


def _held(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _memory(tensor: Tensor) -> int:
    """Address of the storage; 0 where it has none of its own, as a sharded parameter."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided else 0


def _movable(tensor: Tensor) -> bool:
    """A plain tensor that fills a stretch of memory without gaps or overlaps, in whatever order of dims."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.nbytes < SMALLEST:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
