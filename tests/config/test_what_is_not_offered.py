"""What Tangram has not, and others got wrong (NVIDIA/Megatron-LM#7452), is refused by name, by whatever way it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.config.sources import parse_model
from tangram.config.yaml_config import read_run
from tangram.errors import ConfigError
from tangram.families.base import get_family
from tests.config.conftest import Files
from tests.config.test_run_file import RUN

FLAGS = {
    "label smoothing": ["--label-smoothing", "0.1"],
    "multi-token prediction": ["--mtp-num-layers", "1"],
    "learnable attention sinks": ["--softmax-type", "learnable"],
    "gated delta net": ["--experimental-attention-variant", "gated_delta_net"],
    "Megatron-FSDP": ["--use-megatron-fsdp"],
    "LoRA": ["--lora-r", "8"],
    "a pipeline's layout as a string": ["--pipeline-model-parallel-layout", "Ett|tt|m|L"],
}
MODEL_KEYS: dict[str, tuple[str, Any]] = {
    "multi-token prediction": ("mtp_num_layers", 1),
    "multi-token prediction, by transformers' name": ("num_nextn_predict_layers", 1),
    "learnable attention sinks": ("softmax_type", "learnable"),
    "gated delta net": ("experimental_attention_variant", "gated_delta_net"),
    "cross attention": ("add_cross_attention", True),
    "whole logits": ("parallel_output", False),
}
RUN_KEYS = {
    "label smoothing": ("training", "label_smoothing", 0.1),
    "Megatron-FSDP": ("parallel", "use_megatron_fsdp", True),
    "LoRA": ("training", "lora", True),
}
FAMILIES = {"gated delta net": "qwen3_5", "attention sinks": "gpt_oss", "cross attention": "mllama", "multi-token prediction": "deepseek_v3"}


@pytest.mark.parametrize("what", FLAGS)
def test_flags(files: Files, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"^flags: (unknown flag )?{FLAGS[what][0]}\b"):
        files.run(*FLAGS[what])


@pytest.mark.parametrize("what", MODEL_KEYS)
def test_keys_of_the_model(files: Files, what: str) -> None:
    key, value = MODEL_KEYS[what]
    files.text[key] = value
    with pytest.raises(ConfigError, match=rf"^model\.json: (unknown key ')?text_decoder\.{key}\b"):
        parse_model(files.model, "model.json")


@pytest.mark.parametrize("what", RUN_KEYS)
def test_keys_of_the_run(files: Files, what: str) -> None:
    section, key, value = RUN_KEYS[what]
    path = files.run_file(RUN)
    with pytest.raises(ConfigError, match=rf"'{section}\.{key}'"):
        read_run(path, [f"{section}.{key}={value}"])


@pytest.mark.parametrize("what", FAMILIES)
def test_models_that_have_it(what: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown model family '{FAMILIES[what]}'"):
        get_family(FAMILIES[what])
