"""Hugging Face directories that cannot be what they should: each is refused in one line that says where."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import save_file

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.errors import CheckpointError, ConfigError, TangramError


@pytest.fixture
def one(kit, tmp_path):
    return kit.write_hf(tmp_path / "hf")


@pytest.fixture
def three(kit, one):
    kit.shard(one, 3)
    return one


def refuse(path, message, error=CheckpointError):
    with pytest.raises(error, match=message) as raised:
        HFDirectory(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def rewrite_index(path, change):
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_truncated_data(one):
    file = one / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-100])
    refuse(one, rf"model.safetensors: .* ends at byte {size} but the file has {size - 100}; it is truncated")


@pytest.mark.parametrize("kept", [0, 5, 200])
def test_truncated_header(one, kept):
    file = one / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refuse(one, rf"model.safetensors: .*\b{kept}\b")


def test_header_that_is_no_json(one):
    (one / "model.safetensors").write_bytes(struct.pack("<Q", 8) + b"notjson!" + bytes(64))
    refuse(one, "the header is not a JSON mapping")


def test_header_whose_sizes_disagree(one):
    header = json.dumps({"w": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 16]}}).encode()
    (one / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    refuse(one, r"w of shape \(4, 4\) and type BF16 takes 32 bytes, but the header gives it 0..16")


def test_element_type_that_is_not_known(one):
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (one / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(2))
    refuse(one, "w has element type F4, which is not supported; supported: F64, F32")


def test_missing_shard(three):
    (three / "model-00002-of-00003.safetensors").unlink()
    refuse(three, "1 of 3 shards are missing: model-00002-of-00003.safetensors")


def test_missing_shard_without_an_index(three):
    (three / "model-00002-of-00003.safetensors").unlink()
    (three / "model.safetensors.index.json").unlink()
    refuse(three, "2 of 3 shards are there and there is no model.safetensors.index.json")


def test_index_without_a_shard_s_tensor(three):
    rewrite_index(three, lambda weights: weights.pop("lm_head.weight"))
    refuse(three, "the shards hold 1 tensors that the index does not list: lm_head.weight")


def test_index_that_lists_a_ghost(three):
    rewrite_index(three, lambda weights: weights.update({"model.ghost.weight": "model-00001-of-00003.safetensors"}))
    refuse(three, "1 of 106 tensors are not in the shard that the index names: model.ghost.weight; .* is nowhere")


def test_index_that_names_the_wrong_shard(three):
    def move(weights):
        assert weights["lm_head.weight"] == "model-00001-of-00003.safetensors"
        weights["lm_head.weight"] = "model-00002-of-00003.safetensors"

    rewrite_index(three, move)
    refuse(three, "lm_head.weight should be in model-00002-of-00003.safetensors and is in model-00001-of-00003.safetensors")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_index_that_leaves_the_directory(three, name):
    rewrite_index(three, lambda weights: weights.update({"lm_head.weight": name}))
    refuse(three, rf"lm_head.weight is said to be in '{re.escape(name)}', which is not the plain name of a file")


def test_empty_index(three):
    (three / "model.safetensors.index.json").write_text("{}")
    refuse(three, "no weight_map")


def test_index_beside_a_file_that_it_does_not_name(three):
    save_file({"lm_head.weight": torch.zeros(2)}, three / "model.safetensors")
    refuse(three, "holds both model.safetensors and model.safetensors.index.json")


def test_a_tensor_in_two_files(one):
    save_file({"lm_head.weight": torch.zeros(2)}, one / "more.safetensors")
    refuse(one, "lm_head.weight is in model.safetensors and in more.safetensors")


def test_two_key_layouts_in_one_directory(one):
    save_file({"model.language_model.layers.0.input_layernorm.weight": torch.zeros(32)}, one / "more.safetensors")
    refuse(one, "mixes two key layouts: 104 keys like .* and 1 like model.language_model.layers.0.input_layernorm.weight")


def test_no_weights(one):
    (one / "model.safetensors").unlink()
    refuse(one, r"no \*.safetensors file")


def test_no_directory(tmp_path):
    refuse(tmp_path / "nowhere", "no such directory")


def test_no_config(one):
    (one / "config.json").unlink()
    refuse(one, "config.json: no such file", ConfigError)


def test_conversion_of_a_damaged_directory_publishes_nothing(kit, three, tmp_path):
    (three / "model-00002-of-00003.safetensors").unlink()
    before = kit.files(tmp_path)
    with pytest.raises(TangramError):
        kit.to_mm(three, tmp_path / "mm")
    assert kit.files(tmp_path) == before


def test_conversion_refuses_tensors_that_it_does_not_know(kit, one, tmp_path):
    kit.edit(one, lambda tensors: tensors.update({"visual.new_thing.weight": torch.zeros(3)}))
    before = kit.files(tmp_path)
    with pytest.raises(TangramError, match="1 unexpected: model.visual.new_thing.weight"):
        kit.to_mm(one, tmp_path / "mm")
    assert kit.files(tmp_path) == before


def test_tensors_of_different_types_cannot_be_fused(kit, one, tmp_path):
    kit.edit(
        one, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.weight": tensors["model.layers.0.self_attn.q_proj.weight"].float()})
    )
    with pytest.raises(
        CheckpointError, match=r"linear_qkv.weight: fuses tensors of different element types: .*q_proj.weight float32, .*k_proj.weight bfloat16"
    ):
        kit.to_mm(one, tmp_path / "mm")
    assert not (tmp_path / "mm").exists()
