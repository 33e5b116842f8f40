"""Saving that no crash can spoil, and loading that refuses what does not fit. One process, the ends of the toy model's text decoder."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tangram.checkpoints.dcp_manifest import Manifest, RunFacts, is_training_checkpoint
from tangram.checkpoints.dcp_reader import DCPReader
from tangram.checkpoints.manager import CheckpointManager
from tangram.errors import CheckpointError
from tangram.placement.blocks import canonical_shapes, place
from tests import dcp_toy

FORK = multiprocessing.get_context("fork")
FACTS = RunFacts("qwen2_5_vl", dcp_toy.split(), 1, {"vocab_size": 37}, "tok-1", "data-1", 42, {"lr": 0.1, "train_iters": 6})
RULES = [rule for rule in dcp_toy.table(dcp_toy.split(), True) if rule.component == "text" and rule.place != "layer"]
EMBEDDING = "model.language_model.embed_tokens.weight"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def manager(value: float = 0.0, dtype: torch.dtype = torch.float32, facts: RunFacts = FACTS, **options: bool) -> CheckpointManager:
    """A model all of whose parameters are ``value``."""
    placement = place(RULES, dcp_toy.split(), 0, dcp_toy.split().chunk(0))
    parameters = {name: torch.nn.Parameter(torch.full(tensor.shape, value, dtype=dtype)) for name, tensor in placement.tensors.items()}
    return CheckpointManager(facts, [(placement.chunk, placement, parameters)], canonical_shapes(RULES, dcp_toy.split()), **options)


def values(held: CheckpointManager) -> set[float]:
    return {float(number) for _, _, parameters in held.chunks for parameter in parameters.values() for number in parameter.detach().unique()}


def loaded_step(folder: Path) -> int:
    """Load the newest; every element must be the step it was saved at."""
    target = manager(-1.0)
    step = target.load(folder).step
    assert values(target) == {float(step)} or values(target) == {step + 0.5}
    return step


def run_killed(action: Callable[[], None], seconds: float | None = None) -> int:
    """Run ``action`` in a forked process, kill it after ``seconds`` where given, and return its exit code."""
    child = FORK.Process(target=action)
    child.start()
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child.pid or 0, signal.SIGKILL)
    child.join(200)
    if child.exitcode is None:
        child.kill()  # the interpreter would wait for it at its end
        pytest.fail("the forked process hangs; a process group of this process that it inherited would do that")
    return child.exitcode


FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree")


def concerns(event: str, arguments: tuple[object, ...], folder: Path) -> bool:
    """Whether an audit event is an operation on a file or folder below ``folder``."""
    return event in FILE_EVENTS and str(arguments[0]).startswith(str(folder))


def die_at_event(number: int, folder: Path) -> None:
    """SIGKILL this process just before its ``number``-th operation on a file or folder below ``folder``."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if concerns(event, arguments, folder):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("step", [2, 3], ids=["replacing the newest", "a new one"])
def test_killed_before_any_file_operation_of_a_save_the_previous_or_the_new_one_loads(tmp_path: Path, step: int) -> None:
    origin = tmp_path / "origin"
    manager(1.0).save(origin, 1, 8)
    manager(2.0).save(origin, 2, 16)
    outcomes = []
    for number in range(1, 200):
        folder = tmp_path / f"run_{number}"
        shutil.copytree(origin, folder)

        def save(number: int = number, folder: Path = folder) -> None:
            die_at_event(number, folder)
            manager(step + 0.5).save(folder, step, 8 * step)

        code = run_killed(save)
        outcomes.append(loaded_step(folder))
        manager(4.0).save(folder, 4, 32)  # the next save cleans up
        left = {path.name for path in folder.iterdir()} - {f"iter_{n:07}" for n in (1, 2, 3, 4)}
        assert left == {"latest_checkpointed_iteration.txt"}
        shutil.rmtree(folder)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert number > 20, "the save has many file operations"
    assert outcomes[-1] == step and set(outcomes) <= {2, step}


def test_killed_at_random_moments_of_a_save_loop_a_whole_checkpoint_loads(tmp_path: Path) -> None:
    manager(1.0).save(tmp_path, 1, 8)
    rng = random.Random(3)
    for _ in range(6):
        step = loaded_step(tmp_path)

        def loop(step: int = step) -> None:
            for later in range(step + 1, step + 1000):
                manager(float(later)).save(tmp_path, later, 8 * later)

        assert run_killed(loop, rng.uniform(0.02, 0.6)) == -signal.SIGKILL
        assert loaded_step(tmp_path) >= step


