"""Comparisons whose processes are forked from the tests' warm server, not started by torchrun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tangram.align import curves, run
from tangram.align.task import Task, TaskList
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_forked.py")


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    @contextmanager
    def running(tasks: Sequence[Task], work: Path) -> Iterator[None]:
        for task in tasks:
            task.folder.mkdir(parents=True, exist_ok=True)
        (work / "tasks.json").write_text(TaskList(tasks=list(tasks)).model_dump_json(), encoding="utf-8")
        yield

    def finish(_: None, tasks: Sequence[Task], work: Path) -> None:
        on_ranks(TaskList(tasks=list(tasks)).processes, CASES, "work_off", str(work / "tasks.json"))

    with pytest.MonkeyPatch.context() as patch:
        for module in (run, curves):
            patch.setattr(module, "running", running)
            patch.setattr(module, "finish", finish)
        yield
