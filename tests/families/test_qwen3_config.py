"""Qwen3-VL's config.json and model.json: what is read and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangram.config.public_keys import RunFacts
from tangram.config.sources import parse_model
from tangram.errors import ConfigError
from tangram.families import get_family
from tests.families.sizes import QWEN3_VL

EXAMPLES = Path(__file__).parents[2] / "examples" / "qwen3vl"


def read(size: str = "30b", change: Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], Any] = lambda hf, text, vision: None) -> Any:
    """The model of a published config.json after a change to (all of it, its text section, its vision section)."""
    hf = copy.deepcopy(QWEN3_VL[size])
    change(hf, hf["text_config"], hf["vision_config"])
    return get_family(hf["model_type"]).from_hf_config(hf)


def test_what_8b_is() -> None:
    model = read("8b")
    text, vision, projector = model.text_decoder, model.image_encoder.vision_encoder, model.image_encoder.vision_projector
    assert (text.num_layers, text.num_query_groups, text.head_dim, text.qk_layernorm, text.add_qkv_bias) == (36, 8, 128, True, False)
    assert (text.rope_theta, text.mrope_section, text.mrope_interleaved, text.max_position_embeddings) == (5e6, [24, 20, 20], True, 262144)
    assert (vision.patch_size, vision.max_position_embeddings, vision.deepstack_visual_indexes) == (16, 2304, [8, 16, 24])
    assert (vision.add_bias_conv, vision.normalization, vision.gated_linear_unit) == (True, "LayerNorm", False)
    assert (vision.activation_func, projector.activation_func) == ("gelu_pytorch_tanh", "gelu")
    assert (projector.input_size, projector.ffn_hidden_size, projector.hidden_size, projector.normalization) == (1152, 4608, 4096, "LayerNorm")
    assert text.untie_embeddings_and_output_weights and not read("4b").text_decoder.untie_embeddings_and_output_weights


def test_what_30b_adds() -> None:
    text = read("30b").text_decoder
    assert (text.num_moe_experts, text.moe_router_topk, text.moe_intermediate_size, text.norm_topk_prob) == (128, 8, 768, True)


def as_saved_by_transformers_5(hf: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]) -> None:
    """What 5.23.0 writes for the hub's file: one section for rotary positions, another name for the experts, a tie in the text section alone."""
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    text |= {"num_local_experts": text.pop("num_experts"), "tie_word_embeddings": True}
    vision |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}, "model_type": "qwen3_vl_moe_vision"}


def test_a_config_of_transformers_5_is_the_same_model() -> None:
    assert read("30b", as_saved_by_transformers_5) == read("30b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda hf, text, vision: text.update(decoder_sparse_step=2), r"decoder_sparse_step 2 and mlp_only_layers \[\] ask for layers without"),
        (lambda hf, text, vision: text.update(mlp_only_layers=[0]), r"decoder_sparse_step 1 and mlp_only_layers \[0\] ask for layers without"),
        (lambda hf, text, vision: text.update(norm_topk_prob=False), "norm_topk_prob false is not supported"),
        (lambda hf, text, vision: text.update(num_experts=4), "moe_router_topk 8 is more than num_moe_experts 4"),
        (lambda hf, text, vision: text.pop("num_experts"), "key 'num_experts' is missing"),
        (lambda hf, text, vision: text.update(attention_bias=True), "attention_bias true is not supported"),
        (lambda hf, text, vision: text["rope_scaling"].update(mrope_interleaved=False), "mrope_interleaved False is not supported"),
        (lambda hf, text, vision: text["rope_scaling"].update(rope_type="yarn"), "rope type 'yarn' is not supported"),
        (lambda hf, text, vision: text.pop("head_dim"), "key 'head_dim' is missing"),
        (lambda hf, text, vision: vision.update(rope_parameters={"rope_type": "yarn"}), "vision_config: rope type 'yarn' is not supported"),
        (lambda hf, text, vision: vision.update(num_position_embeddings=2305), "max_position_embeddings 2305 is no square"),
        (lambda hf, text, vision: vision.update(deepstack_visual_indexes=[8, 27]), r"deepstack_visual_indexes \[27\] lie outside 0..26"),
        (lambda hf, text, vision: vision.update(deepstack_visual_indexes=[8, 8]), r"deepstack_visual_indexes \[8, 8\] must rise"),
        (
            lambda hf, text, vision: text.update(num_hidden_layers=2),
            r"deepstack_visual_indexes \[8, 16, 24\] bring 3 outputs to the first text layers, but text_decoder.num_layers is 2",
        ),
    ],
)
def test_configs_that_cannot_be_represented_are_refused(change: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read("30b", change)


def example(size: str = "8b") -> dict[str, Any]:
    model: dict[str, Any] = json.loads((EXAMPLES / f"model_{size}.json").read_text())
    return model


def test_keys_of_one_family_are_unknown_to_its_neighbours() -> None:
    model = example() | {"model_id": "qwen2_vl"}
    with pytest.raises(ConfigError, match="unknown key 'image_encoder.vision_encoder.max_position_embeddings'"):
        parse_model(model, "model.json")
    model = example("30b") | {"model_id": "qwen3_vl"}
    with pytest.raises(ConfigError, match="text_decoder.num_moe_experts: 128 cannot be had here, only null: experts are for model_id qwen3_vl_moe"):
        parse_model(model, "model.json")


def test_public_rope_scaling_is_compared() -> None:
    model = example()
    model["text_decoder"]["rope_scaling"] = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    assert parse_model(model, "model.json", RunFacts()) == parse_model(example(), "model.json")
    model["text_decoder"]["rope_scaling"]["mrope_section"] = [16, 24, 24]
    with pytest.raises(ConfigError, match="rope_scaling: .* does not agree with mrope_section and mrope_interleaved, which is"):
        parse_model(model, "model.json", RunFacts())


def test_a_postshuffle_norm_of_the_projector_is_refused() -> None:
    model = example()
    model["image_encoder"]["vision_projector"]["use_postshuffle_norm"] = True
    with pytest.raises(ConfigError, match="use_postshuffle_norm: true cannot be had here, only false or null: the projector's norm"):
        parse_model(model, "model.json")