def test_every_file_is_flushed_before_the_folder_gets_its_name_and_the_tracker_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    final = manager(1.0).save(tmp_path, 1, 8)
    temporary_parent = {Path(path).name for path in flushed if ".tmp-" in Path(path).parent.name}
    assert temporary_parent >= {path.name for path in final.iterdir()} == {".metadata", "__0_0.distcp", "manifest.json"}
    assert flushed.index(str(tmp_path)) < max(i for i, path in enumerate(flushed) if TRACKER in path), "the folder's new name, then the tracker"


TRACKER = "latest_checkpointed_iteration.txt"


def test_a_full_disk_fails_the_save_and_leaves_the_previous_one(tmp_path: Path) -> None:
    manager(1.0).save(tmp_path, 1, 8)

    def save() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
        with pytest.raises(CheckpointError, match=r"iter_0000002.*not saved: rank 0: .*(File too large|enforce fail)"):
            manager(2.0).save(tmp_path, 2, 16)

    assert run_killed(save) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", TRACKER]
    assert loaded_step(tmp_path) == 1


def test_an_incomplete_folder_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    manager(2.0).save(tmp_path, 2, 16)
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000003.tmp-dead").mkdir()
    (tmp_path / "iter_0000003.tmp-dead" / "__0_0.distcp").write_bytes(b"half")
    manager(4.0).save(tmp_path, 4, 32)
    assert loaded_step(tmp_path) == 4
    assert not (tmp_path / "iter_0000003.tmp-dead").exists()


