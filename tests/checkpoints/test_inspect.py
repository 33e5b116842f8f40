"""What is said of a directory, whole or not."""

import argparse
import json
import random
import shutil

import numpy as np
import pytest
import torch

from tangram.checkpoints.inspect import inspect, run_inspect
from tangram.checkpoints.look_options import InspectOptions
from tangram.checkpoints.open import open_checkpoint
from tangram.checkpoints.verify import verify
from tangram.cli.main import main
from tangram.errors import CheckpointError
from tests.weights_kit import to_training, write_adapter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SPLIT = {"tp_size": 2, "llm_pp_layers": [1, 3], "vit_pp_layers": [4, 0]}


@pytest.mark.parametrize(("family", "parameters", "tensors"), [("qwen2_5_vl", 143_008, 105), ("qwen2_vl", 144_256, 106)])
def test_a_hugging_face_directory(family, parameters, tensors, golden):
    found = inspect(golden / f"hf_{family}")
    assert (found.format, found.family, found.parameters, found.tensors) == ("Hugging Face directory", family, parameters, tensors)
    assert (found.bytes, found.dtypes, found.tied, found.key_layout) == (2 * parameters, {"bfloat16": tensors}, False, "hub")
    assert found.sizes == {"text_layers": 4, "text_hidden_size": 32, "vocabulary": 320, "vision_layers": 4, "vision_hidden_size": 32}
    assert found.problems == [] and found.exit_code == 0


def test_an_mp_rank_directory_with_manifest(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", tied=True)
    kit.to_mm(hf, tmp_path / "mm", **SPLIT)
    found = inspect(tmp_path / "mm")
    assert (found.format, found.family, found.tied, found.problems) == ("mp_rank directory", "qwen2_5_vl", True, [])
    assert found.split == {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "virtual_pipeline": 1,
        "expert_parallel": 1,
        "vit_pp_layers": [[4, 0]],
        "llm_pp_layers": [[1, 3]],
        "canonical_form": False,
        "vit_only": False,
    }
    assert (found.files, found.optimizer, found.step) == (4, False, None)
    assert found.facts["source"].startswith("sha256:")


def test_the_split_of_a_directory_without_manifest_is_told_by_its_folders(golden):
    found = inspect(golden / "mm_25_tp1_pp2_vpp2")
    assert (found.split["virtual_pipeline"], found.split["llm_pp_layers"]) == (2, [[1, 1], [1, 1]])
    assert found.family is None and "neither a manifest nor --hf" in found.facts["not checked"]
    checked = inspect(golden / "mm_25_tp2_pp2", golden / "hf_qwen2_5_vl")
    assert (checked.family, checked.parameters, checked.problems) == ("qwen2_5_vl", 143_008, [])
    assert any("9 missing" in problem for problem in inspect(golden / "mm_25_tp2_pp2", golden / "hf_qwen2_vl").problems)


def train(mm, step=100):
    """Make a converted directory look like one that Megatron trained."""
    rng = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}
    for file in mm.glob("release/*/model_optim_rng.pt"):
        state = torch.load(file, weights_only=True)
        state |= {"args": argparse.Namespace(params_dtype=torch.bfloat16, lr=np.float64(0.5)), "iteration": step, "rng_state": [rng]}
        state["optimizer"] = {"optimizer": {"param_groups": [{"lr": 0.1}]}}
        state["model"]["text_decoder.output_layer._extra_state"] = None
        torch.save(state, file)
    (mm / "release").rename(mm / f"iter_{step:07}")
    (mm / "latest_checkpointed_iteration.txt").write_text(str(step))


@pytest.mark.parametrize("allowed", [[], [argparse.Namespace, np.ndarray, np.dtype]], ids=["alone", "after megatron-core"])
def test_what_training_left_beside_the_weights_is_passed_over(allowed, kit, tmp_path):
    """megatron-core allows those types, and more, once it is imported."""
    hf = kit.write_hf(tmp_path / "hf")
    kit.to_mm(hf, tmp_path / "mm", **SPLIT)
    train(tmp_path / "mm")
    with torch.serialization.safe_globals(allowed):
        found = inspect(tmp_path / "mm")
        assert set(torch.serialization.get_safe_globals()) >= set(allowed)
    assert (found.step, found.optimizer, found.problems) == (100, True, [])
    assert verify(open_checkpoint(tmp_path / "mm"), open_checkpoint(hf)).equal


def test_a_training_checkpoint(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    folder = to_training(hf, tmp_path / "runs", step=7)
    found = inspect(tmp_path / "runs")
    assert (found.format, found.family, found.step, found.optimizer, found.tied) == ("training checkpoint", "qwen2_5_vl", 7, False, False)
    assert (found.tensors, found.parameters, found.dtypes, found.problems) == (105, 143_008, {"bfloat16": 105}, [])
    assert (found.facts["folder"], found.facts["samples"]) == ("iter_0000007", 56)
    kit.to_mm(hf, tmp_path / "mm", **SPLIT)
    assert verify(open_checkpoint(tmp_path / "runs"), open_checkpoint(tmp_path / "mm"), workers=4).equal

    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1000])
    (problem,) = inspect(folder).problems
    assert f"{data}: " in problem and "it is truncated" in problem
    data.unlink()
    assert inspect(folder).problems == [f"{data}: is missing; use another checkpoint"]


