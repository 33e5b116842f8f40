"""Training a model with experts by the real command: gone on with in other micro-batches, and checkpoints that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trial import Record, Trial, metrics, run, train, write_trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TWO = ["parallel.expert_model_parallel_size=2", "parallel.use_distributed_optimizer=true"]
CONTEXT = ["parallel.context_parallel_size=2", "parallel.context_parallel_algo=megatron_cp_algo", "parallel.use_distributed_optimizer=true"]
RUN = ["training.train_iters=4", "training.lr_warmup_iters=0", "training.weight_decay=0.0"]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    return write_trial(tmp_path_factory.mktemp("experts") / "trial", family="qwen3_vl_moe", layers=2)


@pytest.fixture(scope="module")
def trained(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """Experts over two ranks, each with two micro-batches of two samples in a step; saved after two steps and after four."""
    folder = tmp_path_factory.mktemp("trained")
    return folder / "ckpt", train(folder, trial, [*RUN, *TWO, f"training.save={folder}/ckpt", "training.save_interval=2"], 2)


def test_a_run_goes_on_in_other_micro_batches(trial: Trial, trained: tuple[Path, list[Record]], tmp_path: Path) -> None:
    """Saved under expert parallelism, gone on with under a ring in two micro-batches of four samples, and in eight of one on one rank."""
    ckpt, whole = trained
    load = f"model.load={ckpt}/iter_0000002"
    ring = train(tmp_path / "ring", trial, [*RUN, *CONTEXT, load, "training.micro_batch_size=4"], 2)
    one = train(tmp_path / "one", trial, [*RUN, load, "training.micro_batch_size=1"], 1)
    for rows in (ring, one):
        assert [row["step"] for row in rows] == [3, 4]
        for mine, theirs in zip(rows, whole[2:], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) and mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            assert (mine["consumed_samples"], mine["tokens"]) == (theirs["consumed_samples"], theirs["tokens"])


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip])
def test_a_lost_or_damaged_share_of_the_experts_is_named(
    damage: Callable[[Path], object], trial: Trial, trained: tuple[Path, list[Record]], tmp_path: Path
) -> None:
    """The second rank's file holds its experts and half of the moments. Both ranks end, with one line."""
    shutil.copytree(trained[0] / "iter_0000002", tmp_path / "ckpt")
    damage(tmp_path / "ckpt" / "__1_0.distcp")
    outcome = run(tmp_path, ["tangram", "train", str(trial.run_file), *RUN, *TWO, f"model.load={tmp_path}/ckpt"], 2)
    assert None not in outcome.codes and all(outcome.codes)
    (line,) = outcome.errors()
    assert "__1_0.distcp" in line and "use another checkpoint" in line and "Traceback" not in outcome.output, line


def test_a_dense_models_checkpoint_is_not_one_of_a_model_with_experts(trial: Trial, trained: tuple[Path, list[Record]], tmp_path: Path) -> None:
    """Nor the other way round; neither a training checkpoint nor a Hugging Face directory."""
    dense = write_trial(tmp_path / "dense", family="qwen3_vl", layers=2)
    train(tmp_path / "run", dense, ["training.train_iters=1", "training.lr_warmup_iters=0", f"training.save={tmp_path}/ckpt"], 1)
    for loads, path, said in (
        (trial, tmp_path / "ckpt", "a checkpoint of family 'qwen3_vl', this run trains 'qwen3_vl_moe'; load one of its own"),
        (dense, trained[0], "a checkpoint of family 'qwen3_vl_moe', this run trains 'qwen3_vl'; load one of its own"),
        (trial, dense.hf, "model_id 'qwen3_vl_moe' means "),
    ):
        outcome = run(tmp_path / "log", ["tangram", "train", str(loads.run_file), *RUN, f"model.load={path}"])
        (line,) = outcome.errors()
        assert outcome.codes == [2] and said in line and "Traceback" not in outcome.output, line


def test_balancing_is_part_of_the_record(trial: Trial, tmp_path: Path) -> None:
    balanced = ["model.overrides.text_decoder.moe_aux_loss_coeff=0.1", "training.train_iters=1", "training.lr_warmup_iters=0"]
    command = ["tangram", "train", str(trial.run_file), *TWO, *balanced, f"training.metrics_file={tmp_path}/metrics.jsonl"]
    said = run(tmp_path, command, 2).succeeded().output
    (row,) = metrics(tmp_path / "metrics.jsonl")
    assert "of which 2 divide the experts" in said
    assert 1 <= row["load_balancing"] < 4 and f"load balancing: {row['load_balancing']:.4f}" in said
