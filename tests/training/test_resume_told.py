"""What is told, and what is refused, when a run goes on or its weights cannot be found, by the real command."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from tests.trial import Trial, metrics, run, split, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def three_steps(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    train(folder, trial, ["training.train_iters=3", f"training.save={folder}/ckpt", "training.lr_decay_style=cosine"])
    return folder / "ckpt"


def test_a_longer_run_is_told_and_its_rate_never_rises(trial: Trial, three_steps: Path, folder: Path) -> None:
    """Nerogar/OneTrainer 1604: a schedule rebuilt from another length falls and then rises."""
    command = ["tangram", "train", str(trial.run_file), f"model.load={three_steps}", "training.train_iters=6", f"training.metrics_file={folder}/m"]
    output = run(folder, [*command, "training.lr_decay_style=cosine"]).succeeded().output
    assert "lr_decay_steps was 3, is 6; the new one is used" in output
    rates = [row["lr"] for row in metrics(folder / "m")]
    assert len(rates) == 3 and rates == sorted(rates, reverse=True)


def test_another_global_batch_size_is_refused_since_it_would_move_the_order(trial: Trial, three_steps: Path, folder: Path) -> None:
    """Samples 0..23 are consumed, also a multiple of 4; but with drop_last the epochs of 8 and of 4 end at different places."""
    command = ["tangram", "train", str(trial.run_file), f"model.load={three_steps}", "training.lr_decay_style=cosine"]
    outcome = run(folder, [*command, "training.global_batch_size=4"])
    (line,) = outcome.errors()
    assert outcome.codes == [2] and "with global_batch_size 8, " in line and "with global_batch_size 4, " in line


def test_a_number_that_shows_in_no_shape_is_compared_with_the_checkpoint(trial: Trial, three_steps: Path, folder: Path) -> None:
    """The tiny model's rms_norm_eps is 1e-6, as in the published ones."""
    shutil.copytree(trial.hf, folder / "hf")
    config = (folder / "hf" / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in config
    (folder / "hf" / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    outcome = run(folder, ["tangram", "train", str(trial.run_file), f"model.load={three_steps}", f"model.hf_dir={folder}/hf"])
    (line,) = outcome.errors()
    assert outcome.codes == [2] and f"text_decoder.layernorm_epsilon is 1e-05 but 1e-06 in {three_steps}" in line


def test_a_finished_run_says_so(trial: Trial, three_steps: Path, folder: Path) -> None:
    command = ["tangram", "train", str(trial.run_file), f"model.load={three_steps}", "training.train_iters=3", "training.lr_decay_style=cosine"]
    assert "nothing to do: step 3 of 3 is done" in run(folder, command).succeeded().output


def test_an_unfinished_folder_of_the_step_to_save_is_in_nobodys_way(trial: Trial, three_steps: Path, folder: Path) -> None:
    """NVIDIA-NeMo/Automodel 3254: rank 0 fails on the leftover of a killed save and the others wait."""
    (folder / "ckpt" / "iter_0000004").mkdir(parents=True)
    command = [f"model.load={three_steps}", "training.train_iters=4", "training.lr_decay_style=cosine", f"training.save={folder}/ckpt"]
    train(folder, trial, [*command, *split(2)], 2)
    assert (folder / "ckpt" / "iter_0000004" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "no such folder; give a folder of weights, or leave load out"),
        ("empty", "neither a Hugging Face directory (*.safetensors), nor an mp_rank directory"),
        ("file", "it is a file; give a folder of weights"),
    ],
)
def test_a_wrong_path_is_an_error_and_never_random_weights(name: str, message: str, trial: Trial, folder: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge 1649, pytorch/torchtitan PR 1311."""
    (folder / "empty").mkdir(parents=True)
    (folder / "file").write_text("x")
    outcome = run(folder, ["tangram", "train", str(trial.run_file), f"model.load={folder}/{name}"])
    assert outcome.codes == [2]
    (line,) = outcome.errors()
    assert message in line and name in line and "Traceback" not in outcome.output


def test_losses_are_finite(three_steps: Path) -> None:
    assert all(math.isfinite(row["loss"]) for row in metrics(three_steps.parent / "metrics.jsonl"))
