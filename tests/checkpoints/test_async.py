"""Saves in the background: what they hold, when they appear, and what a kill or a full disk leaves. One process, the toy of the manager's tests."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tangram.checkpoints import dcp_planner
from tangram.checkpoints.dcp_manifest import Manifest, find_checkpoint
from tangram.checkpoints.dcp_planner import write
from tangram.checkpoints.manager import CheckpointManager
from tangram.errors import CheckpointError
from tests.test_dcp_manager import FACTS, TRACKER, concerns, die_at_event, loaded_step, manager, run_killed, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing begins when the event is set."""
    gate = threading.Event()

    def wait_and_write(*args: object) -> None:
        assert gate.wait(200)
        write(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(dcp_planner, "write", wait_and_write)
        yield gate
        gate.set()


def fill(held: CheckpointManager, value: float) -> None:
    """As an optimizer does: in place."""
    with torch.no_grad():
        for _, _, parameters in held.chunks:
            for parameter in parameters.values():
                parameter.fill_(value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_later_steps_do_not_leak_into_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch 145408. The second save reuses the memory of the first."""
    held = manager(1.0, save_async=True)
    for step in (1, 2):
        fill(held, float(step))
        with slow_disk(monkeypatch) as gate:
            held.save(tmp_path, step, 8)
            fill(held, 9.0)
            gate.set()
            held.wait()
        assert loaded_step(tmp_path) == step
    parameters = sum(parameter.nbytes for _, _, each in held.chunks for parameter in each.values())
    assert held.staging is not None and held.staging.nbytes == parameters, "one copy, however many saves"


def test_nothing_is_published_before_the_data_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = manager(1.0, save_async=True, save_total_limit=1)
    held.save(tmp_path, 1, 8)
    held.wait()
    with slow_disk(monkeypatch) as gate:
        fill(held, 2.0)
        final = held.save(tmp_path, 2, 16)
        assert not final.exists() and not held.failed()
        assert (tmp_path / TRACKER).read_text() == "1\n" and loaded_step(tmp_path) == 1
        gate.set()
        held.wait()
    assert names(tmp_path) == ["iter_0000002", TRACKER] and loaded_step(tmp_path) == 2


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ByteDance-Seed/VeOmni 107."""
    held = manager(1.0, save_async=True)
    with slow_disk(monkeypatch) as gate:
        held.save(tmp_path, 1, 8)
        fill(held, 2.0)
        second = threading.Thread(target=held.save, args=(tmp_path, 2, 16))
        second.start()
        time.sleep(0.2)
        assert second.is_alive() and not [path for path in names(tmp_path) if path.startswith("iter_0000002")]
        gate.set()
        second.join(200)
        held.wait()
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", TRACKER] and loaded_step(tmp_path) == 2


def test_a_full_disk_is_an_error_at_the_next_save_and_the_previous_checkpoint_stays(tmp_path: Path) -> None:
    manager(1.0).save(tmp_path, 1, 8)

    def save() -> None:
        held = manager(2.0, save_async=True, save_total_limit=1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
        held.save(tmp_path, 2, 16)
        held.settle()
        assert held.failed()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"iter_0000002.*not saved: rank 0: .*(File too large|enforce fail)"):
            held.save(tmp_path, 3, 24)
        assert not held.failed()
        held.save(tmp_path, 3, 24)  # told once; the disk has room again
        held.wait()

    assert run_killed(save) == 0
    assert names(tmp_path) == ["iter_0000003", TRACKER]


def test_the_interpreter_waits_for_the_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends does not cut off what it was writing."""

    def late(*args: object) -> None:
        time.sleep(0.3)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(dcp_planner, "write", late)
    assert run_killed(lambda: manager(1.0, save_async=True).save(tmp_path, 1, 8)) == 0
    assert loaded_step(tmp_path) == 1


def test_killed_at_random_moments_of_background_saves_a_whole_checkpoint_loads(tmp_path: Path) -> None:
    manager(1.0).save(tmp_path, 1, 8)
    draw = random.Random(7)
    for _ in range(5):
        step = loaded_step(tmp_path)

        def loop(step: int = step) -> None:
            held = manager(0.0, save_async=True, save_total_limit=2)
            for later in range(step + 1, step + 1000):
                fill(held, float(later))
                held.save(tmp_path, later, 8 * later)
                fill(held, -5.0)

        assert run_killed(loop, draw.uniform(0.02, 0.4)) == -signal.SIGKILL
        assert loaded_step(tmp_path) >= step
    manager(2.0, save_total_limit=2).save(tmp_path, 10_000_000, 8)
    assert len(names(tmp_path)) == 3, "two checkpoints and the tracker"


LAST = 14
"""File operations from before the folder gets its name to the removal of the one before; the manager's own tests kill at those before them."""


def test_killed_before_any_of_the_last_file_operations_with_a_limit_of_one_a_whole_checkpoint_loads(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    manager(2.0).save(origin, 2, 16)

    def save(folder: Path) -> None:
        held = manager(3.0, save_async=True, save_total_limit=1)
        held.save(folder, 3, 24)
        held.wait()

    def count() -> None:
        seen: list[str] = []
        shutil.copytree(origin, tmp_path / "counted")
        sys.addaudithook(lambda event, arguments: seen.append(event) if concerns(event, arguments, tmp_path / "counted") else None)
        save(tmp_path / "counted")
        os._exit(len(seen))

    operations = run_killed(count)
    outcomes = []
    for number in range(operations - LAST, operations + 2):
        folder = tmp_path / f"run_{number}"
        shutil.copytree(origin, folder)

        def killed(number: int = number, folder: Path = folder) -> None:
            die_at_event(number, folder)
            save(folder)

        code = run_killed(killed)
        assert code == (0 if number > operations else -signal.SIGKILL)
        outcomes.append(loaded_step(folder))
        manager(4.0, save_total_limit=1).save(folder, 4, 32)
        assert names(folder) == ["iter_0000004", TRACKER]
    assert outcomes[0] == 2 and outcomes[-1] == 3 and outcomes == sorted(outcomes) and 3 in outcomes[:-2]


def test_only_finished_checkpoints_of_the_run_are_counted_and_removed(tmp_path: Path) -> None:
    manager(1.0).save(tmp_path, 1, 8)
    manager(2.0, facts=replace(FACTS, seed=43)).save(tmp_path, 2, 16)  # another run's
    imported = tmp_path / "iter_0000003"
    shutil.copytree(tmp_path / "iter_0000001", imported)
    (imported / "manifest.json").write_text(Manifest.imported("qwen2_5_vl", FACTS.topology, {}).text())
    (tmp_path / "iter_0000004").mkdir()  # unfinished, or someone's
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "iter_0000005")  # a copy under another number
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "best")
    manager(9.0).save(tmp_path, 9, 72)
    foreign = names(tmp_path)
    held = manager(6.0, save_total_limit=2)
    held.load(tmp_path / "iter_0000001")
    for step in (6, 7):
        fill(held, float(step))
        held.save(tmp_path, step, 8 * step)
    assert sorted([*foreign, "iter_0000006", "iter_0000007"]) == sorted([*names(tmp_path), "iter_0000001"]), "that resumed from, once it is the third"
    assert find_checkpoint(tmp_path).name == "iter_0000007" and values(held) == {7.0}
