"""LLaVA-1.5 trained from pictures and its template, resumed at another split and on the other backend."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.families.base import get_family
from tangram.families.tiny import TinySpec
from tests import trial as kit
from tests.largest import largest
from tests.training.test_resume import relative, stored
from tests.trial import Record, metrics, run, split

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TOKENS = {"<s>": 256, "</s>": 257, "<image>": 318, "<pad>": 319}
IDLE = ("model.vision_tower.encoder.layers.3.", "model.vision_tower.post_layernorm.")
NOISE = re.compile(r"vision_tower\..*k_proj\.bias$")
"""Without rotary positions a bias of the keys changes no attention: its gradient is rounding, and Adam makes steps of that."""
OVER_STAGES = split(2, [2, 2], [0, 4], use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
"""TP2 x PP2, the tower on both stages, gradients summed while the backward pass runs: a parameter that never gets one must not be waited for."""
VIRTUAL = split(1, [[2, 2], [0, 0]], [[0, 1], [1, 2]])


def write_runs(folder: Path) -> None:
    """``megatron.yaml`` and ``fsdp2.yaml``: one run of 4 steps, on each backend."""
    get_family("llava").tiny(folder / "hf", 0, False, TinySpec(hidden=32, vision_hidden=16, vocab=kit.VOCABULARY, weight_std=0.1))
    kit.write_byte_tokenizer(folder / "hf", TOKENS)
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    kit.write_pictures(folder)
    (folder / "data.json").write_text(json.dumps(kit.records(16)))
    data = {
        "preprocess_parameters": {"model_name_or_path": "hf"},
        "basic_parameters": {"dataset": "data.json", "dataset_dir": ".", "template": "llava"},
    }
    both = {"train_iters": 4, "lr": 1e-3, "lr_decay_style": "constant", "weight_decay": 0.0, "seq_length": 512, "micro_batch_size": 1}
    shared = {"data": {"dataset_param": data, "dataloader_param": {"shuffle": True}}}
    megatron = {
        "backend": "megatron",
        **shared,
        "model": {"hf_dir": "hf", "load": "hf"},
        "training": {**both, "global_batch_size": 4, "loss_type": "per_token_loss"},
    }
    units = ["model.vision_tower.*encoder.layers.{*}", "model.multi_modal_projector", "model.language_model.layers.{*}"]
    fsdp2 = {
        "backend": "fsdp2",
        "data": {"dataset_param": data, "dataloader_param": {"shuffle": True, "num_workers": 0}},
        "model": {"model_name_or_path": "hf"},
        "parallel": {"fsdp_plan": {"apply_modules": units}},
        "features": {"loss_cfg": {"loss_type": "per_token_loss"}},
        "training": {**both, "gradient_accumulation_steps": 2, "init_model_with_meta_device": True},
    }
    for name, content in (("megatron", megatron), ("fsdp2", fsdp2)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))


def train(folder: Path, file: Path, overrides: list[str], ranks: int) -> list[Record]:
    run(folder, ["tangram", "train", str(file), f"training.save={folder}/ckpt", *overrides], ranks).succeeded()
    return metrics(folder / "ckpt" / "metrics.jsonl")


@pytest.mark.compat
def test_a_run_goes_on_at_another_split_and_on_the_other_backend(tmp_path: Path) -> None:
    write_runs(tmp_path)
    whole = train(tmp_path / "whole", tmp_path / "megatron.yaml", ["training.save_interval=2", *OVER_STAGES], 4)
    there = train(tmp_path / "there", tmp_path / "fsdp2.yaml", [f"training.load={tmp_path}/whole/ckpt/iter_0000002", "training.save_interval=3"], 2)
    back = train(tmp_path / "back", tmp_path / "megatron.yaml", [f"model.load={tmp_path}/there/ckpt/iter_0000003", *VIRTUAL], 2)
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert ([row["step"] for row in there], [row["step"] for row in back]) == ([3, 4], [4])
    for rows in (there, back):
        for mine, theirs in zip(rows, whole[-len(rows) :], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6) and mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            assert (mine["consumed_samples"], mine["tokens"]) == (theirs["consumed_samples"], theirs["tokens"])
    ends = [stored(tmp_path / name / "ckpt" / "iter_0000004") for name in ("whole", "there", "back")]
    directory = HFDirectory(tmp_path / "hf")
    for end in ends:
        assert end.keys() == ends[0].keys()
        errors = {key: relative(end[key], ends[0][key]) for key in end if key.startswith(("model.", "optimizer.")) and not NOISE.search(key)}
        assert largest(errors.values()) <= 1e-4, max(errors.items(), key=lambda item: item[1])
        idle = [name for name in directory.shapes if name.startswith(IDLE)]
        assert len(idle) == 18 and not any(name in key for key in end if not key.startswith("model.") for name in idle)
        for name in idle:
            shape = directory.shapes[name]
            assert torch.equal(end[f"model.{name}"], directory.read(name, (0,) * len(shape), shape)), name
