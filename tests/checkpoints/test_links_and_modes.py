"""Links and permissions of the files that a conversion reads and writes."""

import json
import os
import shutil

import pytest
import torch

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.errors import CheckpointError


@pytest.fixture
def hf(kit, tmp_path):
    return kit.write_hf(tmp_path / "hf")


def mode(path):
    return path.stat().st_mode & 0o777


def test_small_files_keep_their_permissions_and_weights_get_the_usual_ones(hf, kit, tmp_path):
    (hf / "tokenizer.json").write_text("{}")
    (hf / "merges.py").write_text("")
    (hf / "tokenizer.json").chmod(0o600)
    (hf / "merges.py").chmod(0o755)
    (hf / "model.safetensors").chmod(0o400)
    before = os.umask(0o027)
    try:
        kit.to_mm(hf, tmp_path / "mm")
        kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    finally:
        os.umask(before)
    assert (mode(tmp_path / "back" / "tokenizer.json"), mode(tmp_path / "back" / "merges.py")) == (0o600, 0o755)
    assert mode(tmp_path / "back" / "model.safetensors") == mode(kit.rank_file(tmp_path / "mm", "mp_rank_00")) == 0o640
    assert mode(tmp_path / "mm") == mode(tmp_path / "back") == 0o750


def into_cache(hf, cache):
    """A directory as the Hugging Face cache keeps it: snapshots of links to blobs."""
    snapshot = cache / "models--some--model" / "snapshots" / "0a1b"
    blobs = cache / "models--some--model" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(hf.iterdir())):
        file.rename(blobs / f"{number:040}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040}")
    return snapshot


def test_the_links_of_the_hugging_face_cache_are_followed(hf, kit, tmp_path):
    (hf / "tokenizer.json").write_text("{}")
    expected = kit.hf_tensors(hf)
    snapshot = into_cache(hf, tmp_path / "cache")
    (tmp_path / "link").symlink_to(snapshot)
    kit.to_mm(tmp_path / "link", tmp_path / "mm", tp_size=2)
    kit.to_hf(tmp_path / "mm", snapshot, tmp_path / "back")
    kit.assert_same(kit.hf_tensors(tmp_path / "back"), expected)
    assert (tmp_path / "back" / "tokenizer.json").is_file() and not any(p.is_symlink() for p in (tmp_path / "back").iterdir())


def test_a_link_inside_the_directory_is_followed(hf):
    (hf / "parts").mkdir()
    (hf / "model.safetensors").rename(hf / "parts" / "model.bin")
    (hf / "model.safetensors").symlink_to("parts/model.bin")
    assert len(HFDirectory(hf).names()) == 105


@pytest.mark.parametrize("where", ["elsewhere/model.safetensors", "blobs/0"])
def test_other_links_out_of_the_directory_are_refused(hf, tmp_path, where):
    target = tmp_path / where
    target.parent.mkdir()
    shutil.move(hf / "model.safetensors", target)
    (hf / "model.safetensors").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"model.safetensors: is a link to .*, outside of .*/hf; copy the file in, or give the directory where"):
        HFDirectory(hf)


def test_a_small_file_that_is_a_link_out_is_not_copied(hf, kit, tmp_path):
    kit.to_mm(hf, tmp_path / "mm")
    (tmp_path / "secret").write_text("secret")
    (hf / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"notes.txt: is a link to .*/secret, outside of"):
        kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    assert not (tmp_path / "back").exists() and not (tmp_path / "back.partial").exists()


@pytest.mark.parametrize("name", ["../model-00001-of-00003.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_leads_out_of_the_directory_is_refused(name, hf, kit):
    kit.shard(hf)
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = name
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is said to be in .*, which is not the plain name of a file in this directory"):
        HFDirectory(hf)


def test_quantised_weights_are_refused_by_name(hf, kit):
    config = json.loads((hf / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (hf / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"hf: the weights are quantised \(fp8, blocks of 128 x 128\), which is not read; give the directory"):
        HFDirectory(hf)


def test_scales_without_a_word_in_the_config_are_refused_too(hf, kit):
    def quantise(tensors):
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)

    kit.edit(hf, quantise)
    with pytest.raises(CheckpointError, match=r"hf: the weights are quantised \(1 tensors such as .*down_proj.weight_scale_inv\), which is not read"):
        HFDirectory(hf)


@pytest.mark.parametrize("section", [None, "text_config"])
@pytest.mark.parametrize("block", [True, False])
def test_fp8_weights_whose_config_says_so_are_refused(block, section, hf):
    """Block-scaled e4m3 as DeepSeek and Qwen publish it, and one scale per tensor."""
    config = json.loads((hf / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | ({"weight_block_size": [128, 128]} if block else {})
    (config if section is None else config[section])["quantization_config"] = quantisation
    (hf / "config.json").write_text(json.dumps(config))
    what = "fp8, blocks of 128 x 128" if block else "fp8"
    with pytest.raises(CheckpointError, match=rf"hf: the weights are quantised \({what}\), which is not read; give the directory"):
        HFDirectory(hf)


SCALES = ["weight_scale_inv", "weight_scale", "input_scale", "weight_scale_2", "scales", "qweight", "g_idx", "SCB", "weight.absmax"]


@pytest.mark.parametrize("scale", SCALES)
def test_scales_of_every_kind_are_known(scale, hf, kit):
    kit.edit(hf, lambda tensors: tensors.update({f"model.layers.0.mlp.down_proj.{scale}": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=rf"the weights are quantised \(1 tensors such as model.layers.0.mlp.down_proj.{scale}\)"):
        HFDirectory(hf)


def test_plain_fp8_tensors_are_moved_as_they_are(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", dtype=torch.float8_e4m3fn)
    kit.to_mm(hf, tmp_path / "mm", tp_size=2)
    kit.to_hf(tmp_path / "mm", hf, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()
