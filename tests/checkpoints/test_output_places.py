"""Where a conversion may write: names that no finished directory can take are refused before the first byte, and what is not ours stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tangram.checkpoints.engine import SLAB, PlannedFile, PlannedTensor, write_files
from tangram.checkpoints.publish import require_new
from tangram.checkpoints.reader import TensorInfo
from tangram.checkpoints.resume import resumable_directory
from tangram.checkpoints.writing import WriteSettings
from tangram.cli.mm_convert import main
from tangram.errors import CheckpointError


def convert(hf, out):
    return main(["HFConverter", "hf_to_mm", "--cfg.hf_config.hf_dir", str(hf), "--cfg.mm_dir", str(out)])


@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_a_link_is_not_replaced(target, kit, tmp_path, capsys):
    hf = kit.write_hf(tmp_path / "hf")
    (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to(target)
    assert convert(hf, tmp_path / "out") == 1
    assert "out: is a link, which the finished directory cannot replace; give the name of a new directory" in capsys.readouterr().err
    assert (tmp_path / "out").is_symlink() and not (tmp_path / "out.partial").exists()


def test_the_current_directory_is_not_replaced(kit, tmp_path, capsys, monkeypatch):
    hf = kit.write_hf(tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert convert(hf, ".") == 1
    assert ".: is the current directory, which the finished directory cannot replace" in capsys.readouterr().err


def empty_mounts():
    mounts = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines()]
    return [path for path in mounts if path.is_dir() and os.access(path, os.R_OK) and not any(path.iterdir())]


@pytest.mark.skipif(not empty_mounts(), reason="no empty file system is mounted here")
def test_a_mount_point_is_not_replaced():
    with pytest.raises(CheckpointError, match="is a mount point, which the finished directory cannot replace"):
        require_new(empty_mounts()[0])


def test_a_name_that_is_too_long_is_one_line(kit, tmp_path, capsys):
    assert convert(kit.write_hf(tmp_path / "hf"), tmp_path / ("x" * 300)) == 1
    error = capsys.readouterr().err
    assert "File name too long" in error and error.count("\n") == 1


def test_a_partial_directory_of_other_origin_is_left_alone(kit, tmp_path, capsys):
    hf, foreign = kit.write_hf(tmp_path / "hf"), tmp_path / "mm.partial"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    assert convert(hf, tmp_path / "mm") == 1
    assert "mm.partial: holds thesis.tex, which no conversion put there; move the directory away" in capsys.readouterr().err
    assert kit.files(foreign) == ["thesis.tex"]


def test_folders_that_were_made_on_the_way_go_with_a_failure(tmp_path):
    (tmp_path / "kept").mkdir()
    with pytest.raises(ZeroDivisionError), resumable_directory(tmp_path / "kept" / "a" / "b" / "out"):
        raise ZeroDivisionError
    assert list(tmp_path.rglob("*")) == [tmp_path / "kept"]


@pytest.mark.parametrize("command", ["hf_to_mm", "hf_to_dcp"])
def test_a_second_command_waits_for_no_one_and_harms_no_one(command, kit, tmp_path, capsys):
    hf = kit.write_hf(tmp_path / "hf")
    words = {"hf_to_mm": ["--cfg.hf_config.hf_dir", str(hf), "--cfg.mm_dir"], "hf_to_dcp": ["--hf_dir", str(hf), "--dcp_dir"]}[command]
    with resumable_directory(tmp_path / "out") as journal:
        (journal.folder / "data").write_text("first")
        assert main(["HFConverter", command, *words, str(tmp_path / "out")]) == 1
        assert "out: another process is writing it; wait for it, or write elsewhere" in capsys.readouterr().err
    assert kit.files(tmp_path / "out") == ["data"]


def test_a_failure_ends_the_other_workers_at_their_next_slab(tmp_path):
    """One tensor of 32 slabs, and one that fails as soon as the other has begun."""
    begun = []

    def fetch(start, shape, buffer):
        begun.append(start)
        return buffer.zero_()

    def fail(start, shape, buffer):
        while not begun:
            pass
        raise CheckpointError("damaged")

    infos = TensorInfo((32 * SLAB,), torch.uint8), TensorInfo((4,), torch.uint8)
    tensors = (PlannedTensor("large", 0, infos[0], fetch), PlannedTensor("bad", infos[0].nbytes, infos[1], fail))
    file = PlannedFile("f", infos[0].nbytes + 4, tensors, lambda _: [])
    with pytest.raises(CheckpointError, match="damaged"):
        write_files(tmp_path / "out", [file], None, WriteSettings(workers=2))
    assert len(begun) < 16


@pytest.mark.parametrize("closed", [1, 2])
def test_closed_output_is_no_fault(closed, kit, tmp_path):
    """As ``mm-convert ... >&-``."""
    code = "import sys\nfrom tangram.cli.mm_convert import main\nsys.exit(main(sys.argv[1:]))"
    words = ["HFConverter", "hf_to_mm", "--cfg.hf_config.hf_dir", str(kit.write_hf(tmp_path / "hf")), "--cfg.mm_dir", str(tmp_path / "mm")]
    command = [sys.executable, "-c", code, *words]
    ended = subprocess.run(["bash", "-c", f'"$@" {closed}>&-', "-", *command], capture_output=True, text=True, timeout=250)
    assert (ended.returncode, ended.stderr) == (0, "") and (tmp_path / "mm" / "release").is_dir()
