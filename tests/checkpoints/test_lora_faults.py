"""Which modules adapter_config.json names, and adapters that cannot be honoured: each is refused in one line before anything is written."""

import pytest
import torch

from tangram.checkpoints.lora_adapter import open_adapter
from tangram.checkpoints.lora_config import read_adapter_config
from tangram.errors import CheckpointError
from tests.checkpoints.lora_kit import Q0, adding, change, edit, merge, to_hf, to_mm
from tests.weights_kit import write_adapter


def test_patterns_name_whole_parts_of_a_name(pair):
    _, adapter = pair
    change(adapter, rank_pattern={"proj": 9, "q_proj": 5, "model.layers.1.mlp.up_proj": 6})
    config = read_adapter_config(adapter)
    modules = ("0.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj", "11.mlp.up_proj")
    assert [config.rank_of(f"model.layers.{module}") for module in modules] == [5, 4, 6, 4]


def test_only_the_layers_that_the_config_names_are_expected(kit, tmp_path):
    base = kit.write_hf(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", base, targets=("layers.1.self_attn.q_proj", "layers.3.self_attn.q_proj"))
    change(adapter, target_modules=["q_proj"], layers_to_transform=[1, 3])
    assert len(open_adapter(adapter).ranks) == 2
    change(adapter, target_modules=r"model\.layers\.(1|3)\.self_attn\.q_proj", layers_to_transform=None)
    assert len(open_adapter(adapter).ranks) == 2
    change(adapter, layers_to_transform=[])  # PEFT takes no layers as all
    assert len(open_adapter(adapter).ranks) == 2
    to_mm(adapter, tmp_path / "mm")
    to_hf(tmp_path / "mm", tmp_path / "back")
    change(adapter, target_modules=["q_proj"], exclude_modules=["layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj"])
    assert len(open_adapter(adapter).ranks) == 2


TENSOR_FAULTS = {
    "half a pair": (lambda t: t.pop(f"{Q0}.lora_B.weight"), r"1 pairs lack a half: model.language_model.layers.0.self_attn.q_proj.lora_B.* missing"),
    "a pair lost": (lambda t: [t.pop(f"{Q0}.lora_{p}.weight") for p in "AB"], r"1 targets have no tensors .*layers.0.self_attn.q_proj"),
    "no such module": (
        adding("model.layers.9.self_attn.q_proj", (4, 4), (4, 4)),
        r"adapts 1 modules that are no linears of this model: model.language_model.layers.9.self_attn.q_proj \(did you mean ",
    ),
    "no target": (
        adding("model.layers.0.self_attn.k_proj", (4, 32), (16, 4)),
        r"1 adapted modules are no targets by target_modules .*layers.0.self_attn.k_proj",
    ),
    "another width": (lambda t: t.update({f"{Q0}.lora_A.weight": torch.zeros(4, 31)}), r"lora_A.weight has \(4, 31\), needed is \(4, 32\)"),
    "another rank": (
        adding("model.layers.0.self_attn.q_proj", (3, 32), (32, 3)),
        r"q_proj has rank 3, but adapter_config.json says 4",
    ),
    "a rank that differs in the pair": (
        lambda t: t.update({f"{Q0}.lora_B.weight": torch.zeros(32, 3)}),
        r"lora_B.weight has \(32, 3\), needed is \(32, 4\)",
    ),
    "a trained embedding": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 320)}),
        r"1 tensors are no lora_A or lora_B of a linear: .*lora_embedding_A",
    ),
    "an embedding as a linear": (
        adding("model.embed_tokens", (4, 32), (320, 4)),
        r"no linears of this model: model.language_model.embed_tokens",
    ),
    "a convolution": (
        lambda t: t.update({"base_model.model.visual.patch_embed.proj.lora_A.weight": torch.zeros(4, 3, 2, 14, 14)}),
        r"patch_embed.proj.lora_A.weight: shape \(4, 3, 2, 14, 14\); adapters of other modules than linears are not supported",
    ),
    "integers": (
        lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones(4, 32, dtype=torch.int8)}),
        r"1 tensors hold integers: .*q_proj.lora_A.weight; quantised adapters are not read",
    ),
    "mixed layouts": (
        adding("model.language_model.layers.0.self_attn.k_proj", (4, 32), (16, 4)),
        r"mixes two key layouts: model.layers.* and model.language_model.layers",
    ),
    "a tensor twice": (adding("model.language_model.layers.0.self_attn.q_proj", (4, 32), (32, 4)), r"holds a tensor under two names"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_do_not_fit_are_named(fault, kit, pair, tmp_path):
    base, adapter = pair
    change_tensors, message = TENSOR_FAULTS[fault]
    edit(adapter, change_tensors)
    before = kit.files(tmp_path)
    for run in (lambda: to_mm(adapter, tmp_path / "out"), lambda: merge(adapter, base, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=message) as raised:
            run()
        assert "\n" not in str(raised.value)
    assert kit.files(tmp_path) == before


CONFIG_FAULTS = {
    "dora": ({"use_dora": True}, r"use_dora True is not supported"),
    "a later variant": ({"use_qalora": True}, r"use_qalora True is not supported"),
    "whole modules": ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save \['embed_tokens'\] is not supported: whole modules"),
    "parameters": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, r"target_parameters .* stacked experts"),
    "biases": ({"bias": "all"}, r"bias 'all'.*trained biases are not supported"),
    "a bias of B": ({"lora_bias": True}, r"lora_bias True: trained biases"),
    "transposed": ({"fan_in_fan_out": True}, r"fan_in_fan_out is true"),
    "another method": ({"peft_type": "IA3"}, r"peft_type is 'IA3'; only LORA"),
    "no rank": ({"r": 0}, r"r is 0; it must be a positive number"),
    "no targets": ({"target_modules": None}, r"target_modules is None"),
    "a broken pattern": ({"rank_pattern": {"q_proj(": 3}}, r"rank_pattern: 'q_proj\(' is no regular expression"),
    "targets that are no expression": ({"target_modules": "q_proj("}, r"target_modules: 'q_proj\(' is no regular expression"),
    "exclusions that are no expression": ({"exclude_modules": "("}, r"exclude_modules: '\(' is no regular expression"),
    "exclusions that are no names": ({"exclude_modules": [5]}, r"exclude_modules is \[5\]; it must be a list of names"),
    "layers in words": ({"layers_to_transform": "1"}, r"layers_to_transform is '1'; it must be a layer's number or a list"),
    "a layers' pattern that is no expression": ({"layers_to_transform": [0], "layers_pattern": "("}, r"layers_pattern: '\(' is no regular"),
    "patterns in a list": ({"rank_pattern": ["q_proj"]}, r"rank_pattern is \['q_proj'\]; it must be a mapping"),
    "half a rank": ({"rank_pattern": {"q_proj": 4.5}}, r"q_proj is 4.5; it must be a whole number"),
    "an infinite rank": ({"r": float("inf")}, r"r is inf; it must be a positive number"),
    "an infinite alpha": ({"lora_alpha": float("inf")}, r"lora_alpha is inf; it must be a positive number"),
    "a number as base": ({"base_model_name_or_path": 5}, r"base_model_name_or_path is 5; it must be a directory"),
    "a word for rslora": ({"use_rslora": "no"}, r"use_rslora is 'no'; it must be true or false"),
    "ranks by another pattern": ({"rank_pattern": {"q_proj": 3}}, r"has rank 4, but adapter_config.json says 3"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_configs_that_cannot_be_honoured_are_refused(fault, pair, tmp_path):
    _, adapter = pair
    keys, message = CONFIG_FAULTS[fault]
    change(adapter, **keys)
    with pytest.raises(CheckpointError, match=message):
        to_mm(adapter, tmp_path / "mm")
    assert not (tmp_path / "mm").exists()