def test_a_training_checkpoint_without_config_takes_one(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    to_training(hf, tmp_path / "runs", with_config=False)
    with pytest.raises(CheckpointError, match=r"iter_0000007: holds no Hugging Face config.*hf_dir"):
        open_checkpoint(tmp_path / "runs")
    assert verify(open_checkpoint(tmp_path / "runs", hf_dir=hf), open_checkpoint(hf)).equal


def incomplete(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    kit.shard(hf, 3)
    return hf


def test_a_missing_shard_is_a_problem_and_the_rest_is_described(kit, tmp_path):
    hf = incomplete(kit, tmp_path)
    (hf / "model-00002-of-00003.safetensors").unlink()
    found = inspect(hf)
    assert (found.family, found.tensors, found.files, found.exit_code) == ("qwen2_5_vl", 70, 2, 1)
    assert found.problems == [
        f"{hf}/model.safetensors.index.json: 1 of 3 shards are missing: model-00002-of-00003.safetensors; copy or download them"
    ]
    assert f"problems:\n  {hf}" in str(found)


def test_every_damaged_file_is_named(kit, tmp_path):
    hf = incomplete(kit, tmp_path)
    for i in (1, 3):
        file = hf / f"model-0000{i}-of-00003.safetensors"
        file.write_bytes(file.read_bytes()[:-50])
    found = inspect(hf)
    assert len(found.problems) == 2 and all("it is truncated" in problem for problem in found.problems)
    assert found.tensors == 35


def test_tensors_that_are_not_the_models_are_a_problem(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    kit.edit(hf, lambda tensors: tensors.update({"visual.extra.weight": tensors.pop("model.norm.weight")}))
    (problem,) = inspect(hf).problems
    assert "1 missing: model.language_model.norm.weight; 1 unexpected: model.visual.extra.weight" in problem


def test_a_directory_without_config_is_still_described(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    (hf / "config.json").unlink()
    found = inspect(hf)
    assert found.tensors == 105 and found.family is None and found.problems == [f"{hf}/config.json: no such file"]


@pytest.mark.parametrize("fault", ["folder", "file", "tracker", "tensor"])
def test_faults_of_an_mp_rank_directory_are_problems(fault, kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    mm = tmp_path / "mm"
    kit.to_mm(hf, mm, **SPLIT)
    file = kit.rank_file(mm, "mp_rank_01_001")
    if fault == "folder":
        shutil.rmtree(file.parent)
    elif fault == "file":
        file.write_bytes(file.read_bytes()[:4000])
    elif fault == "tracker":
        (mm / "latest_checkpointed_iteration.txt").unlink()
    else:
        state = torch.load(file, weights_only=True)
        del state["model"]["text_decoder.decoder.layers.0.mlp.linear_fc1.weight"]
        torch.save(state, file)
    expected = {
        "folder": "1 of its folders are missing: mp_rank_01_001",
        "file": "mp_rank_01_001/model_optim_rng.pt: cannot be read, 4000 bytes",
        "tracker": "no latest_checkpointed_iteration.txt",
        "tensor": "1 missing: text_decoder.decoder.layers.0.mlp.linear_fc1.weight",
    }
    found = inspect(mm)
    assert found.exit_code == 1 and found.tensors > 100 and expected[fault] in found.problems[0]


def test_an_adapter(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    write_adapter(tmp_path / "lora", hf, targets=("q_proj", "v_proj"), rank=8)
    found = inspect(tmp_path / "lora")
    assert found.format == "LoRA adapter, PEFT directory" and found.problems == []
    assert (found.facts["rank"], found.facts["alpha"], found.facts["targets"]) == (8, 16, "q_proj, v_proj")
    assert (found.family, found.tensors, found.facts["adapted modules"]) == ("qwen2_5_vl", 16, {"q_proj": 4, "v_proj": 4})
    # 4 layers of q: 8 x 32 and 32 x 8, and of v: 8 x 32 and 16 x 8
    assert found.parameters == 4 * (2 * 8 * 32 + 8 * 32 + 16 * 8)


def test_an_adapter_whose_base_is_not_here_is_described_and_not_checked(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    write_adapter(tmp_path / "lora", hf, base_model_name_or_path="Qwen/Qwen2.5-VL-3B-Instruct")
    found = inspect(tmp_path / "lora")
    assert found.problems == [] and "since the base is not here; give its directory with --hf" in found.facts["not checked"]
    assert inspect(tmp_path / "lora", hf).family == "qwen2_5_vl"


def test_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither a Hugging Face directory .* it holds nothing"):
        inspect(tmp_path)
    (tmp_path / "hf" / "iter_0000002").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"weights alone can be loaded; give .*hf/iter_0000002$"):
        inspect(tmp_path)


def test_the_command(golden, kit, tmp_path, capsys):
    assert main(["inspect", str(golden / "hf_qwen2_vl")]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["family"], lines["format"]) == ("qwen2_vl", "Hugging Face directory")
    hf = incomplete(kit, tmp_path)
    (hf / "model-00002-of-00003.safetensors").unlink()
    assert main(["inspect", str(hf), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"]
    assert main(["inspect", str(tmp_path / "none")]) == 2


def test_a_converter_of_another_family_says_so(golden):
    found = run_inspect(InspectOptions(mm_dir=str(golden / "hf_qwen2_vl")), ("qwen2_5_vl",))
    (problem,) = found.problems
    assert f"{golden}/hf_qwen2_vl is a qwen2_vl model but the converter is for qwen2_5_vl; use the converter for qwen2_vl" in problem
