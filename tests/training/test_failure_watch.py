"""The watch of ``SharedFailure`` in the process that failed first."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

from tangram.training import failure


class LooksOnce(threading.Event):
    """The watch is past its wait, and about to look, when its own process fails."""

    looks = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.looks += 1
        return self.looks > 1


@pytest.mark.parametrize("own", [True, False])
def test_a_key_of_its_own_does_not_end_the_process_before_it_has_said_what_failed(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(failure, "LEAVE_SECONDS", 0.0)
    watched = failure.SharedFailure()
    watched._store, watched._over = (store := dist.HashStore()), LooksOnce()
    store.add(watched._key, 1)
    if own:
        watched._over.set()
    watched._watch()
    assert ended == ([] if own else [failure.FAILED])
