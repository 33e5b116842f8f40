"""pretrain_vlm.py and edited copies of it, as third-party entries are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.test_resume import stored
from tests.trial import Trial, entry_flags, losses, metrics, run, train

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "pretrain_vlm.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def edited(folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of the script with words replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    text = SCRIPT.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "pretrain_mine.py"
    path.write_text(text)
    return path


def test_torchrun_and_flags_give_the_losses_of_the_run_file(trial: Trial, folder: Path) -> None:
    expected = train(folder / "yaml", trial)
    flags = entry_flags(trial, folder, {"--load": trial.hf, "--save": folder / "ckpt", "--tensor-model-parallel-size": 2})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = metrics(folder / "ckpt" / "metrics.jsonl")
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-6)
    assert [row["lr"] for row in found] == [row["lr"] for row in expected]
    assert "vision_encoder" in done.stdout and "iteration        6/       6" in done.stdout


OWN_FLAG = """
def my_flags(parser):
    parser.add_argument("--times", type=float)
    return parser


"""


def test_an_edited_loss_and_a_flag_of_ones_own(trial: Trial, folder: Path) -> None:
    script = edited(
        folder,
        ("report_loss(terms.numerator, terms.denominator)", "report_loss(terms.numerator * get_context().args.times, terms.denominator)"),
        (
            '"encoder_or_decoder", forward_step)',
            '"encoder_or_decoder", forward_step, extra_args_provider=my_flags, args_defaults={"train_iters": 2, "times": 3.0})',
        ),
        ('if __name__ == "__main__":', OWN_FLAG + 'if __name__ == "__main__":'),
    )
    plain, mine = folder / "plain", folder / "mine"
    train(plain, trial, ["training.train_iters=2", "training.lr_warmup_iters=0"])
    flags = entry_flags(trial, mine, {"--load": trial.hf, "--save": mine / "ckpt", "--train-iters": None, "--lr-warmup-iters": None})
    run(mine, [str(script), *flags]).succeeded()
    assert losses(mine / "ckpt" / "metrics.jsonl") == pytest.approx([3 * loss for loss in losses(plain / "metrics.jsonl")], rel=1e-4)
    run(mine, [str(script), *flags, "--times", "1"]).succeeded()
    assert losses(mine / "ckpt" / "metrics.jsonl") == pytest.approx(losses(plain / "metrics.jsonl"), rel=1e-6)
    outcome = run(mine, [str(script), *flags, "--tmies", "1"])
    assert outcome.codes == [2] and "did you mean '--times'?" in outcome.errors()[0]


HAND_MADE = """
    tokens, mean = [(1, 4.0), (3, 1.0), (2, 2.0), (2, 3.0)][batch["sample_ids"][0]]
    def by_hand(output):
        return report_loss(output["loss_dict"]["token_losses"].sum() * 0 + tokens * mean, tokens)
    return model(**get_batch(iter([batch]))), by_hand
"""


def test_the_logged_loss_is_the_mean_over_all_tokens_of_all_micro_batches_and_ranks(trial: Trial, folder: Path) -> None:
    """karpathy/nanochat PR 52: 1, 3, 2, 2 tokens of loss 4, 1, 2, 3 are (4 + 3 + 4 + 6) / 8 = 2.125, not the last or one rank's."""
    body = ("    return model(**get_batch(data_iterator)), loss_func", "    batch = next(data_iterator)" + HAND_MADE.rstrip())
    script = edited(folder, body)
    for ranks in (1, 2):
        changes = {"--micro-batch-size": 1, "--global-batch-size": 4, "--train-iters": 1, "--lr-warmup-iters": 0, "--save": folder / f"{ranks}"}
        flags = entry_flags(trial, folder, changes)
        data = json.loads((folder / "data.json").read_text())
        data["dataloader_param"]["shuffle"] = False
        (folder / "data.json").write_text(json.dumps(data))
        outcome = run(folder / f"log_{ranks}", [str(script), *flags], ranks).succeeded()
        assert losses(folder / f"{ranks}" / "metrics.jsonl") == [2.125]
        assert outcome.output.count("| loss: 2.125000E+00 |") == 1


POISON = """
    context = get_context()
    context.args.calls = getattr(context.args, "calls", 0) + 1
    factor = float("nan") if (context.data_rank, context.args.calls) == (1, 3) else 1.0
    def poisoned(output):
        numerator, denominator, report = loss_func(output)
        return report_loss(numerator * factor, denominator)
    return model(**get_batch(data_iterator)), poisoned
"""


@pytest.mark.parametrize("zero", [None, True], ids=["plain", "distributed optimizer"])
def test_a_nan_on_one_rank_makes_both_skip_and_nothing_moves_but_the_data(zero: bool | None, trial: Trial, folder: Path) -> None:
    """ecmwf/WeatherGenerator 2724, THUDM/slime PR 1762: two ranks, two micro-batches each; the first of step 2 is poisoned on rank 1."""
    script = edited(folder, ("    return model(**get_batch(data_iterator)), loss_func", POISON.strip("\n")))
    changes = {"--load": trial.hf, "--save": folder / "ckpt", "--save-interval": 1, "--train-iters": 3, "--lr-warmup-iters": 0}
    flags = entry_flags(trial, folder, {**changes, "--use-distributed-optimizer": zero})
    outcome = run(folder, [str(script), *flags], 2).succeeded()
    rows = metrics(folder / "ckpt" / "metrics.jsonl")
    assert [row["skipped"] for row in rows] == [False, True, False] and [row["nan"] for row in rows] == [False, True, False]
    assert rows[1]["loss"] == "nan" and rows[1]["lr"] == rows[2]["lr"], "the schedule did not move"
    assert [row["consumed_samples"] for row in rows] == [8, 16, 24]
    assert "| loss: NAN |" in outcome.output and "number of skipped iterations:   1 | number of nan iterations:   1 |" in outcome.output
    first, second, third = (stored(folder / "ckpt" / f"iter_{step:07}") for step in (1, 2, 3))
    assert all(torch.equal(first[key], second[key]) for key in first), "weights, moments and step counts"
    assert any(not torch.equal(second[key], third[key]) for key in first)


def test_without_a_run_the_callbacks_say_so() -> None:
    from tangram.training.context import get_context

    with pytest.raises(RuntimeError, match=r"callbacks of an entry are called by pretrain\(\)"):
        get_context()
