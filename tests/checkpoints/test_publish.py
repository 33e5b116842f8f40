"""A directory has its final name only once it is complete."""

import signal
import subprocess
import sys

import pytest

from tangram.checkpoints.publish import new_directory, publish, remove_stale, temporary_name, write_text
from tangram.errors import CheckpointError


def write(folder, word):
    (folder / "sub").mkdir()
    (folder / "sub" / "data").write_text(word)


def test_nothing_is_there_until_all_is_there(tmp_path):
    final = tmp_path / "deep" / "step"
    with new_directory(final) as temporary:
        write(temporary, "new")
        assert not final.exists() and temporary.parent == final.parent and temporary.name.startswith("step.tmp-")
    assert (final / "sub" / "data").read_text() == "new"
    assert [path.name for path in final.parent.iterdir()] == ["step"]


def test_a_failure_leaves_what_was_there(tmp_path):
    final = tmp_path / "step"
    with new_directory(final) as temporary:
        write(temporary, "old")
    with pytest.raises(KeyboardInterrupt), new_directory(final, replace=True) as temporary:
        write(temporary, "half")
        raise KeyboardInterrupt
    assert (final / "sub" / "data").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_replacement_takes_the_name_over(tmp_path):
    final = tmp_path / "step"
    for word in ("old", "new"):
        with new_directory(final, replace=True) as temporary:
            write(temporary, word)
    assert (final / "sub" / "data").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_existing_content_is_not_overwritten(tmp_path):
    final = tmp_path / "step"
    final.mkdir()
    with new_directory(final) as temporary:
        write(temporary, "into an empty directory")
    with pytest.raises(CheckpointError, match=r"step: exists already; remove it or write elsewhere"), new_directory(final):
        raise AssertionError("must not get here")


KILLED_AT = """
import os, signal, sys
from pathlib import Path
from tangram.checkpoints import publish as p

final = Path(sys.argv[1])
count = 0

def step(frame, event, arg):
    global count
    if event == "line" and frame.f_code.co_filename == p.__file__:
        count += 1
        if count == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
    return step

sys.settrace(step)
with p.new_directory(final, replace=True) as temporary:
    (temporary / "data").write_text("new")
"""


def test_killed_at_any_line_of_a_replacement_one_complete_directory_is_left(tmp_path):
    # every sixth line, from the first to past the last
    outcomes = set()
    for line in range(1, 200, 6):
        final = tmp_path / str(line) / "step"
        final.mkdir(parents=True)
        (final / "data").write_text("old")
        ended = subprocess.run([sys.executable, "-S", "-c", KILLED_AT, str(final), str(line)], env={"PYTHONPATH": ":".join(sys.path)}, check=False)
        assert ended.returncode in (0, -signal.SIGKILL)
        remove_stale(final)
        assert [path.name for path in final.parent.iterdir()] == ["step"]
        outcomes.add((final / "data").read_text())
        if ended.returncode == 0:
            break
    assert ended.returncode == 0 and outcomes == {"old", "new"}


def test_leftovers_are_removed_and_a_directory_moved_aside_comes_back(tmp_path):
    final = tmp_path / "step"
    for name in ("step.tmp-1", "step.old-2", "other.tmp-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text(name)
    remove_stale(final)
    assert (final / "data").read_text() == "step.old-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.tmp-3", "step"]


def test_several_processes_can_agree_on_a_name(tmp_path):
    temporary = temporary_name(tmp_path / "step", "run7")
    assert temporary == tmp_path / "step.tmp-run7"
    temporary.mkdir()
    publish(temporary, tmp_path / "step")
    assert (tmp_path / "step").is_dir()


def test_a_small_file_is_old_or_new(tmp_path):
    tracker = tmp_path / "latest"
    write_text(tracker, "10")
    write_text(tracker, "20")
    assert tracker.read_text() == "20"
    with pytest.raises(UnicodeEncodeError):
        write_text(tracker, "\ud800")
    assert tracker.read_text() == "20" and len(list(tmp_path.iterdir())) == 1
