"""LLaVA-1.5 there and back, and where its tensors lie in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tangram.errors import PlacementError
from tangram.families.llava import LLAVA
from tests.conftest import TinyHF


@pytest.mark.parametrize(
    "lists",
    [{}, {"llm_pp_layers": [1, 3], "vit_pp_layers": [4, 0]}, {"llm_pp_layers": [[0, 1], [1, 2]], "vit_pp_layers": [[3, 1], [0, 0]]}],
    ids=["pp1", "pp2 uneven", "pp2 vpp2, tower on two"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_conversion_there_and_back_is_exact(kit, tiny_hf: TinyHF, tmp_path: Path, lists: dict[str, Any], tied: bool) -> None:
    hf = tiny_hf("llava", tied=tied, kv_heads=4, vocab=161, dtype="bfloat16")
    expected = load_file(hf / "model.safetensors")
    for tp_size in (1, 2, 4):
        kit.to_mm(hf, tmp_path / f"mm{tp_size}", family="llava", tp_size=tp_size, **lists)
        kit.to_hf(tmp_path / f"mm{tp_size}", hf, tmp_path / f"back{tp_size}", family="llava")
        kit.assert_same(load_file(tmp_path / f"back{tp_size}" / "model.safetensors"), expected)


def test_the_keys_of_either_layout_give_the_same_ranks_and_the_hubs_file(kit, tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf, other = tiny_hf("llava"), tmp_path / "state_dict"
    other.mkdir()
    (other / "config.json").write_text((hf / "config.json").read_text())
    tensors = load_file(hf / "model.safetensors")
    save_file({LLAVA.canonical_name(key): tensor for key, tensor in tensors.items()}, other / "model.safetensors")
    for source in (hf, other):
        kit.to_mm(source, tmp_path / f"mm_{source.name}", tp_size=2, family="llava")
    for name in ("mp_rank_00", "mp_rank_01"):
        kit.assert_same(kit.load_rank(tmp_path / "mm_hf", name)["model"], kit.load_rank(tmp_path / "mm_state_dict", name)["model"])
    kit.to_hf(tmp_path / "mm_hf", other, tmp_path / "back", family="llava")
    kit.assert_same(load_file(tmp_path / "back" / "model.safetensors"), tensors)


def test_local_tensors_are_megatrons(kit, tiny_hf: TinyHF, tmp_path: Path) -> None:
    """The tower of 4 heads of width 8 at TP 2: rank 1 holds q2 k2 v2 q3 k3 v3; text of 4 heads of width 16, one key head each."""
    hf = tiny_hf("llava", kv_heads=4)
    whole = load_file(hf / "model.safetensors")
    kit.to_mm(hf, tmp_path / "mm", tp_size=2, llm_pp_layers=[1, 3], vit_pp_layers=[4, 0], family="llava")
    first, last = kit.load_rank(tmp_path / "mm", "mp_rank_01_000")["model"], kit.load_rank(tmp_path / "mm", "mp_rank_01_001")["model"]
    layer = "vision_tower.vision_model.encoder.layers.3."
    local = "image_encoder.encoder.decoder.layers.3."
    for kind in ("weight", "bias"):
        q, k, v = (whole[f"{layer}self_attn.{x}_proj.{kind}"].split(8) for x in "qkv")
        assert torch.equal(first[f"{local}self_attention.linear_qkv.{kind}"], torch.cat([q[2], k[2], v[2], q[3], k[3], v[3]]))
        assert torch.equal(first[f"{local}mlp.linear_fc1.{kind}"], whole[f"{layer}mlp.fc1.{kind}"].chunk(2)[1])
        assert torch.equal(first[f"image_encoder.projector.encoder.linear_fc1.{kind}"], whole[f"multi_modal_projector.linear_1.{kind}"].chunk(2)[1])
    assert torch.equal(first[f"{local}self_attention.linear_proj.weight"], whole[f"{layer}self_attn.out_proj.weight"].chunk(2, dim=1)[1])
    assert torch.equal(first[f"{local}self_attention.linear_proj.bias"], whole[f"{layer}self_attn.out_proj.bias"])
    tower = "vision_tower.vision_model."
    for name, source in {
        "conv1.weight": "embeddings.patch_embedding.weight",
        "class_token": "embeddings.class_embedding",
        "position_embeddings.weight": "embeddings.position_embedding.weight",
        "ln_pre.weight": "pre_layrnorm.weight",
        "ln_post.bias": "post_layernorm.bias",
    }.items():
        assert torch.equal(first[f"image_encoder.encoder.{name}"], whole[tower + source])
    q, k, v = (whole[f"language_model.model.layers.1.self_attn.{x}_proj.weight"].split(16) for x in "qkv")
    assert torch.equal(last["text_decoder.decoder.layers.0.self_attention.linear_qkv.weight"], torch.cat([q[2], k[2], v[2], q[3], k[3], v[3]]))
    assert torch.equal(last["text_decoder.output_layer.weight"], whole["language_model.lm_head.weight"].chunk(2)[1])
    assert not any("bias" in name for name in last)


def test_a_missing_tensor_of_the_unused_layer_is_an_error(kit, tiny_hf: TinyHF, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    source = tiny_hf("llava")
    (hf / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    del tensors["vision_tower.vision_model.encoder.layers.3.mlp.fc2.bias"]
    save_file(tensors, hf / "model.safetensors")
    with pytest.raises(PlacementError, match=r"1 missing: model.vision_tower.encoder.layers.3.mlp.fc2.bias"):
        kit.to_mm(hf, tmp_path / "mm", family="llava")
    assert not (tmp_path / "mm").exists()