def test_the_position_extra_data_and_facts_come_back(tmp_path: Path) -> None:
    folder = manager(1.0).save(tmp_path, 7, 56, {"skipped": 2, "best": 0.25})
    resumed = manager().load(folder)
    assert (resumed.step, resumed.consumed_samples, resumed.extra) == (7, 56, {"skipped": 2, "best": 0.25})
    written = json.loads((folder / "manifest.json").read_text())
    ways = {"ring": 1, "expert": 1, "sequence_parallel": False, "vision_balance": False}
    sizes = {"tensor": 1, "pipeline": 1, "virtual": 1, "data_parallel": 1, "vit_pp_layers": [[2]], "llm_pp_layers": [[4]]}
    assert written["split"] == {**sizes, **ways}
    # A manifest of before the last four were told says nothing against it.
    manifest = Manifest.of(FACTS, step=1, consumed_samples=1, optimizer=True, rng=True, grad_scaler={}, extra={})
    assert FACTS.has_ranks_of(manifest) and FACTS.has_ranks_of(replace(manifest, split=sizes))
    assert not FACTS.has_ranks_of(replace(manifest, split={**manifest.split, "expert": 2}))
    assert written["hf_config"] == {"vocab_size": 37} and written["packages"]["torch"] == torch.__version__.split("+")[0] + torch.__version__[6:]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nope", "no such folder"),
        (lambda p: (p / "file").write_text("x") and p / "file", "is a file; a checkpoint is a folder"),
        (lambda p: p, "is empty"),
        (lambda p: (p / TRACKER).write_text("release") and p, "says 'release', which is no step of a training checkpoint"),
        (lambda p: (p / TRACKER).write_text("12") and p, "names step 12, but .*iter_0000012 is missing"),
        (lambda p: (p / "notes.txt").write_text("x") and p, "holds no training checkpoint"),
    ],
    ids=["missing", "file", "empty", "mp_rank", "lost", "other"],
)
def test_a_wrong_path_is_refused(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    path = make(tmp_path)
    assert not is_training_checkpoint(path) or "12" in message
    with pytest.raises(CheckpointError, match=message):
        manager().load(path)


def test_without_a_tracker_the_finished_ones_are_named(tmp_path: Path) -> None:
    manager().save(tmp_path, 3, 24)
    assert is_training_checkpoint(tmp_path) and is_training_checkpoint(tmp_path / "iter_0000003")
    (tmp_path / TRACKER).unlink()
    with pytest.raises(CheckpointError, match="finished checkpoints in it: iter_0000003; name one of them"):
        manager().load(tmp_path)


def spoil(folder: Path, name: str, change: Callable[[bytes], bytes | None]) -> None:
    path = folder / name
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (".metadata", lambda b: None, "no training checkpoint there|.metadata is missing"),
        (".metadata", lambda b: b[:-200], ".metadata: damaged"),
        (".metadata", lambda b: pickle.dumps(os.system), "refers to posix.system, which no training checkpoint needs; it was not written by"),
        (".metadata", lambda b: b"cpathlib\nos.getcwd\n.", "metadata: refers to pathlib.os.getcwd"),
        ("__0_0.distcp", lambda b: None, "not loaded: rank 0: FileNotFoundError.*__0_0.distcp'; a file is missing"),
        ("__0_0.distcp", lambda b: b[: len(b) // 2], r"not loaded: .*__0_0.distcp: damaged between bytes \d+ and \d+: "),
        ("manifest.json", lambda b: b[:40], "manifest.json: damaged"),
        ("manifest.json", lambda b: b.replace(b'"format_version": 1', b'"format_version": 9'), "format version 9, this Tangram reads 1"),
        ("manifest.json", lambda b: b.replace(b'"seed"', b'"sede"'), "keys sede, seed are missing or unknown"),
        ("manifest.json", lambda b: b.replace(b'"step": 1,', b'"step": "1",'), "damaged: step is '1', expected a whole number; use another"),
        ("manifest.json", lambda b: b.replace(b'"step": 1,', b'"step": -1,'), "damaged: step is -1, expected a whole number"),
        ("manifest.json", lambda b: b.replace(b'"step": 1,', b'"step": true,'), "damaged: step is True, expected a whole number"),
        ("manifest.json", lambda b: b.replace(b'"consumed_samples": 8', b'"consumed_samples": 8.5'), "consumed_samples is 8.5, expected a whole"),
        ("manifest.json", lambda b: b.replace(b'"rng": true', b'"rng": 1'), "damaged: rng is 1, expected true or false"),
        ("manifest.json", lambda b: b.replace(b'"extra": {}', b'"extra": []'), r"damaged: extra is \[\], expected a mapping"),
        ("manifest.json", lambda b: b"[" * 100_000, "manifest.json: damaged"),
        ("manifest.json", lambda b: b"[]", "format version None"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str, change: Callable[[bytes], bytes | None], message: str) -> None:
    folder = manager().save(tmp_path, 1, 8)
    spoil(folder, name, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        manager().load(folder)
    assert "\n" not in str(caught.value)


def test_the_reader_names_a_damaged_file(tmp_path: Path) -> None:
    folder = manager().save(tmp_path, 1, 8)
    spoil(folder, "__0_0.distcp", lambda content: content[:100])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: damaged between bytes \d+ and \d+: "):
        DCPReader(folder).read(EMBEDDING, (0, 0), (1, 1))
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="a file is missing or damaged"):
        DCPReader(folder).read(EMBEDDING, (0, 0), (1, 1))


def flipped(content: bytes, position: int, bit: int = 0) -> bytes:
    return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


def test_one_wrong_bit_among_the_numbers_is_found_by_trainer_and_reader(tmp_path: Path) -> None:
    """torch.load does not look at the checksums of its own files: 1.0 would silently become another number."""
    folder = manager(1.0).save(tmp_path, 1, 8)
    ones = torch.ones(37 * 16).numpy().tobytes()
    position = (folder / "__0_0.distcp").read_bytes().find(ones) + 4 * 37 + 2
    assert position > 4 * 37 + 2, "the embedding, 37 by 16, stands there as it is"
    spoil(folder, "__0_0.distcp", lambda content: flipped(content, position))
    target = manager(-1.0)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: damaged between bytes \d+ and \d+: .*does not have its checksum; use another"):
        target.load(folder)
    with pytest.raises(CheckpointError, match="does not have its checksum"):
        DCPReader(folder).read(EMBEDDING, (0, 0), (37, 16))


def test_a_wrong_bit_anywhere_is_told_or_does_no_harm(tmp_path: Path) -> None:
    """In the metadata, a pickle, it can raise anything; in either file it must never change what is read."""
    folder = manager(1.0).save(tmp_path, 1, 8)
    draw = random.Random(5)
    expected = {key: tuple(shape) for key, shape in manager().shapes.items()}
    told = 0
    for name, count in ((".metadata", 150), ("__0_0.distcp", 60)):
        whole = (folder / name).read_bytes()
        for _ in range(count):
            (folder / name).write_bytes(flipped(whole, draw.randrange(len(whole)), draw.randrange(8)))
            try:
                reader = DCPReader(folder)
                shapes = {key: info.shape for key, info in reader.names().items()}
                numbers = {float(n) for key, shape in shapes.items() for n in reader.read(key, (0,) * len(shape), shape).unique()}
                assert sorted(shapes.values()) == sorted(expected.values()) and numbers == {1.0}
                if shapes != expected:  # a name that is wrong throughout
                    manager(-1.0).load(folder)
                    pytest.fail("loaded under a wrong name")
            except CheckpointError as error:
                assert "\n" not in str(error)
                told += 1
        (folder / name).write_bytes(whole)
    assert told > 50


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Store other entries, through DCP itself."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state: dict[str, torch.Tensor] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for key, entry in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=folder)
    change(state)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, overwrite=True))


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update({"model.model.extra.weight": torch.ones(2)}), "1 unexpected: model.extra.weight"),
        (lambda s: s.pop(f"model.{EMBEDDING}"), f"1 missing: {EMBEDDING}"),
        (lambda s: s.update({f"model.{EMBEDDING}": torch.ones(38, 16)}), r"has shape \(38, 16\), this model \(37, 16\)"),
        (lambda s: s.update({f"model.{EMBEDDING}": torch.ones(37, 16).bfloat16()}), "stored as torch.bfloat16, this run holds torch.float32"),
        (lambda s: s.update({"optimizer.exp_avg.gone": torch.ones(2)}), "1 without a parameter: exp_avg of gone"),
        (lambda s: s.update({"stray": torch.ones(2)}), "unexpected entry 'stray'"),
    ],
    ids=["extra", "missing", "shape", "dtype", "moment", "key"],
)
def test_entries_are_compared_both_ways(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str) -> None:
    folder = manager(3.0).save(tmp_path, 1, 8)
    rewrite(folder, change)
    target = manager(-1.0)
    with pytest.raises(CheckpointError, match=message):
        target.load(folder)
    assert values(target) == {-1.0}, "nothing was written"


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_weights_of_a_run_that_diverged_are_refused(tmp_path: Path) -> None:
    folder = manager(3.0).save(tmp_path, 1, 8)
    rewrite(folder, lambda state: state[f"model.{EMBEDDING}"].view(-1)[7:9].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=f"2 of 592 elements of model.{EMBEDDING} on this rank are NaN or infinite; the run that saved it"):
        manager().load(folder)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (replace(FACTS, family="qwen2_vl"), "family 'qwen2_5_vl', this run trains 'qwen2_vl'"),
        (replace(FACTS, tokenizer_hash="tok-2"), "its tokenizer is tok-1, this run's is tok-2"),
        (replace(FACTS, dataset_fingerprint="data-2"), r"its dataset is data-1, this run's is data-2; step 1 \(sample 8\)"),
        (replace(FACTS, seed=43), "its seed is 42, this run's is 43"),
    ],
    ids=["family", "tokenizer", "dataset", "seed"],
)
def test_another_run_is_refused(tmp_path: Path, facts: RunFacts, message: str) -> None:
    manager().save(tmp_path, 1, 8)
    with pytest.raises(CheckpointError, match=message):
        manager(facts=facts).load(tmp_path)


