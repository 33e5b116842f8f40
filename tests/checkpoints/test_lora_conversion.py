"""LoRA adapters from PEFT to mp_rank directories and back."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tangram.checkpoints.inspect import inspect as inspect_directory
from tangram.checkpoints.look_options import VerifyOptions
from tangram.checkpoints.verify import run_verify
from tangram.errors import CheckpointError, PlacementError, TangramError
from tests.checkpoints.lora_kit import Q0, SPLIT, TEXT, VISION, change, merge, new_names, to_hf, to_mm
from tests.weights_kit import write_adapter


def test_the_files_are_those_of_the_public_layout(kit, tmp_path):
    """Names as the public converter has them; a row-parallel linear has A cut by columns, a column-parallel one B by rows."""
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base, targets=(*TEXT, "attn.proj"))
    to_mm(adapter, tmp_path / "mm")
    assert (tmp_path / "mm" / "latest_checkpointed_iteration.txt").read_text() == "release"
    stage = kit.load_rank(tmp_path / "mm", "mp_rank_01_001")
    assert stage["checkpoint_version"] == 3.0
    local = {
        "self_attn.q_proj": "self_attention.q_proj",
        "self_attn.k_proj": "self_attention.k_proj",
        "self_attn.v_proj": "self_attention.v_proj",
        "self_attn.o_proj": "self_attention.linear_proj",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.linear_fc2",
    }
    expected = {}
    tensors = load_file(adapter / "adapter_model.safetensors")
    for theirs, ours in local.items():
        for layer in (1, 2, 3):
            a, b = (tensors[f"base_model.model.model.layers.{layer}.{theirs}.lora_{part}.weight"] for part in "AB")
            rows, columns = b.shape[0] // 2, a.shape[1] // 2
            row_parallel = ours.endswith(("linear_proj", "linear_fc2"))
            name = f"text_decoder.decoder.layers.{layer - 1}.{ours}"
            expected[f"{name}.lora_A.default.weight"] = a[:, columns:] if row_parallel else a
            expected[f"{name}.lora_B.default.weight"] = b if row_parallel else b[rows:]
    kit.assert_same(stage["model"], expected)
    first = kit.load_rank(tmp_path / "mm", "mp_rank_00_000")["model"]
    vision = {name for name in first if name.startswith("image_encoder")}
    parts = ("self_attention.linear_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2")
    assert vision == {f"image_encoder.encoder.blocks.layers.{i}.{m}.lora_{p}.default.weight" for i in range(4) for m in parts for p in "AB"}


def test_packed_vision_qkv_at_one_rank_keeps_the_order_of_the_hub(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base, targets=("attn.qkv",))
    to_mm(adapter, tmp_path / "mm", parallel_config={})
    model = kit.load_rank(tmp_path / "mm", "mp_rank_00")["model"]
    key = "base_model.model.visual.blocks.2.attn.qkv.lora_B.weight"
    name = "image_encoder.encoder.blocks.layers.2.self_attention.linear_qkv.lora_B.default.weight"
    assert torch.equal(model[name], load_file(adapter / "adapter_model.safetensors")[key])


def test_others_may_have_split_packed_qkv_another_way(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base, targets=("attn.qkv",))
    to_mm(adapter, tmp_path / "mm")
    (tmp_path / "mm" / "tangram_adapter.json").unlink()
    with pytest.raises(CheckpointError, match=r"nothing in the files tells how the rows of the vision encoder's linear_qkv were split"):
        to_hf(tmp_path / "mm", tmp_path / "back", parallel_config=SPLIT)


SPLITS = [
    {},
    SPLIT,
    {"tp_size": 4, "llm_pp_layers": [[1, 1], [1, 1]], "vit_pp_layers": [[4, 0], [0, 0]]},
    {"tp_size": 2, "llm_pp_layers": [[0, 1], [1, 2]], "vit_pp_layers": [[3, 1], [0, 0]]},
]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("new_keys", [False, True])
def test_there_and_back_is_exact_to_the_byte(family, new_keys, kit, tmp_path):
    base = kit.write_hf(tmp_path / "base", family=family)
    rename = new_names if new_keys else str
    adapter = write_adapter(
        tmp_path / "lora", base, targets=(*TEXT, *VISION[family], "lm_head"), rename=rename, dtype=torch.bfloat16, some_later_key="kept"
    )
    for number, split in enumerate(SPLITS):
        mm, back = tmp_path / f"mm{number}", tmp_path / f"back{number}"
        report = to_mm(adapter, mm, family, parallel_config=split)
        assert report.tensors == len(load_file(adapter / "adapter_model.safetensors"))
        to_hf(mm, back, family)
        assert kit.files(back) == ["adapter_config.json", "adapter_model.safetensors"]
        for file in back.iterdir():
            assert file.read_bytes() == (adapter / file.name).read_bytes()
        assert run_verify(VerifyOptions(source_dir=str(adapter), target_dir=str(mm))).equal


def test_a_directory_that_training_wrote_takes_split_config_and_base(kit, pair, tmp_path):
    _, adapter = pair
    to_mm(adapter, tmp_path / "mm")
    for name in ("tangram_adapter.json", "adapter_config.json"):
        (tmp_path / "mm" / name).unlink()
    found = inspect_directory(tmp_path / "mm")
    assert (found.format, found.facts["rank"]) == ("LoRA adapter, mp_rank directory without adapter_config.json", "4")
    assert found.facts["targets"] == "gate_proj, linear_fc2, linear_proj, q_proj, up_proj, v_proj"
    with pytest.raises(TangramError, match=r"mm: no adapter_config.json; give the directory that has it"):
        to_hf(tmp_path / "mm", tmp_path / "back")
    to_hf(tmp_path / "mm", tmp_path / "back", parallel_config=SPLIT, hf_config={"hf_dir": str(adapter)}, key_layout="hub")
    kit.assert_same(load_file(tmp_path / "back" / "adapter_model.safetensors"), load_file(adapter / "adapter_model.safetensors"))
    to_hf(tmp_path / "mm", tmp_path / "new", parallel_config=SPLIT, hf_config={"hf_dir": str(adapter)})
    assert f"{Q0.replace('layers', 'language_model.layers')}.lora_A.weight" in load_file(tmp_path / "new" / "adapter_model.safetensors")


def test_the_base_must_be_known_and_of_the_family(kit, pair, tmp_path):
    base, adapter = pair
    with pytest.raises(TangramError, match=r"its base is a qwen2_5_vl model but the converter is for qwen2_vl; use the converter for qwen2_5_vl"):
        to_mm(adapter, tmp_path / "mm", "qwen2_vl")
    change(adapter, base_model_name_or_path="Qwen/Qwen2.5-VL-3B-Instruct")
    with pytest.raises(CheckpointError, match=r"the base is 'Qwen/Qwen2.5-VL-3B-Instruct', a directory that is not here.*base_hf_dir"):
        to_mm(adapter, tmp_path / "mm")
    to_mm(adapter, tmp_path / "mm", base_hf_dir=str(base))
    other = kit.write_hf(tmp_path / "other", family="qwen2_vl")
    with pytest.raises(CheckpointError, match=r"visual.blocks.0.mlp.(down|gate|up)_proj"):
        to_mm(adapter, tmp_path / "mm2", "qwen2_vl", base_hf_dir=str(other))


def test_options_beside_a_manifest_must_say_the_same(pair, tmp_path):
    base, adapter = pair
    to_mm(adapter, tmp_path / "mm")
    to_hf(tmp_path / "mm", tmp_path / "same", parallel_config=SPLIT)
    with pytest.raises(CheckpointError, match=r"mm: tp_size is 2 in the manifest but 4 by the options; leave the options out"):
        to_hf(tmp_path / "mm", tmp_path / "back", parallel_config={"tp_size": 4, "vit_tp_size": 2})
    with pytest.raises(CheckpointError, match=r"llm_pp_layers is \(\(1, 3\),\) in the manifest but \(\(2, 2\),\) by the options"):
        merge(tmp_path / "mm", base, tmp_path / "merged", parallel_config={"llm_pp_layers": [2, 2]})
    with pytest.raises(TangramError, match=r"lora: is a PEFT directory, which has no split; leave the options of parallel_config out"):
        merge(adapter, base, tmp_path / "merged", parallel_config={"tp_size": 2})
    with pytest.raises(TangramError, match=r"/nowhere/adapter_config.json: no such file"):
        to_hf(tmp_path / "mm", tmp_path / "back", hf_config={"hf_dir": "/nowhere"})
    assert not (tmp_path / "back").exists() and not (tmp_path / "merged").exists()


def test_splits_that_do_not_divide_are_refused(pair, tmp_path):
    _, adapter = pair
    with pytest.raises(PlacementError, match=r"layers.0.self_attn.q_proj.lora_B.weight: number of key/value heads 4 is not divisible by .* 8"):
        to_mm(adapter, tmp_path / "mm", parallel_config={"tp_size": 8})
    assert not (tmp_path / "mm").exists()


@pytest.mark.parametrize("fault", ["tensor", "copy", "rank"])
def test_faults_of_an_mp_rank_adapter_are_named(fault, kit, pair, tmp_path):
    _, adapter = pair
    to_mm(adapter, tmp_path / "mm")
    file = kit.rank_file(tmp_path / "mm", "mp_rank_01_001")
    state = torch.load(file, weights_only=True)
    name = "text_decoder.decoder.layers.0.self_attention.q_proj.lora_A.default.weight"
    if fault == "tensor":
        del state["model"][name]
    else:
        state["model"][name] += 1
    torch.save(state, file)
    if fault == "rank":
        shutil.rmtree(file.parent)
    message = {
        "tensor": rf"mp_rank_01_001/model_optim_rng.pt: .*1 missing: {name}",
        "copy": r"layers.1.self_attn.q_proj.lora_A.weight: its copies in .*mp_rank_00_001.* and .*mp_rank_01_001.* differ",
        "rank": r"1 of its folders are missing: mp_rank_01_001",
    }
    with pytest.raises(TangramError, match=message[fault]):
        to_hf(tmp_path / "mm", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_an_existing_output_is_left_alone(pair, tmp_path):
    base, adapter = pair
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("keep")
    for run in (lambda: to_mm(adapter, tmp_path / "out"), lambda: merge(adapter, base, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"out: exists already; remove it or write elsewhere"):
            run()
