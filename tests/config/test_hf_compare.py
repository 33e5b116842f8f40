"""model.json against the config.json of its weights: every number that both hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tangram.config.hf_compare import compare_with_description, compare_with_hf, description
from tangram.config.sources import model_from_hf, parse_model
from tangram.errors import ConfigError
from tests.config.conftest import Files

CHANGES: list[tuple[tuple[str, ...], Any, str]] = [
    (("rms_norm_eps",), 1e-6, "text_decoder.layernorm_epsilon is 1e-05 but 1e-06 in"),
    (("rope_theta",), 1e4, "text_decoder.rope_theta is 1000000.0 but 10000.0 in"),
    (("head_dim",), 16, "text_decoder.kv_channels is 8 but 16 in"),
    (("rope_scaling", "mrope_section"), [2, 1, 1], "text_decoder.mrope_section is [1, 1, 2] but [2, 1, 1] in"),
    (("num_hidden_layers",), 5, "text_decoder.num_layers is 4 but 5 in"),
    (("hidden_size",), 64, "text_decoder.hidden_size is 32 but 64 in"),
    (("intermediate_size",), 56, "text_decoder.ffn_hidden_size is 48 but 56 in"),
    (("num_key_value_heads",), 4, "text_decoder.num_query_groups is 2 but 4 in"),
    (("vocab_size",), 321, "text_decoder.vocab_size is 320 but 321 in"),
    (("max_position_embeddings",), 128000, "text_decoder.max_position_embeddings is 32768 but 128000 in"),
    (("hidden_act",), "gelu", "text_decoder.activation_func is 'silu' but 'gelu' in"),
    (("tie_word_embeddings",), True, "text_decoder.untie_embeddings_and_output_weights is True but False in"),
    (("image_token_id",), 312, "img_context_token_id is 310 but 312 in"),
    (("video_token_id",), 313, "video_token_id is 311 but 313 in"),
    (("vision_start_token_id",), 307, "vision_start_token_id is 308 but 307 in"),
    (("vision_config", "depth"), 5, "vision_encoder.num_layers is 4 but 5 in"),
    (("vision_config", "intermediate_size"), 44, "vision_encoder.ffn_hidden_size is 40 but 44 in"),
    (("vision_config", "num_heads"), 2, "vision_encoder.num_attention_heads is 4 but 2 in"),
    (("vision_config", "patch_size"), 16, "vision_encoder.patch_size is 14 but 16 in"),
    (("vision_config", "window_size"), 56, "vision_encoder.window_attn_size is 112 but 56 in"),
    (("vision_config", "fullatt_block_indexes"), [0, 3], "vision_encoder.fullatt_block_indexes is [1, 3] but [0, 3] in"),
    (("vision_config", "tokens_per_second"), 2, "vision_encoder.tokens_per_second is 4 but 2 in"),
    (("vision_config", "hidden_act"), "gelu", "vision_encoder.activation_func is 'silu' but 'gelu' in"),
    (("vision_config", "in_channels"), 1, "vision_encoder.in_channels is 3 but 1 in"),
]


def put(content: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        content = content[part]
    content[path[-1]] = value


def keep_heads(hf: dict[str, Any], path: tuple[str, ...]) -> None:
    """The other sizes that a width of heads, or of the model, asks for."""
    if path == ("head_dim",):
        hf |= {"num_attention_heads": 2}
        put(hf, ("rope_scaling", "mrope_section"), [2, 2, 4])
    if path == ("hidden_size",):
        hf |= {"head_dim": 8, "num_attention_heads": 8}


def test_equal_configs_pass_and_training_choices_do_not_count(files: Files) -> None:
    files.text.update(pipeline_num_layers=[1, 3], freeze=True, init_method_std=0.01, attention_dropout=0.1)
    assert compare_with_hf(parse_model(files.model, "model.json"), files.hf_dir()) > 30


@pytest.mark.parametrize(("path", "value", "message"), CHANGES, ids=[".".join(path) for path, _, _ in CHANGES])
def test_a_difference_names_the_key_and_both_values(files: Files, path: tuple[str, ...], value: Any, message: str) -> None:
    model = parse_model(files.model, "model.json")
    put(files.hf, path, value)
    keep_heads(files.hf, path)
    with pytest.raises(ConfigError) as error:
        compare_with_hf(model, files.hf_dir())
    assert message in str(error.value)
    assert f"{files.folder}/hf/config.json" in str(error.value)


def test_every_difference_is_listed(files: Files) -> None:
    files.hf |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4}
    with pytest.raises(ConfigError) as error:
        compare_with_hf(parse_model(files.model, "model.json"), files.hf_dir())
    assert str(error.value).count(" but ") == 2


def test_another_architecture(files: Files) -> None:
    files.hf["model_type"] = "qwen2_vl"
    with pytest.raises(ConfigError, match=r"model_id 'qwen2_5_vl' means Qwen2_5_VLFor.*, but .*config.json is Qwen2VLFor"):
        compare_with_hf(parse_model(files.model, "model.json"), files.hf_dir())


def test_text_alone_is_compared_without_the_vision_part(files: Files) -> None:
    files.model["image_encoder"] = None
    files.hf["vision_config"]["depth"] = 9
    compare_with_hf(parse_model(files.model, "model.json"), files.hf_dir())


@pytest.mark.parametrize(("path", "value", "message"), CHANGES, ids=[".".join(path) for path, _, _ in CHANGES])
def test_a_checkpoint_keeps_what_its_model_was(files: Files, path: tuple[str, ...], value: Any, message: str) -> None:
    """Most of these show in no tensor's shape. As JSON, since a manifest is."""
    model = parse_model(files.model, "model.json")
    put(files.hf, path, value)
    keep_heads(files.hf, path)
    saved = json.loads(json.dumps(description(model_from_hf(files.hf_dir()))))
    with pytest.raises(ConfigError, match="this run's model is not the one that the checkpoint was trained as: ") as error:
        compare_with_description(model, saved, "iter_0000001")
    assert f"{message} iter_0000001" in str(error.value)
    compare_with_description(model, json.loads(json.dumps(description(model))), "iter_0000001")
