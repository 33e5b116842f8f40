"""Training over four ranks, and more than an epoch, gives the numbers of one process: the real command on real data, fp32.

Splits over two ranks are held to stored numbers, for every family (``tests/baselines``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.largest import largest
from tests.trial import Record, Trial, run, split, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 6
"""An epoch has five."""
RUN = [f"training.train_iters={STEPS}", "training.lr=3.0e-3", "training.lr_decay_style=cosine", "training.clip_grad=1.0"]
SPLITS = {
    "pipeline": (split(1, [4, 0], [1, 3]), 2),
    "tensor and pipeline": (split(2, [4, 0], [2, 2]), 4),
    "tensor, two copies, distributed optimizer": (split(2, use_distributed_optimizer=True), 4),
}
TIED = ["tensor and pipeline"]
"""Of these also with tied embeddings, on two stages, and random weights."""
RANDOM = ["model.load=null", "training.seed=7"]

Curves = Callable[[bool, bool], list[Record]]


@pytest.fixture(scope="module")
def one_process(trials: Callable[[bool], Trial], tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """``one_process(tied, random)``: what one process gives."""
    known: dict[tuple[bool, bool], list[Record]] = {}

    def curve(tied: bool, random: bool) -> list[Record]:
        if (tied, random) not in known:
            known[tied, random] = train(tmp_path_factory.mktemp("one"), trials(tied), RUN + (RANDOM if random else []))
        return known[tied, random]

    return curve


def worst(found: list[Record], expected: list[Record], key: str) -> float:
    """Largest relative difference at any step."""
    return largest(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "tied"),
    [*((name, False) for name in SPLITS), *((name, True) for name in TIED)],
    ids=[*(f"{name}, untied, given weights" for name in SPLITS), *(f"{name}, tied, random weights" for name in TIED)],
)
def test_steps_do_not_depend_on_the_split(name: str, tied: bool, trials: Callable[[bool], Trial], one_process: Curves, folder: Path) -> None:
    overrides, ranks = SPLITS[name]
    expected = one_process(tied, tied)
    found = train(folder, trials(tied), [*RUN, *(RANDOM if tied else []), *overrides], ranks)
    assert len(found) == STEPS and expected[-1]["loss"] < 0.9 * expected[0]["loss"]
    assert worst(found, expected, "loss") <= 1e-6
    # Replicated parameters and both copies of a tied embedding count once (NVIDIA-NeMo/RL PR 3788).
    assert worst(found, expected, "grad_norm") <= 1e-5
    for key in ("step", "consumed_samples", "supervised_tokens", "tokens", "padded_tokens", "samples", "lr"):
        assert [row[key] for row in found] == [row[key] for row in expected], key


def test_tied_and_untied_models_are_not_the_same_run(one_process: Curves) -> None:
    """Else the comparison above would say less than it seems to."""
    assert one_process(True, True)[5]["loss"] != one_process(False, False)[5]["loss"]


def test_a_pipeline_logs_the_global_loss_once_per_step(trial: Trial, one_process: Curves, folder: Path) -> None:
    """pytorch/torchtitan 547, 1232: rank 0 of a pipeline has no loss, and printed -1 or failed."""
    outcome = run(folder, ["tangram", "train", str(trial.run_file), *RUN, "training.exit_interval=3", *SPLITS["pipeline"][0]], 2).succeeded()
    printed = [float(text) for text in re.findall(r"\| loss: (\S+) \|", outcome.output)]
    assert len(printed) == 3 and all(math.isfinite(loss) for loss in printed)
    first = one_process(False, False)[:2]
    assert printed[:2] == pytest.approx([row["loss"] for row in first], rel=1e-5)
