"""A run from its file to its last checkpoint; the checks that need the model's modules; and every example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.config import fsdp2_kit
from tests.config.conftest import PROCESSOR
from tests.families.sizes import QWEN3_VL, SIZES
from tests.ranks import on_ranks
from tests.trial import write_trial

CASES = Path(__file__).with_name("cases_entry.py")
ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "qwen2.5vl/qwen2_5_vl_3b_fsdp2.yaml": SIZES["qwen2_5_vl-3b"].hf,
    "qwen2vl/qwen2_vl_2b_fsdp2.yaml": SIZES["qwen2_vl-2b"].hf,
    "qwen3vl/qwen3_vl_8b_fsdp2.yaml": QWEN3_VL["8b"],
    "qwen3vl/qwen3_vl_30b_fsdp2.yaml": QWEN3_VL["30b"],
}
CLASSES = ["Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"]
CLASSES += ["Qwen3VLMoeForConditionalGeneration"]
PARAMETERS = [3_754_622_976, 2_208_985_600, 8_767_123_696, 31_070_754_032]
"""Of the published models; that of the 3B is what its card calls 4B, with the vision tower."""


def test_every_example_passes_every_check(tmp_path: Path) -> None:
    assert sorted(EXAMPLES) == sorted(str(path.relative_to(ROOT / "examples")) for path in ROOT.glob("examples/*/*_fsdp2.yaml"))
    runs = []
    for number, (name, hf) in enumerate(EXAMPLES.items()):
        folder = tmp_path / str(number)
        fsdp2_kit.write_run(folder)
        (folder / "hf" / "config.json").write_text(json.dumps({**hf, "architectures": [CLASSES[number]]}))
        patches = {**PROCESSOR, "patch_size": hf["vision_config"].get("patch_size", 14)}
        (folder / "hf" / "preprocessor_config.json").write_text(json.dumps(patches))
        (folder / "run.yaml").write_text((ROOT / "examples" / name).read_text().replace("../../ckpt/hf_path/", str(folder / "hf") + " #"))
        data = [f"data.dataset_param.basic_parameters.dataset={folder / 'samples.json'}", f"data.dataset_param.basic_parameters.dataset_dir={folder}"]
        processes = 16 if "30b" in name else 8
        small = [f"training.save={folder / 'out'}", "training.gradient_accumulation_steps=1"]
        runs.append((folder / "run.yaml", [*data, *small], processes))
        samples = json.loads((folder / "samples.json").read_text())
        (folder / "samples.json").write_text(json.dumps(samples * 2))
    (found,) = on_ranks(1, CASES, "findings", runs)
    for name, one, class_name, count in zip(EXAMPLES, found, CLASSES, PARAMETERS, strict=True):
        assert not {rule: error for rule, (_, error) in one.items() if error}, name
        assert one["modules"][0].startswith(f"{class_name}, {count:,} of {count:,} parameters are trained"), one["modules"]


def test_patterns_are_held_against_the_model_before_weights(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    hf = {"model": {"model_name_or_path": str(tiny_hf("qwen2_5_vl"))}}
    path = fsdp2_kit.write_run(tmp_path, hf)
    plan = "features.recompute_plan.apply_modules"
    wrong = {
        "parallel.fsdp_plan.apply_modules=model.visual.block.{*}": "parallel.fsdp_plan.apply_modules: 'model.visual.block.{*}' matches no module",
        "model.freeze=model.visual,visual": "model.freeze: 'visual' matches no module of the model",
        "model.freeze=model,lm_head": "model.freeze covers every parameter, so nothing would be trained",
        "model.model_id=qwen2_5_lv": "model id 'qwen2_5_lv' is not registered",
        f"{plan}=model.language_model.layers": f"{plan}: model.language_model.layers is a ModuleList, which is never called itself",
        "training.lr_scaling_plan=[{match: visual}]": "training.lr_scaling_plan[0].match 'visual': no trained parameter's name begins so",
        "training.no_decay_modules=RMSNrm": "training.no_decay_modules: no module with trained parameters has 'RMSNrm' in its class name",
        "parallel.ulysses_parallel_size=3": "parallel.ulysses_parallel_size 3 must divide the 4 attention heads of the text model",
        "parallel.ep_plan.apply_modules=model.visual": "parallel.ep_plan or expert_fully_shard_parallel_size is given",
    }
    runs = [(path, [override, *(["features.recompute=true"] if plan in override else [])], 3) for override in wrong]
    (found,) = on_ranks(1, CASES, "findings", runs)
    for one, said in zip(found, wrong.values(), strict=True):
        assert said in one["modules"][1]


def test_epochs_end_where_they_should_and_validation_reads_all(tmp_path: Path) -> None:
    hf = str(write_trial(tmp_path / "trial").hf)
    data = {"preprocess_parameters": {"model_name_or_path": hf}, "basic_parameters": {"val_dataset": "samples.json"}}
    training = {"train_iters": None, "train_epochs": 2, "save": "out", "val_interval": 2, "init_model_with_meta_device": True}
    changes = {"model": {"model_name_or_path": hf}, "data": {"dataset_param": data, "dataloader_param": {"enable_preload": True, "num_workers": 0}}}
    path = fsdp2_kit.write_run(tmp_path, {**changes, "training": {**training, "manual_gc_interval": 1}}, samples=3)
    assert on_ranks(2, CASES, "trained", path) == [0, 0]
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["consumed_samples"] for record in records] == [2, 4]
    assert ["valid_loss" in record for record in records] == [False, True]
    assert records[-1]["valid_loss"] < records[0]["loss"]
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())["training"]["train_epochs"] == 2


@pytest.mark.parametrize("launched", [False, True])
def test_the_script_runs_by_its_path_from_any_folder(launched: bool, tmp_path: Path) -> None:
    path = fsdp2_kit.write_run(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"} if launched else {}
    (tmp_path / "loss.py").write_text("raise RuntimeError('a file of the working folder was imported')")
    command = [sys.executable, str(ROOT / "tangram/backends/fsdp2/trainer.py"), str(path), "training.min_lr=0"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"tangram: error: {path}: training.min_lr is a setting of another backend; here write training.lr_min\n"
