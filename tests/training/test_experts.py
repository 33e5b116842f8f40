"""Training a model with experts by the real command: what one split of the experts saved, others and the other backend go on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_across_backends import same, train, trial_of_both
from tests.training.test_resume import stored
from tests.trial import Trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TWO = ["parallel.expert_model_parallel_size=2", "parallel.use_distributed_optimizer=true"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Path]:
    return trial_of_both(tmp_path_factory.mktemp("experts"), "fp32", family="qwen3_vl_moe")


def test_a_run_goes_on_at_every_split_of_experts_and_on_the_other_backend(both: tuple[Trial, Path], tmp_path: Path) -> None:
    """Experts over two ranks with sharded optimizer state, then one rank, then fully sharded, then two again, against one that never stopped."""
    trial, fsdp2 = both
    whole, said = train(tmp_path / "whole", trial.run_file, ["training.save_interval=2", *TWO], 2)
    assert "of which 2 divide the experts" in said
    one, _ = train(tmp_path / "one", trial.run_file, [f"model.load={tmp_path}/whole/ckpt/iter_0000002", "training.save_interval=3"], 1)
    there, _ = train(tmp_path / "there", fsdp2, [f"training.load={tmp_path}/one/ckpt/iter_0000003", "training.save_interval=4"], 2)
    back, _ = train(tmp_path / "back", trial.run_file, [f"model.load={tmp_path}/there/ckpt/iter_0000004", *TWO], 2)
    for rows in (one, there, back):
        for mine, theirs in zip(rows, whole[-len(rows) :], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) and mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            assert mine["consumed_samples"] == theirs["consumed_samples"]
    ends = [stored(tmp_path / name / "ckpt" / "iter_0000006") for name in ("whole", "one", "there", "back")]
    for end in ends[1:]:
        same(end, ends[0], ["model.", "optimizer."], 1e-4)


def test_balancing_is_part_of_the_record(both: tuple[Trial, Path], tmp_path: Path) -> None:
    balanced = ["model.overrides.text_decoder.moe_aux_loss_coeff=0.1", "training.train_iters=1", "training.lr_warmup_iters=0", *TWO]
    (row,), said = train(tmp_path, both[0].run_file, balanced, 2)
    assert 1 <= row["load_balancing"] < 4 and f"load balancing: {row['load_balancing']:.4f}" in said
