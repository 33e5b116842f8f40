"""Saved on four ranks by megatron-core's optimizers, loaded at every other split: parameters, masters, moments and steps, bit by bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tangram.checkpoints.dcp_reader import DCPReader
from tangram.errors import CheckpointError
from tests import dcp_toy
from tests.trial import start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def launch(scenario: str, ranks: int, folder: Path) -> list[int | None]:
    """Run a scenario of ``dcp_worker`` and return the ranks' exit codes; a failing rank's output is shown."""
    launched = start(folder.parent / scenario, [str(Path(__file__).with_name("dcp_worker.py")), scenario, str(folder)], ranks)
    try:
        for process in launched.processes:
            process.join()
        codes = [process.exitcode for process in launched.processes]
    finally:
        launched.kill()
    for rank, code in enumerate(codes):
        if code:
            print(f"--- {scenario}, rank {rank}: {code}\n{launched.output(rank)[-3000:]}")
    return codes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    folder.mkdir()
    assert launch("save", 4, folder) == [0, 0, 0, 0]
    return folder


def test_two_ranks_resume_what_four_saved_and_one_that_dies_fails_the_save(saved: Path) -> None:
    survivor, killed = launch("load", 2, saved)
    assert (survivor, killed) == (0, -signal.SIGKILL)
    assert (saved / "survivor").exists()


@pytest.mark.parametrize(("source", "steps", "dtype"), [("plain", 3, torch.bfloat16), ("zero", 3, torch.bfloat16), ("zero_fp32", 2, torch.float32)])
def test_plain_dcp_load_on_a_workstation_reads_everything(saved: Path, source: str, steps: int, dtype: torch.dtype) -> None:
    folder = next((saved / source).glob("iter_*"))
    shapes = dcp_toy.shapes(dcp_toy.split(), tied=True)
    kinds = ["exp_avg", "exp_avg_sq", *(["master"] if dtype == torch.bfloat16 else [])]
    state: dict[str, torch.Tensor] = {f"model.{name}": torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    state |= {f"optimizer.{kind}.{name}": torch.empty(shape) for name, shape in shapes.items() for kind in kinds}
    state |= {f"optimizer.step.{name}": torch.tensor(0) for name in shapes}
    stored = set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
    assert stored == set(state) | {f"rng.{rank:05}" for rank in range(4)}
    dcp.load(state, checkpoint_id=folder)
    for name, shape in shapes.items():
        expected = dcp_toy.truth(name, shape, steps, dtype)
        assert torch.equal(state[f"model.{name}"], expected.master.to(dtype)), name
        for kind in kinds:
            assert torch.equal(state[f"optimizer.{kind}.{name}"], getattr(expected, kind)), (kind, name)
        assert state[f"optimizer.step.{name}"].item() == steps


def test_the_reader_gives_rectangles_of_canonical_tensors(saved: Path) -> None:
    reader = DCPReader(saved / "plain")
    shapes = dcp_toy.shapes(dcp_toy.split(), tied=True)
    assert {name: info.shape for name, info in reader.names().items()} == shapes
    for name, shape in shapes.items():
        expected = dcp_toy.truth(name, shape, 3, torch.bfloat16).master.to(torch.bfloat16)
        start = tuple(size // 3 for size in shape)
        size = tuple(n - a for n, a in zip(shape, start, strict=True))
        assert torch.equal(reader.read(name, start, size), expected[tuple(slice(a, None) for a in start)]), name
    with pytest.raises(CheckpointError, match="no tensor lm_head.weight"):
        reader.read("lm_head.weight", (0, 0), (1, 1))
    with pytest.raises(CheckpointError, match=r"shape \(37, 16\); the rectangle of shape \(38, 16\) at \(0, 0\) lies outside"):
        reader.read("model.language_model.embed_tokens.weight", (0, 0), (38, 16))


def test_each_element_is_written_once(saved: Path) -> None:
    """Four ranks hold replicas of norms, two copies of the tied embedding and padding; the pieces sum to the canonical sizes."""
    folder = next((saved / "plain").glob("iter_*"))
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for key, entry in metadata.state_dict_metadata.items():
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), key  # type: ignore[union-attr]
    assert metadata.state_dict_metadata["model.model.language_model.embed_tokens.weight"].size == (37, 16)  # type: ignore[union-attr]
