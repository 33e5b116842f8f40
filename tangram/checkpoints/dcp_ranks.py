"""Steps that all ranks take together: if one fails, all fail, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from tangram.errors import CheckpointError, TangramError

T = TypeVar("T")


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if distributed() else 1


def together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; a collective call.

    Raises:
        CheckpointError: on every rank, with the first failing rank's message. A fault that is no user error and no I/O error is raised as it
            is on the rank where it happened.
    """
    result, error = _attempt(action)
    if distributed():
        messages: list[str | None] = [None] * world_size()
        _exchange(lambda: dist.all_gather_object(messages, _message(error)))
    else:
        messages = [_message(error)]
    return _agree(result, error, messages)


def on_coordinator(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 and give its result to every rank; a collective call.

    Args:
        group: of all ranks; None: the default one.

    Raises:
        CheckpointError: on every rank, as ``together``.
    """
    result, error = _attempt(action) if rank() == 0 else (None, None)
    outcome = [(result, _message(error))]
    if distributed():
        _exchange(lambda: dist.broadcast_object_list(outcome, src=0, group=group))
    result, message = outcome[0]
    return _agree(result, error, [message])


def gather(value: T) -> list[T]:
    """``value`` of every rank, in order of ranks; a collective call."""
    if not distributed():
        return [value]
    values: list[T] = [value] * world_size()
    _exchange(lambda: dist.all_gather_object(values, value))
    return values


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _message(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, TangramError) else f"{type(error).__name__}: {' '.join(str(error).split())}"


def _exchange(collective: Callable[[], None]) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise lost_contact(error) from error


def lost_contact(error: BaseException) -> CheckpointError:
    """The error of a rank whose neighbours are gone."""
    return CheckpointError(f"rank {rank()} lost contact with another rank ({' '.join(str(error).split())[:200]}); see that rank's log for the cause")


def _agree(result: T | None, error: Exception | None, messages: list[str | None]) -> T:
    if error is not None and not isinstance(error, (TangramError, OSError)):
        raise error
    for number, message in enumerate(messages):
        if message is not None:
            where = f"rank {number}: " if len(messages) > 1 else ""
            raise CheckpointError(f"{where}{message}") from None
    return result  # type: ignore[return-value]
