"""The fsdp2 backend against transformers, by ``tangram align``; its processes are forked from the tests' warm server, not started by torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tangram.align.batch import micro_batches, write_batch
from tangram.align.observation import read_observation
from tangram.align.run import Outcome, align, open_subject, prepare_batch
from tangram.align.sharded import Sharded
from tangram.cli.main import main

pytestmark = pytest.mark.usefixtures("forked")
SMALL = {"hidden": 32, "text_layers": 2, "vision_layers": 2, "weight_std": 0.1}


def passed(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.report.passed, f"{outcome.split}: {outcome.report.failures}"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava"])
def test_rows_with_and_without_media_apart_and_packed_over_ranks_give_what_transformers_gives(
    tiny_hf: Callable[..., Path], family: str
) -> None:
    ranks = [Sharded(processes=2), *([Sharded()] if family == "qwen3_vl_moe" else [])]
    outcomes = align(tiny_hf(family, tied=family == "qwen2_vl", **SMALL), ranks, micro_batch_size=1, pack=True)
    passed(outcomes)
    assert all("logits of the packed row" in {row.name for row in outcome.report.rows} for outcome in outcomes)
    names = {row.name for row in outcomes[0].report.rows if row.kind == "gradient"}
    assert len(names) > 40
    assert outcomes[0].report.tolerance == 1e-5


def test_each_kind_of_batch_alone_and_settings_of_the_run_file(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """A row of text, and one of a video and a picture, each a batch file of its own; then other plans, on all rows."""
    hf = tiny_hf("qwen2_5_vl", **SMALL)
    subject = open_subject(hf, tmp_path, backends=["fsdp2"])
    batch, _ = prepare_batch(subject, None)
    rows = micro_batches(batch, subject.model, 1)
    for name, row in (("text", rows[1]), ("video", rows[4])):
        tensors = {key: value for key, value in row.items() if isinstance(value, torch.Tensor)}
        (outcome,) = align(hf, [Sharded(processes=2)], batch_file=write_batch(tensors, tmp_path / name))
        passed([outcome])
        assert ("pixel_values" in outcome.batch, "pixel_values_videos" in outcome.batch) == {
            "text": (False, False),
            "video": (True, True),
        }[name]
    plans = [
        ["parallel.fsdp_plan.ignored_modules=[model.visual.patch_embed,model.language_model.norm]"],
        ["parallel.fsdp_plan.apply_modules=[]", "parallel.fsdp_plan.reshard_after_forward=false"],
        ["model.freeze=[model.visual]"],
        ["features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=3"],
        ["parallel.fully_shard_parallel_size=1"],
    ]
    outcomes = align(hf, [Sharded(processes=2, settings=plan) for plan in plans])
    passed(outcomes)
    compared = [{row.name for row in outcome.report.rows} for outcome in outcomes]
    assert {"model.visual.patch_embed.proj.weight"} <= compared[0] - compared[2]
    assert any("frozen parameters" in note for note in outcomes[2].notes)


def test_bf16_stays_near_the_reference_but_is_bf16(tiny_hf: Callable[..., Path]) -> None:
    """Half a unit in the last place of bf16 is 2^-9 = 2e-3 of a number."""
    (outcome,) = align(tiny_hf("qwen2_5_vl", **SMALL), [Sharded(processes=2)], dtype="bf16")
    passed([outcome])
    assert outcome.report.rows[0].error > 4e-3


def test_a_wrong_gradient_fails_the_command_which_writes_what_it_saw(
    tiny_hf: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, dump, report = tiny_hf("qwen2_5_vl", **SMALL), tmp_path / "seen", tmp_path / "report.json"
    command = ["align", "--hf", str(hf), "--backend", "fsdp2", "--nproc", "2", "--pack", "--dump", str(dump), "--json", str(report)]
    assert main([*command, "--tolerance", "0"]) == 1
    assert main(command) == 0
    assert "FSDP2 on 2 ranks" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert "logits of the packed row" in {row["name"] for row in found["tensors"]}
    assert found["passed"] and found["backend"] == "fsdp2" and found["split"]["processes"] == 2
    seen, batch = read_observation(dump), load_file(dump / "batch.safetensors")
    assert seen.logits.shape == (*batch["input_ids"].shape, 160)
    assert "model.visual.merger.ln_q.weight" in seen.gradients


def test_what_does_not_fit_the_backend_is_refused_in_one_line(tiny_hf: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    hf = str(tiny_hf("qwen2_5_vl", **SMALL))

    def refused(*arguments: str) -> str:
        assert main(["align", "--hf", hf, *arguments]) != 0
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert "--tp, --llm-pp-layers: not of --backend fsdp2" in refused("--backend", "fsdp2", "--tp", "2", "--llm-pp-layers", "[1,1]")
    assert "--nproc training.seed=1: of --backend fsdp2" in refused("--nproc", "2", "training.seed=1")
    assert "leave out --dump, --checkpoint, --dtype and --pack" in refused("--steps", "2", "--pack")
    assert "no loss scaling" in refused("--backend", "fsdp2", "--dtype", "fp16")
    assert "what says it is --lr" in refused("--backend", "fsdp2", "training.lr=1")
    assert "parallel.fully_shard_parallel_size 3" in refused("--backend", "fsdp2", "--nproc", "2", "parallel.fully_shard_parallel_size=3")
    assert "parallel.shards" in refused("--backend", "fsdp2", "parallel.shards=2")
    assert "sets features.loss_cfg.loss_type itself, which lies in it" in refused("--backend", "fsdp2", "features={loss_cfg: {loss_type: raw}}")
