"""Saving while training goes on: copies in host memory, and a thread that writes them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from tangram.checkpoints.dcp_blocks import BlockTensor, Piece
from tangram.checkpoints.dcp_ranks import distributed
from tangram.checkpoints.dcp_state import LocalState

PATIENCE = timedelta(days=1)
"""Ranks wait for the slowest disk; one that has died is noticed by its closed connection."""


def own_group() -> dist.ProcessGroup | None:
    """A group of all ranks for messages in host memory, apart from those of training; a collective call."""
    return dist.new_group(backend="gloo", timeout=PATIENCE) if distributed() else None


class Staging:
    """Copies of what a save writes, in host memory, which later steps do not touch.

    The memory is kept for the next save: as many bytes as this rank's model and optimizer entries have. Fresh memory would cost more time than
    the copying.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the memory that is kept."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, state: LocalState) -> LocalState:
        """``state`` with its pieces copied; valid until the next call."""
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        tensors = dict(state.tensors)
        for key, tensor in state.tensors.items():
            if not isinstance(tensor, BlockTensor):
                continue  # made for this save
            held = [self._buffer((key, number), piece.data) for number, piece in enumerate(tensor.pieces)]
            sources += [piece.data for piece in tensor.pieces]
            targets += held
            pieces = [Piece(piece.start, buffer) for piece, buffer in zip(tensor.pieces, held, strict=True)]
            tensors[key] = BlockTensor(tuple(tensor.shape), pieces)
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if any(source.device.type != "cpu" for source in sources):
            torch.accelerator.synchronize()
        return LocalState(tensors, dict(state.steps))

    def _buffer(self, key: tuple[str, int], like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type != "cpu")
            self._buffers[key] = buffer
        return buffer


class Background:
    """One task at a time, in a thread that the interpreter waits for when it ends."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._task: Future[object] | None = None

    def start(self, action: Callable[[], object]) -> None:
        """Begin ``action``; the one before must have been waited for."""
        assert self._task is None, "wait() comes first"
        self._task = self._pool.submit(action)

    def failed(self) -> bool:
        """Whether the task has ended with an error, which ``wait`` will raise."""
        return self._task is not None and self._task.done() and self._task.exception() is not None

    def settle(self) -> None:
        """Wait, whatever the outcome."""
        if self._task is not None:
            self._task.exception()

    def wait(self) -> None:
        """Wait for the task, if there is one, and raise what it raised."""
        task, self._task = self._task, None
        if task is not None:
            task.result()
