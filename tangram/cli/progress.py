"""Progress bars with time left, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


Progress = Callable[[int, int], None]
"""What is done, and all there is."""


@contextmanager
def byte_progress(description: str) -> Iterator[Progress | None]:
    """Yield a function that takes bytes done and bytes in all, or None where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(description, DownloadColumn(), TransferSpeedColumn()) as progress:
        yield progress


@contextmanager
def count_progress(description: str) -> Iterator[Progress | None]:
    """As ``byte_progress``, of things that are counted."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import MofNCompleteColumn

    with _bar(description, MofNCompleteColumn()) as progress:
        yield progress


@contextmanager
def _bar(description: str, *columns: ProgressColumn) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    every = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
    with Bar(*every, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
