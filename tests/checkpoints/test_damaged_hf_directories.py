"""Hugging Face directories that cannot be what they should: each is refused in one line that says where."""

import json
import re
import struct

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.inspect import inspect
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


def content(header, data=b"", *, text=None):
    """A file with a header, given as a mapping or as its text."""
    written = (json.dumps(header) if text is None else text).encode()
    return struct.pack("<Q", len(written)) + written + data


def entry(begin, end, shape=(4,)):
    return {"dtype": "U8", "shape": list(shape), "data_offsets": [begin, end]}


BROKEN = {
    "a list": (content([1]), "the header is not a JSON mapping"),
    "nested too deeply": (content(None, text="[" * 50_000), "the header is not a JSON mapping"),
    "an entry that is a list": (content({"w": [1]}, bytes(4)), r"the header's entry of w is damaged: \[1\]"),
    "an infinite size": (content({"w": entry(0, 4, [float("inf")])}, bytes(4)), "the header's entry of w is damaged"),
    "a broken size": (content({"w": entry(0, 4, [4.7])}, bytes(4)), "the header's entry of w is damaged"),
    "sizes in words": (content({"w": entry(0, 4) | {"shape": "4"}}, bytes(4)), "the header's entry of w is damaged"),
    "two negative sizes": (content({"w": entry(0, 4, [-2, -2])}, bytes(4)), "the header's entry of w is damaged"),
    "three offsets": (content({"w": entry(0, 4) | {"data_offsets": [0, 2, 4]}}, bytes(4)), "the header's entry of w is damaged"),
    "tensors that overlap": (content({"v": entry(0, 4), "w": entry(2, 6)}, bytes(6)), r"w begins at byte \d+ but v ends at \d+"),
    "a gap": (content({"v": entry(0, 4), "w": entry(6, 10)}, bytes(10)), r"w begins at byte \d+ but v ends at \d+"),
    "bytes after the last": (content({"v": entry(0, 4)}, bytes(9)), r"\d+ bytes, but v ends at \d+"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_files_that_the_safetensors_package_refuses_are_refused(damage, one):
    broken, message = BROKEN[damage]
    file = one / "model.safetensors"
    file.write_bytes(broken)
    with pytest.raises(SafetensorError), safe_open(file, "pt"):
        pass
    refuse(one, message)


def test_a_tensor_that_stands_twice_in_a_header(one):
    """The package takes one of the two."""
    twice = f'{{"w": {json.dumps(entry(0, 4))}, "w": {json.dumps(entry(0, 4))}}}'
    (one / "model.safetensors").write_bytes(content(None, bytes(4), text=twice))
    refuse(one, "w stands twice in the header; the file is damaged")


@pytest.mark.parametrize("what", ["folder", "link to nothing"])
def test_a_shard_that_is_no_file(what, one):
    shard = one / "x.safetensors"
    if what == "folder":
        shard.mkdir()
    else:
        shard.symlink_to("nowhere")
    refuse(one, rf"x.safetensors: no file, but a {what}; remove it")
    assert any("x.safetensors: no file" in problem for problem in inspect(one).problems)


CONFIGS = {
    "vision_config": ([1], r"vision_config is \[1\]; it must be a mapping"),
    "text_config": ("x", "text_config is 'x'; it must be a mapping"),
    "rope_scaling": ("x", "rope_scaling is 'x'; it must be a mapping"),
    "initializer_range": ("x", "init_method_std: Input should be a valid number"),
    "hidden_size": (64, r"mrope_section .* must hold 3 numbers that sum to half of head_dim"),
}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("key", CONFIGS)
def test_a_config_with_values_of_the_wrong_kind(key, family, kit, tmp_path):
    value, message = CONFIGS[key]
    path = kit.write_hf(tmp_path / "hf", family=family)
    config = json.loads((path / "config.json").read_text())
    config[key] = value
    if isinstance(config["text_config"], dict) and key != "vision_config":
        config["text_config"][key] = value
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        kit.to_mm(path, tmp_path / "mm", family=family)
    assert not (tmp_path / "mm").exists()


@pytest.mark.parametrize(("family", "key"), [("qwen2_vl", "hidden_size"), ("qwen2_5_vl", "out_hidden_size")])
def test_a_vision_encoder_that_is_said_to_give_another_width(family, key, kit, tmp_path):
    path = kit.write_hf(tmp_path / "hf", family=family)
    config = json.loads((path / "config.json").read_text())
    config["vision_config"][key] = 40
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"{key} 40 of vision_config must be the text decoder's hidden_size 32"):
        kit.to_mm(path, tmp_path / "mm", family=family)


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
