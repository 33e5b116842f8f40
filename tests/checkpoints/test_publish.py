"""A directory has its final name only once it is complete."""

import signal
import subprocess
import sys

import pytest

from tangram.checkpoints.publish import publish, remove_stale, temporary_name, write_text
from tangram.errors import CheckpointError


def write(folder, word):
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "data").write_text(word)


def test_a_directory_takes_its_name_only_when_it_is_published(tmp_path):
    final = tmp_path / "step"
    temporary = temporary_name(final)
    write(temporary, "new")
    assert not final.exists() and temporary.parent == final.parent and temporary.name.startswith("step.tmp-")
    publish(temporary, final)
    assert (final / "sub" / "data").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_replacement_takes_the_name_over(tmp_path):
    final = tmp_path / "step"
    for word in ("old", "new"):
        write(temporary := temporary_name(final), word)
        publish(temporary, final, replace=True)
    assert (final / "sub" / "data").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_existing_content_is_not_overwritten(tmp_path):
    final = tmp_path / "step"
    final.mkdir()
    write(temporary := temporary_name(final), "into an empty directory")
    publish(temporary, final)
    write(temporary := temporary_name(final), "over it")
    with pytest.raises(CheckpointError, match=r"step: exists already; remove it or write elsewhere"):
        publish(temporary, final)
    assert (final / "sub" / "data").read_text() == "into an empty directory"


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
temporary = p.temporary_name(final)
temporary.mkdir()
(temporary / "data").write_text("new")
p.publish(temporary, final, replace=True)
"""


def test_killed_at_any_line_of_a_replacement_one_complete_directory_is_left(tmp_path):
    # every third line, from the first to past the last
    outcomes = set()
    for line in range(1, 200, 3):
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
