"""A run of Qwen3-VL, whose DeepStack features cross stages: from converted weights, over both backends, with everything switched on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.checkpoints.convert import convert_hf_to_mm
from tangram.checkpoints.options import HFOptions, ParallelOptions, ToMMOptions
from tests import trial as kit
from tests.training.test_across_backends import same, train, trial_of_both
from tests.training.test_resume import stored
from tests.trial import Trial, split

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
VISION, TEXT = [3, 1], [0, 4]
SAVED = split(2, VISION, TEXT, use_distributed_optimizer=True)
"""TP2 x PP2: one feature is made on the first stage, one on the second."""
RESUMED = [
    *split(1, [4, 0], [1, 3], use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
    *("features.recompute_granularity=full", "features.recompute_method=uniform", "features.recompute_num_layers=2"),
]
"""PP2 x DP2: one feature is added on the first stage, one on the second."""


def converted(trial: Trial, folder: Path) -> Path:
    """The weights as mm-convert writes them for ``SAVED``."""
    parallel = ParallelOptions(tp_size=2, vit_pp_layers=[VISION], llm_pp_layers=[TEXT])
    convert_hf_to_mm(ToMMOptions(mm_dir=str(folder), hf_config=HFOptions(hf_dir=str(trial.hf)), parallel_config=parallel), "qwen3_vl")
    return folder


def test_a_run_from_converted_weights_goes_to_fsdp2_and_back_to_another_split(tmp_path: Path) -> None:
    trial, fsdp2 = trial_of_both(tmp_path / "trial", "fp32", "qwen3_vl")
    alone = kit.train(tmp_path / "alone", trial, ["training.train_iters=6", f"training.save={tmp_path}/alone/ckpt"])
    load = f"model.load={converted(trial, tmp_path / 'mm')}"
    whole, _ = train(tmp_path / "whole", trial.run_file, [load, "training.save_interval=2", *SAVED], 4)
    there, _ = train(tmp_path / "there", fsdp2, [f"training.load={tmp_path}/whole/ckpt/iter_0000002", "training.save_interval=4"], 2)
    back, _ = train(tmp_path / "back", trial.run_file, [f"model.load={tmp_path}/there/ckpt/iter_0000004", *RESUMED], 4)
    assert [[row["step"] for row in rows] for rows in (whole, there, back)] == [[1, 2, 3, 4, 5, 6], [3, 4, 5, 6], [5, 6]]
    for rows in (whole, there, back):
        for mine, theirs in zip(rows, alone[-len(rows) :], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) and mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            assert (mine["lr"], mine["consumed_samples"], mine["tokens"]) == (theirs["lr"], theirs["consumed_samples"], theirs["tokens"])
    ends = [stored(tmp_path / name / "ckpt" / "iter_0000006") for name in ("alone", "whole", "there", "back")]
    for end in ends[1:]:
        same(end, ends[0], ["model.", "optimizer."], 1e-4)
    for name in ("pos_embed.weight", "deepstack_merger_list.1.linear_fc2.weight"):
        assert f"model.model.visual.{name}" in ends[0], "they were trained and compared"
