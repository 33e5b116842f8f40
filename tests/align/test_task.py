from __future__ import annotations

import json
from pathlib import Path

import pytest

from tangram.align.standin import runnable_directory
from tangram.align.task import Split, even_layers
from tangram.config.model import ModelConfig, TextDecoderConfig
from tangram.errors import ConfigError


def text_only(layers: int) -> ModelConfig:
    decoder = TextDecoderConfig(
        model_id="qwen2_5_lm",
        num_layers=layers,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=2,
        num_query_groups=1,
        vocab_size=64,
        mrope_section=[1, 1, 2],
        untie_embeddings_and_output_weights=True,
    )
    return ModelConfig(model_id="qwen2_5_vl", img_context_token_id=61, video_token_id=62, vision_start_token_id=60, text_decoder=decoder)


def test_layers_are_spread_evenly_and_the_last_stages_take_the_rest():
    assert even_layers(28, 1, 2) == [[14, 14]]
    assert even_layers(30, 1, 4) == [[7, 7, 8, 8]]
    assert even_layers(5, 2, 2) == [[1, 1], [1, 2]]


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match="3 text layers cannot fill 4 stages"):
        even_layers(3, 2, 2)


def test_a_layer_list_must_be_that_of_the_sizes_given():
    with pytest.raises(ConfigError, match=r"llm_pp_layers \[2, 2\] has 2 numbers per row, but pipeline_model_parallel_size is 1; "):
        Split(llm_pp_layers=[2, 2]).topology(text_only(4))
    with pytest.raises(ConfigError, match="sums to 3, but the model has 4 layers"):
        Split(pipeline=2, llm_pp_layers=[2, 1]).topology(text_only(4))
    with pytest.raises(ConfigError, match="llm_pp_layers .* has 2 rows, but virtual_pipeline_model_parallel_size is 1; give one row"):
        Split(pipeline=2, llm_pp_layers=[[1, 1], [1, 1]]).topology(text_only(4))
    topology = Split(tensor=2, pipeline=2, virtual=2, data=2).topology(text_only(4))
    assert topology.text == ((1, 1), (1, 1)) and topology.tensor == 2


def test_a_split_counts_its_processes_and_says_what_it_is():
    split = Split(tensor=2, pipeline=2, data=2, llm_pp_layers=[1, 3])
    assert split.processes == 8
    assert str(split) == "TP2 PP2 DP2 text [1, 3]"


def test_special_tokens_outside_the_vocabulary_get_stand_ins_and_weights_are_linked(tmp_path: Path):
    source = tmp_path / "hf"
    source.mkdir()
    config = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
    nested = {"vocab_size": 320, "hidden_size": 8, "image_token_id": 151655}
    (source / "config.json").write_text(json.dumps({**config, "text_config": nested}))
    (source / "model.safetensors").write_bytes(b"weights")
    directory, replaced = runnable_directory(source, tmp_path / "work")
    assert replaced == {"vision_start_token_id": 319, "vision_end_token_id": 318, "video_token_id": 317, "image_token_id": 316}
    written = json.loads((directory / "config.json").read_text())
    assert written["image_token_id"] == 316 and written["text_config"] == {**nested, "image_token_id": 316}
    assert (directory / "model.safetensors").resolve() == source / "model.safetensors"
    assert json.loads((source / "config.json").read_text())["image_token_id"] == 151655


def test_a_directory_whose_tokens_fit_is_used_as_it_is(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 151936, "image_token_id": 151655}))
    assert runnable_directory(tmp_path, tmp_path / "work") == (tmp_path, {})
    assert not (tmp_path / "work").exists()
