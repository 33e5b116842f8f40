"""Hugging Face directories that are written: their index, types and files."""

import json

import pytest
import torch
from safetensors import safe_open

from tangram.checkpoints.export import export_hf
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.reader import MemoryReader, read_whole
from tangram.errors import CheckpointError, PlacementError


@pytest.fixture(scope="module")
def source(kit, tmp_path_factory):
    path = kit.write_hf(tmp_path_factory.mktemp("export") / "hf")
    for name in ("tokenizer.json", "preprocessor_config.json", "chat_template.jinja", "generation_config.json", "pytorch_model.bin", ".secret"):
        (path / name).write_text(name)
    (path / "model.safetensors.index.json.bak").write_text("x")
    return HFDirectory(path)


def headers(path):
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found.update({name: (file.name, opened.get_tensor(name)) for name in opened.keys()})  # noqa: SIM118
    return found


def test_the_index_is_what_the_shards_hold(source, kit, tmp_path):
    written = export_hf(source, tmp_path / "out", source.family, hf_config=source.config, max_shard_bytes=60_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = headers(tmp_path / "out")
    assert index["weight_map"] == {name: file for name, (file, _) in found.items()}
    assert index["metadata"]["total_size"] == written == sum(tensor.nbytes for _, tensor in found.values())
    shards = set(index["weight_map"].values())
    assert shards == {f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)} and len(shards) > 3
    sizes = {shard: sum(t.nbytes for f, t in found.values() if f == shard) for shard in shards}
    whole = {shard for shard in shards if sum(f == shard for f, _ in found.values()) == 1}
    assert all(size <= 60_000 for shard, size in sizes.items() if shard not in whole)
    kit.assert_same(kit.hf_tensors(tmp_path / "out"), kit.hf_tensors(source.path))


def test_small_files_come_along_and_weights_do_not(source, tmp_path):
    export_hf(source, tmp_path / "out", source.family, hf_config=source.config, files_from=source.path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json.bak",
        "preprocessor_config.json",
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "config.json").read_bytes() == (source.path / "config.json").read_bytes()


def test_a_requested_type_is_that_of_every_tensor_and_of_the_config(source, tmp_path):
    export_hf(source, tmp_path / "out", source.family, hf_config=source.config, files_from=source.path, dtype=torch.float32)
    for name, (_, tensor) in headers(tmp_path / "out").items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, read_whole(source, source.family.canonical_name(name)).float())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_the_config_names_the_type_that_the_tensors_have(source, tmp_path):
    wide = MemoryReader({name: read_whole(source, name).float() for name in source.names()})
    config = {**source.config, "text_config": {**source.config["text_config"], "torch_dtype": "bfloat16"}}
    export_hf(wide, tmp_path / "out", source.family, hf_config=config, files_from=source.path)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["dtype"], written["text_config"]["torch_dtype"]) == ("float32", "float32")
    assert {**written, "dtype": None, "text_config": None} == {**config, "dtype": None, "text_config": None}


def test_a_source_that_fails_midway_publishes_nothing(source, kit, tmp_path):
    class Failing:
        names = staticmethod(source.names)

        def read(self, name, start, shape):
            if name == "lm_head.weight":
                raise CheckpointError("lost the disk")
            return source.read(name, start, shape)

    with pytest.raises(CheckpointError, match="lost the disk"):
        export_hf(Failing(), tmp_path / "out", source.family, hf_config=source.config, max_shard_bytes=60_000)
    assert kit.files(tmp_path) == []


def test_shards_that_ask_for_other_tensors_are_refused(source, kit, tmp_path):
    tensors = {name: read_whole(source, name) for name in source.names() if name != "lm_head.weight"}
    with pytest.raises(PlacementError, match=r"1 unexpected: lm_head.weight"):
        export_hf(MemoryReader(tensors), tmp_path / "out", source.family, hf_config=source.config, shards=source.shards)
    assert kit.files(tmp_path) == []


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_mm_to_hf_writes(tied, kit, tmp_path):
    transformers = pytest.importorskip("transformers")
    hf = kit.write_hf(tmp_path / "hf", tied=tied, dtype=torch.float32)
    kit.to_mm(hf, tmp_path / "mm", tp_size=2, llm_pp_layers=[1, 3])
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    model, info = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    canonical = HFDirectory(hf)
    state = model.state_dict()
    assert set(state) == set(canonical.names()) | {"lm_head.weight"}
    for name in canonical.names():
        assert torch.equal(state[name], read_whole(canonical, name)), name
