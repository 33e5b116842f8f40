"""LLaVA-1.5: its checkpoints and configs as transformers has them, and its positions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tangram.checkpoints.hf_directory import HFDirectory
from tangram.config.hf_compare import differences
from tangram.errors import ConfigError, DataError
from tangram.families.llava import LLAVA
from tangram.families.tiny import TinySpec
from tests.conftest import TinyHF
from tests.families.sizes import LLAVA_7B

IMAGE = 158
"""Last id but one of the tests' vocabulary."""


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForImageTextToText

    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model.eval(), info


@pytest.mark.compat
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_every_tensor_and_runs(tiny_hf: TinyHF, tied: bool) -> None:
    folder = tiny_hf("llava", tied=tied)
    model, info = load(folder)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    ids = torch.tensor([[1, 5, *[IMAGE] * 16, 6, 7]])
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels, labels=ids).loss.backward()
    idle = {LLAVA.canonical_name(name) for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    # Feature layer -2: what comes after the last layer but one takes no part.
    unused = ("model.vision_tower.encoder.layers.3.", "model.vision_tower.post_layernorm.")
    assert idle == {name for name in HFDirectory(folder).shapes if name.startswith(unused)}


@pytest.mark.compat
@pytest.mark.parametrize("tied", [False, True])
def test_keys_are_the_hubs_and_names_are_those_of_transformers(tiny_hf: TinyHF, tied: bool) -> None:
    folder = tiny_hf("llava", tied=tied)
    keys = set(load_file(folder / "model.safetensors"))
    assert {
        "vision_tower.vision_model.embeddings.class_embedding",
        "vision_tower.vision_model.pre_layrnorm.weight",
        "vision_tower.vision_model.encoder.layers.3.self_attn.out_proj.bias",
        "vision_tower.vision_model.post_layernorm.bias",
        "multi_modal_projector.linear_1.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.0.self_attn.q_proj.weight",
    } <= keys
    assert ("language_model.lm_head.weight" in keys) != tied
    model, _ = load(folder)
    named = {LLAVA.canonical_name(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    directory = HFDirectory(folder)
    assert {name: shape for name, shape in named.items() if not (tied and name == "lm_head.weight")} == directory.shapes
    directory.check_model()


@pytest.mark.compat
def test_files_that_transformers_saves_are_read(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """5.x drops ``vision_model`` from the keys of the tower and writes config.json in full."""
    folder = tiny_hf("llava")
    model, _ = load(folder)
    model.save_pretrained(tmp_path / "saved")
    saved, original = HFDirectory(tmp_path / "saved"), HFDirectory(folder)
    saved.check_model()
    assert saved.model == original.model
    for name, shape in original.shapes.items():
        origin = (0,) * len(shape)
        assert torch.equal(saved.read(name, origin, shape), original.read(name, origin, shape)), name


@pytest.mark.compat
def test_values_do_not_depend_on_the_installed_transformers(tiny_hf: TinyHF) -> None:
    """Though 4.57 and 5.x call this parameter by different names."""
    weights = load_file(tiny_hf("llava") / "model.safetensors")
    assert weights["vision_tower.vision_model.embeddings.class_embedding"][:3].tolist() == pytest.approx([1.03943, 0.92246, 0.97157], abs=1e-5)


def test_sizes_without_effect_are_refused(tmp_path: Path) -> None:
    for spec, message in ((TinySpec(max_pixels=784), "pictures of one size, 56 x 56 pixels"), (TinySpec(experts=2), "llava has no experts")):
        with pytest.raises(ConfigError, match=message):
            LLAVA.tiny(tmp_path / "out", 0, False, spec)
    assert list(tmp_path.iterdir()) == []


def test_the_hubs_config_is_filled_with_the_defaults_of_transformers() -> None:
    model = LLAVA.from_hf_config(LLAVA_7B)
    text, vision = model.text_decoder, model.image_encoder.vision_encoder
    assert (text.num_layers, text.hidden_size, text.ffn_hidden_size, text.num_attention_heads, text.num_query_groups) == (32, 4096, 11008, 32, 32)
    assert (text.vocab_size, text.max_position_embeddings, text.layernorm_epsilon, text.rope_theta) == (32064, 4096, 1e-5, 10000.0)
    assert (text.position_embedding_type, text.add_qkv_bias, text.untie_embeddings_and_output_weights) == ("rope", False, True)
    assert (vision.num_layers, vision.positions, vision.vision_feature_layer, vision.layernorm_epsilon) == (24, 577, -2, 1e-5)
    assert (model.img_context_token_id, model.video_token_id, model.vision_start_token_id) == (32000, None, None)


@pytest.mark.compat
@pytest.mark.parametrize("drop", [(), ("vision_config",), ("text_config",), ("vision_config", "text_config", "vision_feature_layer")])
def test_what_config_json_leaves_out_is_what_transformers_fills_in(drop: tuple[str, ...]) -> None:
    from transformers import LlavaConfig

    hf = {key: value for key, value in copy.deepcopy(LLAVA_7B).items() if key not in drop}
    filled = LlavaConfig(**{key: value for key, value in copy.deepcopy(hf).items() if key != "model_type"}).to_dict()
    assert differences(LLAVA.from_hf_config(json.loads(json.dumps(filled))), LLAVA.from_hf_config(hf)) == []


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("text_config", "model_type", "mistral", "text_config.model_type 'mistral' is not supported in a llava model; supported: llama"),
        ("vision_config", "model_type", "siglip_vision_model", "supported: clip_vision_model"),
        ("text_config", "attention_bias", True, "text_config.attention_bias True is not supported; LLaVA-1.5 has False"),
        ("text_config", "rope_scaling", {"type": "linear", "factor": 2.0}, "rope type 'linear' is not supported"),
        (None, "vision_feature_select_strategy", "full", "vision_feature_select_strategy 'full' is not supported; LLaVA-1.5 has 'default'"),
        (None, "vision_feature_layer", [-2, -5], "vision_feature_layer: "),
        (None, "vision_feature_layer", -26, r"vision_feature_layer -26 lies outside -25..24"),
        ("vision_config", "image_size", 330, "image_size 330 is not divisible by patch_size 14"),
    ],
)
def test_what_cannot_be_represented_is_refused(section: str | None, key: str, value: Any, message: str) -> None:
    hf = copy.deepcopy(LLAVA_7B)
    (hf[section] if section else hf)[key] = value
    with pytest.raises(ConfigError) as error:
        LLAVA.from_hf_config(hf)
    assert message in str(error.value)


def test_positions_count_real_tokens() -> None:
    model = LLAVA.from_hf_config(LLAVA_7B)
    ids = torch.tensor([[1, 32000, 32000, 5, 0, 0], [0, 0, 1, 5, 6, 7]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    found = LLAVA.rope_index(ids, mask, torch.tensor([[1, 1, 2]]), model)
    assert found.tolist() == [[[0, 1, 2, 3, 1, 1], [1, 1, 0, 1, 2, 3]]] * 3
    assert LLAVA.rope_index(ids, None, None, model)[0].tolist() == [list(range(6))] * 2
    with pytest.raises(DataError, match="holds 2 image tokens but its 1 image grids need 4"):
        LLAVA.rope_index(ids, mask, torch.tensor([[1, 2, 2]]), model)
    with pytest.raises(DataError, match="holds 1 videos"):
        LLAVA.rope_index(ids, mask, None, model, torch.tensor([[1, 2, 2]]))
