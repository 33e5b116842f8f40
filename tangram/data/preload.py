"""Steps read one ahead, in a thread, while the step before them runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Preloaded(Iterable[T]):
    """The items of ``source``, the next of which is read while the last one is used.

    What ``source`` raises is raised here, in its turn. A thread that is still reading when the iteration is given up ends after the item at hand.
    """

    def __init__(self, source: Iterable[T]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[T]:
        items: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(maxsize=1)
        given_up = threading.Event()
        threading.Thread(target=self._read, args=(items, given_up), daemon=True).start()
        try:
            while True:
                good, item = items.get()
                if not good:
                    if item is None:
                        return
                    assert isinstance(item, BaseException)
                    raise item
                yield item  # type: ignore[misc]
        finally:
            given_up.set()

    def _read(self, items: queue.Queue[tuple[bool, T | BaseException | None]], given_up: threading.Event) -> None:
        def put(good: bool, item: T | BaseException | None) -> bool:
            while not given_up.is_set():
                try:
                    items.put((good, item), timeout=0.2)
                    return True
                except queue.Full:
                    continue
            return False

        source = iter(self.source)
        try:
            while not given_up.is_set():
                try:
                    item = next(source)
                except StopIteration:
                    put(False, None)
                    return
                if not put(True, item):
                    return
        except BaseException as error:
            put(False, error)
        finally:
            close = getattr(source, "close", None)
            if close is not None:
                close()
