"""A conversion that was killed goes on where it was."""

import json
import multiprocessing
import os
import shutil
import signal

import pytest
import torch

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.resume import resumable_directory
from tangram.errors import CheckpointError, PlacementError

SPLIT = {"tp_size": 2, "llm_pp_layers": [1, 3]}


@pytest.fixture(scope="module")
def made(kit, tmp_path_factory):
    """A model and its uninterrupted conversion."""
    folder = tmp_path_factory.mktemp("resume")
    hf = kit.write_hf(folder / "hf")
    kit.to_mm(hf, folder / "mm", **SPLIT)
    return hf, folder / "mm"


def killed_at(write, convert):
    """Run ``convert`` in a process that ends itself by SIGKILL instead of the given write."""

    def child():
        real, count = os.pwrite, 0

        def pwrite(*args):
            nonlocal count
            count += 1
            if count == write:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        os.pwrite = pwrite
        convert()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def finished(partial):
    """Files that the journal names: path -> number on the disk and time."""
    lines = [json.loads(line) for line in (partial / "journal").read_text().splitlines()]
    return {line["file"]: facts(partial / "tree" / line["file"]) for line in lines[1:]}


def facts(file):
    return file.stat().st_ino, file.stat().st_mtime_ns


def contents(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def count_writes(convert, monkeypatch):
    real, calls = os.pwrite, []
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *args: (calls.append(1), real(*args))[1])
        convert()
    return len(calls)


def test_killed_anywhere_a_rerun_keeps_what_was_finished_and_gives_the_same(kit, made, tmp_path, monkeypatch):
    hf, reference = made
    writes = count_writes(lambda: kit.to_mm(hf, tmp_path / "counted", **SPLIT), monkeypatch)
    kept = set()
    for part in (0.01, 0.3, 0.6, 0.95):
        out = tmp_path / f"at{part}"
        killed_at(max(1, int(writes * part)), lambda out=out: kit.to_mm(hf, out, **SPLIT))
        partial = tmp_path / f"at{part}.partial"
        assert partial.is_dir() and not out.exists()
        before = finished(partial)
        kit.to_mm(hf, out, **SPLIT)
        assert {name: facts(out / name) for name in before} == before
        assert contents(out) == contents(reference) and not partial.exists()
        kept.add(len(before))
    assert min(kept) == 0 and max(kept) >= 2


def test_an_export_goes_on_too(kit, made, tmp_path, monkeypatch):
    hf, mm = made
    shutil.copytree(hf, tmp_path / "hf")
    kit.shard(tmp_path / "hf", 5)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    writes = count_writes(lambda: kit.to_hf(mm, tmp_path / "hf", tmp_path / "reference"), monkeypatch)
    killed_at(int(writes * 0.7), lambda: kit.to_hf(mm, tmp_path / "hf", tmp_path / "out"))
    before = finished(tmp_path / "out.partial")
    assert 0 < len(before) < 5
    kit.to_hf(mm, tmp_path / "hf", tmp_path / "out")
    assert {name: facts(tmp_path / "out" / name) for name in before} == before
    assert contents(tmp_path / "out") == contents(tmp_path / "reference")


@pytest.fixture
def stopped(kit, made, tmp_path, monkeypatch):
    """What a late kill leaves."""
    hf, _ = made
    shutil.copytree(hf, tmp_path / "hf")
    convert = lambda: kit.to_mm(tmp_path / "hf", tmp_path / "mm", **SPLIT)  # noqa: E731
    writes = count_writes(lambda: kit.to_mm(hf, tmp_path / "counted", **SPLIT), monkeypatch)
    killed_at(int(writes * 0.95), convert)
    assert finished(tmp_path / "mm.partial")
    return tmp_path / "hf", tmp_path / "mm", tmp_path / "mm.partial"


@pytest.mark.parametrize("place", ["tensor", "header", "length"])
def test_a_finished_file_that_was_damaged_since_is_written_again(place, stopped, made, kit):
    hf, mm, partial = stopped
    file = partial / "tree" / next(iter(finished(partial)))
    content = bytearray(file.read_bytes())
    if place == "length":
        content += b"x"
    else:
        content[len(content) // 2 if place == "tensor" else 40] ^= 1
    file.write_bytes(content)
    kit.to_mm(hf, mm, **SPLIT)
    assert contents(mm) == contents(made[1])


def test_nothing_is_kept_from_another_split(stopped, kit, tmp_path):
    hf, mm, _ = stopped
    kit.to_mm(hf, mm, tp_size=1, llm_pp_layers=[1, 3])
    kit.to_mm(hf, tmp_path / "fresh", tp_size=1, llm_pp_layers=[1, 3])
    assert contents(mm) == contents(tmp_path / "fresh")
    assert kit.files(mm) == kit.files(tmp_path / "fresh")


def test_nothing_is_kept_from_other_weights_of_the_same_shapes(stopped, kit, tmp_path):
    hf, mm, _ = stopped
    shutil.rmtree(hf)
    kit.write_hf(hf, seed=1)
    kit.to_mm(hf, mm, **SPLIT)
    kit.to_mm(hf, tmp_path / "fresh", **SPLIT)
    assert contents(mm) == contents(tmp_path / "fresh")


def test_a_journal_cut_off_in_a_line_still_counts(stopped, made, kit):
    hf, mm, partial = stopped
    before = finished(partial)
    with (partial / "journal").open("a") as file:
        file.write('{"file": "release/mp_')
    kit.to_mm(hf, mm, **SPLIT)
    assert {name: facts(mm / name) for name in before} == before and contents(mm) == contents(made[1])


def test_an_error_on_the_second_run_removes_the_first_runs_files(stopped, kit, tmp_path):
    hf, mm, partial = stopped
    kit.edit(hf, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(PlacementError):
        kit.to_mm(hf, mm, **SPLIT)
    assert partial.exists()  # refused before it came to writing
    kit.edit(hf, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(320, 32)}))
    with pytest.raises(CheckpointError, match="exists already"), resumable_directory(mm) as journal:
        (journal.folder / "half").write_text("")
        mm.mkdir()
        (mm / "else").write_text("")
    assert not partial.exists()


def test_two_at_once_are_refused(made, kit, tmp_path):
    hf, _ = made
    with resumable_directory(tmp_path / "mm") as journal:
        (journal.folder / "data").write_text("first")
        with pytest.raises(CheckpointError, match=r"mm: another process is writing it; wait for it, or write elsewhere"):
            kit.to_mm(hf, tmp_path / "mm")
    assert contents(tmp_path / "mm") == {"data": b"first"}


def test_an_identity_follows_the_files(made, kit, tmp_path):
    shutil.copytree(made[0], tmp_path / "hf")
    first = HFDirectory(tmp_path / "hf").identity
    assert HFDirectory(tmp_path / "hf").identity == first
    os.utime(tmp_path / "hf" / "model.safetensors", (1, 1))
    assert HFDirectory(tmp_path / "hf").identity != first
