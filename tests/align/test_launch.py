"""The server that forks the ranks of a comparison: what ends whom, and what a rank is told. Numbers of ``tangram align`` are tested elsewhere."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tangram.align.launch import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "log")
    yield server
    server.kill()


def request(folder: Path, what: str, processes: int = 2, **others: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    fixed = {"module": "tests.align.cases_launch", "preload": [], "log": str(folder / "log"), "environment": dict(os.environ), "folder": str(folder)}
    return {**fixed, "arguments": [str(folder), what], "processes": processes, **others}


def seen(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """What the ranks left, once they all have."""
    while not all((folder / str(rank)).exists() for rank in range(ranks)):
        time.sleep(0.02)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


def ended(process: int) -> bool:
    """Whether it has ended; one whose parent has not asked yet is a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_launches_share_a_server_and_each_has_the_environment_folder_and_log_of_its_own(server: Server, tmp_path: Path) -> None:
    server.start(request(tmp_path / "first", "return", 3))
    assert server.wait() == 0
    server.start(request(tmp_path / "second", "return", 1, environment={**os.environ, "TANGRAM_MARK": "second"}, preload=["no_such_module"]))
    assert server.wait() == 0 and not server.ended()
    first, (second,) = seen(tmp_path / "first", 3), seen(tmp_path / "second", 1)
    assert [one["place"] for one in first] == [[str(rank), "3", "3", "localhost"] for rank in range(3)]
    assert {one["server"] for one in first} == {second["server"]} and len({one["pid"] for one in first}) == 3
    assert (first[0]["mark"], second["mark"]) == (None, "second") and second["folder"] == str(tmp_path / "second")
    assert "No module named 'no_such_module'" in (tmp_path / "second" / "log").read_text() and (tmp_path / "first" / "log").read_text() == ""


@pytest.mark.parametrize(("what", "status"), [("killed", -signal.SIGKILL), ("raises", 1), ("status", 3)])
def test_a_rank_that_fails_ends_the_others_and_the_next_launch_works(what: str, status: int, server: Server, tmp_path: Path) -> None:
    server.start(request(tmp_path / "first", what))
    assert server.wait() == status
    assert all(ended(one["pid"]) for one in seen(tmp_path / "first", 2))
    assert ("ValueError: of this rank alone" in (tmp_path / "first" / "log").read_text()) == (what == "raises")
    server.start(request(tmp_path / "second", "return"))
    assert server.wait() == 0


def test_who_dies_leaves_no_rank_behind(tmp_path: Path) -> None:
    def start_and_wait() -> None:
        server = Server(tmp_path / "log")
        server.start(request(tmp_path / "ranks", "sleeps"))
        server.wait()

    parent = multiprocessing.get_context("fork").Process(target=start_and_wait)
    parent.start()
    ranks = seen(tmp_path / "ranks")
    assert not any(ended(one["pid"]) for one in ranks)
    parent.kill()
    parent.join()
    while not all(ended(process) for one in ranks for process in (one["pid"], one["server"])):
        time.sleep(0.02)


def test_a_server_that_is_killed_is_told_by_its_status(server: Server, tmp_path: Path) -> None:
    server.start(request(tmp_path / "ranks", "sleeps"))
    ranks = seen(tmp_path / "ranks")
    os.kill(ranks[0]["server"], signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL and server.ended()
    server.kill()
    while not all(ended(one["pid"]) for one in ranks):
        time.sleep(0.02)
