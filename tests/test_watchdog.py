"""The watchdog tells processes that hang from those that are slow."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests import conftest
from tests.watchdog import Watch

WORK = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\nprint(flush=True)\ninput()"
CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}])"


def test_work_of_a_childs_child_counts_and_waiting_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        watch = Watch(least=0.1)
        child.stdout.readline()
        assert watch.still() < 0.1
        time.sleep(0.3)
        watch.still()
        assert watch.still() >= 0.3, "neither waiting nor looking is work"
        child.stdin.close()


def test_a_test_that_hangs_fails_although_its_limit_is_far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "STILL", 0.6)
    monkeypatch.setattr(conftest, "LOOK", 0.2)
    said = r"the test and its processes have done nothing for 0\.6 s: they hang"
    with pytest.raises(pytest.fail.Exception, match=said), conftest._time_limit(request.node, "the test"):
        time.sleep(20)