def test_a_changed_schedule_and_random_state_that_does_not_fit_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager().save(tmp_path, 1, 8)
    other = replace(FACTS, schedule={"lr": 0.1, "train_iters": 12}, data_parallel=2)
    with caplog.at_level(logging.WARNING):
        manager(facts=other).load(tmp_path)
    text = caplog.text
    assert "train_iters was 6, is 12; the new one is used" in text
    assert "random state not restored: the split is another one" in text
    caplog.clear()
    manager(no_save_rng=True).save(tmp_path, 2, 16)
    with caplog.at_level(logging.WARNING):
        manager().load(tmp_path)
        assert "random state not restored: none was saved" in caplog.text
        caplog.clear()
        manager(no_load_rng=True).load(tmp_path)
        assert caplog.text == ""


def test_random_state_goes_on_where_it_stopped_unless_told_otherwise(tmp_path: Path) -> None:
    torch.manual_seed(5)
    random.seed(5)
    manager().save(tmp_path, 1, 8)
    expected = (torch.rand(4).tolist(), random.random())
    manager().load(tmp_path)
    assert (torch.rand(4).tolist(), random.random()) == expected
    torch.manual_seed(6)
    own = torch.rand(4).tolist()
    torch.manual_seed(6)
    manager(no_load_rng=True).load(tmp_path)
    assert torch.rand(4).tolist() == own


def test_a_parameter_that_its_placement_does_not_know_is_named(tmp_path: Path) -> None:
    held = manager()
    held.chunks[0][2]["bonus.weight"] = torch.nn.Parameter(torch.ones(1))  # type: ignore[index]
    with pytest.raises(CheckpointError, match="1 unexpected: bonus.weight"):
        held.save(tmp_path, 1, 8)
    del held.chunks[0][2]["bonus.weight"]  # type: ignore[attr-defined]
    wrong = next(iter(held.chunks[0][2]))
    held.chunks[0][2][wrong] = torch.nn.Parameter(torch.ones(1))  # type: ignore[index]
    with pytest.raises(CheckpointError, match=f"{wrong} has shape \\(1,\\), its placement says"):
        held.save(tmp_path, 1, 8)
    assert not list(tmp_path.iterdir())
