"""model.json, data.json and tools.json: what is read, what is compared, what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tangram.config.hf_compare import differences
from tangram.config.public_keys import RunFacts, keys_markdown
from tangram.config.sources import parse_data, parse_model, parse_tools, read_data, read_model, read_tools
from tangram.errors import ConfigError
from tangram.families import get_family
from tests.config.conftest import EXAMPLES, Files
from tests.families.sizes import SIZES

FACTS = RunFacts(dtype="bf16", seq_length=1024, sequence_parallel=True, context_parallel_size=1)


@pytest.mark.parametrize(
    ("name", "file", "vit", "llm"),
    [
        ("qwen2_vl-2b", "qwen2vl/model_2b.json", [32], [28]),
        ("qwen2_vl-7b", "qwen2vl/model_7b.json", [32, 0, 0, 0], [1, 10, 10, 7]),
        ("qwen2_vl-72b", "qwen2vl/model_72b.json", [32] + [0] * 7, [5] + [11] * 6 + [9]),
        ("qwen2_5_vl-3b", "qwen2.5vl/model_3b.json", [32], [36]),
        ("qwen2_5_vl-7b", "qwen2.5vl/model_7b.json", [32, 0], [12, 16]),
        ("qwen2_5_vl-32b", "qwen2.5vl/model_32b.json", [32] + [0] * 7, [1] + [9] * 7),
        ("qwen2_5_vl-72b", "qwen2.5vl/model_72b.json", [32] + [0] * 7, [6] + [11] * 6 + [8]),
        ("llava-7b", "llava1.5/model_7b.json", [24], [32]),
        ("llava-13b", "llava1.5/model_13b.json", [24, 0], [16, 24]),
    ],
)
def test_examples_describe_the_published_models(name: str, file: str, vit: list[int], llm: list[int]) -> None:
    model = read_model(EXAMPLES.parent / file)
    assert differences(model, get_family(SIZES[name].family).from_hf_config(SIZES[name].hf)) == []
    assert model.image_encoder is not None
    assert (model.image_encoder.vision_encoder.pipeline_num_layers, model.text_decoder.pipeline_num_layers) == (vit, llm)


def public_model() -> dict[str, Any]:
    """The 3B model with every further key that its public file holds."""
    model = json.loads((EXAMPLES / "model_3b.json").read_text())
    types = {"bf16": True, "params_dtype": "bf16"}
    model |= {"model_id": "qwen2_5vl", "text_encoder": None, "video_encoder": None}
    model["image_encoder"]["vision_encoder"] |= {
        **types,
        "fp16": False,
        "model_id": "qwen2vit",
        "llm_hidden_size": 1280,
        "intermediate_size": 3420,
        "use_fused_rotary_pos_emb": True,
        "post_layer_norm": False,
        "attention_mask_type": "general",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    model["image_encoder"]["vision_projector"] |= {
        **types,
        "num_layers": 1,
        "gated_linear_unit": False,
        "bias_activation_fusion": False,
        "add_bias_linear": True,
        "context_parallel_size": 1,
    }
    model["text_decoder"] |= {
        **types,
        "seq_length": 1024,
        "disable_bias_linear": True,
        "use_fused_rotary_pos_emb": True,
        "attention_softmax_in_fp32": True,
        "parallel_output": True,
        "sequence_parallel": True,
        "group_query_attention": True,
        "rope_scaling": None,
        "use_remove_padding": False,
    }
    return model


def test_public_model_file_ports_by_removing_four_keys() -> None:
    model = public_model()
    with pytest.raises(ConfigError) as error:
        parse_model(model, "model.json", FACTS)
    assert str(error.value).startswith(
        "model.json: MindSpeed-MM keys without effect here; remove them: image_encoder.vision_encoder.llm_hidden_size, "
        "image_encoder.vision_encoder.use_fused_rotary_pos_emb, text_decoder.use_fused_rotary_pos_emb, text_decoder.attention_softmax_in_fp32"
    )
    del model["image_encoder"]["vision_encoder"]["llm_hidden_size"]
    del model["image_encoder"]["vision_encoder"]["use_fused_rotary_pos_emb"]
    del model["text_decoder"]["use_fused_rotary_pos_emb"]
    del model["text_decoder"]["attention_softmax_in_fp32"]
    ported = parse_model(model, "model.json", FACTS).model_dump()
    own = read_model(EXAMPLES / "model_3b.json").model_dump()
    ported["model_id"] = own["model_id"]
    ported["image_encoder"]["vision_encoder"]["model_id"] = own["image_encoder"]["vision_encoder"]["model_id"]
    assert ported == own


def test_a_key_without_effect_says_so_and_not_unknown() -> None:
    model = public_model()
    with pytest.raises(ConfigError, match=r"'patch' is a MindSpeed-MM key without effect here; remove it \("):
        parse_model({"model_id": model["model_id"], "patch": {"bridge_patch": True}}, "model.json")


def test_sizes_of_components_are_those_of_the_run() -> None:
    """Keys of a hetero-parallel model.json."""
    facts = replace(FACTS, tensor_model_parallel_size=4, vision_tensor_model_parallel_size=1)

    own = EXAMPLES / "model_3b.json"

    def fault(section: str, key: str, value: int, facts: RunFacts) -> str:
        model = json.loads(own.read_text())
        model[section][key] = value
        with pytest.raises(ConfigError) as caught:
            parse_model(model, "model.json", facts)
        return str(caught.value)

    model = json.loads(own.read_text())
    model["image_encoder"] |= {"tp": 1, "pp": None, "cp": None}
    model["text_decoder"]["tp"] = 4
    assert parse_model(model, "model.json", facts) == read_model(own)
    shared = replace(facts, vision_tensor_model_parallel_size=None)
    assert "image_encoder.tp: 1 does not agree with parallel.vision_tensor_model_parallel_size" in fault("image_encoder", "tp", 1, shared)
    assert "text_decoder.tp: 2 does not agree with parallel.tensor_model_parallel_size" in fault("text_decoder", "tp", 2, facts)
    assert "image_encoder.pp: 2 cannot be had here, only null: the stages of a component are" in fault("image_encoder", "pp", 2, facts)
    assert "image_encoder.cp: 2 cannot be had here, only null: parallel.context_parallel_size" in fault("image_encoder", "cp", 2, facts)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        (
            "vision",
            "intermediate_size",
            41,
            "intermediate_size: 41 does not agree with ffn_hidden_size, which is 40; correct it or remove the key",
        ),
        (
            "vision",
            "use_vit_dp",
            True,
            "use_vit_dp: true cannot be had here, only false or null: it is not supported yet; remove",
        ),
        ("vision", "num_query_groups", 2, "num_query_groups: 2 does not agree with num_attention_heads, which is 4"),
        ("text", "context_parallel_size", 2, "text_decoder.context_parallel_size: 2 does not agree with parallel.context_parallel_size"),
        ("vision", "sequence_parallel", False, "vision_encoder.sequence_parallel: false does not agree with parallel.sequence_parallel"),
        ("text", "params_dtype", "fp16", "text_decoder.params_dtype: 'fp16' does not agree with the run's dtype, which is 'bf16'"),
        ("text", "bf16", False, "text_decoder.bf16: false does not agree with the run's dtype, which is true"),
        ("text", "seq_length", 2048, "text_decoder.seq_length: 2048 does not agree with the run's seq_length, which is 1024"),
        (
            "text",
            "group_query_attention",
            False,
            "false does not agree with num_query_groups < num_attention_heads, which is true",
        ),
        ("text", "disable_bias_linear", False, "disable_bias_linear: false does not agree with add_bias_linear, negated, which is true"),
        (
            "text",
            "rope_scaling",
            {"type": "yarn"},
            "text_decoder.rope_scaling: {'type': 'yarn'} does not agree with mrope_section and mrope_interleaved, which is {'mrope_int",
        ),
    ],
)
def test_repeated_values_must_agree(files: Files, section: str, key: str, value: Any, message: str) -> None:
    getattr(files, section)[key] = value
    with pytest.raises(ConfigError) as error:
        parse_model(files.model, "model.json", FACTS)
    assert message in str(error.value)


def test_unknown_keys_are_refused_at_every_depth(files: Files) -> None:
    files.text["foo"] = 1
    with pytest.raises(ConfigError, match=r"model.json: unknown key 'text_decoder.foo'; remove it or correct its name"):
        parse_model(files.model, "model.json")
    del files.text["foo"]
    files.vision["num_layer"] = 4
    with pytest.raises(ConfigError, match=r"unknown key 'image_encoder.vision_encoder.num_layer' \(did you mean 'num_layers'\?\)"):
        parse_model(files.model, "model.json")


def test_unknown_activation_names_the_known_ones(files: Files) -> None:
    files.text["activation_func"] = "quickgelu"
    with pytest.raises(ConfigError) as error:
        parse_model(files.model, "model.json")
    assert str(error.value) == (
        "model.json: text_decoder.activation_func: Input should be 'silu', 'quick_gelu', 'gelu' or 'gelu_pytorch_tanh', "
        "got 'quickgelu' (did you mean 'quick_gelu'?)"
    )


def test_unknown_family_and_missing_model_id(files: Files) -> None:
    files.model["model_id"] = "qwen2_5_vll"
    with pytest.raises(ConfigError, match="unknown model family 'qwen2_5_vll' .did you mean 'qwen2_5_vl'"):
        parse_model(files.model, "model.json")
    with pytest.raises(ConfigError, match="model.json: model_id is missing; name the model family"):
        parse_model({"text_decoder": {}}, "model.json")


@pytest.mark.parametrize("layers", [[5, -1], [], [[1, 1], [2]], [1.5, 2.5], [[1], 3]])
def test_bad_layer_lists_are_refused(files: Files, layers: list[Any]) -> None:
    files.text["pipeline_num_layers"] = layers
    with pytest.raises(ConfigError, match="model.json: text_decoder.pipeline_num_layers: layers per stage: "):
        parse_model(files.model, "model.json")


def test_true_is_no_number(files: Files) -> None:
    files.text["num_layers"] = True
    with pytest.raises(ConfigError, match="text_decoder.num_layers: expected a number, got true"):
        parse_model(files.model, "model.json")


def test_yaml_and_json_read_alike(files: Files) -> None:
    import yaml

    folder = files.write()
    (folder / "model.yaml").write_text(yaml.safe_dump(files.model))
    assert read_model(folder / "model.yaml") == read_model(folder / "model.json")


def test_bad_json_names_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"model_id": "qwen2_5_vl",\n "text_decoder": }')
    with pytest.raises(ConfigError, match=r"model.json: line 2, column 18: not valid JSON"):
        read_model(tmp_path / "model.json")
    with pytest.raises(ConfigError, match=r"none.json: no such file"):
        read_model(tmp_path / "none.json")


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('{"profile": {}, "profile": {"enable": true}}')
    with pytest.raises(ConfigError, match=r"tools.json: key 'profile' stands twice in one mapping; remove one"):
        read_tools(tmp_path / "tools.json")
    (tmp_path / "tools.yaml").write_text("profile: {}\nprofile: {enable: true}\n")
    with pytest.raises(ConfigError, match=r"tools.yaml: key 'profile' stands twice in one mapping; remove one"):
        read_tools(tmp_path / "tools.yaml")


def public_data() -> dict[str, Any]:
    data = json.loads((EXAMPLES / "data.json").read_text())
    parameters = data["dataset_param"]
    parameters["preprocess_parameters"] |= {
        "use_fast_tokenizer": True,
        "split_special_tokens": False,
        "video_max_pixels": 16384,
        "video_min_pixels": 0,
        "video_fps": 2.0,
        "video_maxlen": 64,
    }
    parameters["basic_parameters"] |= {
        "cache_dir": "./data/cache_dir",
        "preprocessing_batch_size": 1000,
        "preprocessing_num_workers": 16,
        "tool_format": None,
    }
    parameters["attr"] |= {"system": None, "videos": None, "system_tag": None}
    return data


def test_a_public_data_file_is_read_as_it_is(tmp_path: Path) -> None:
    parameters = parse_data(public_data(), "data.json", tmp_path).dataset_param
    preprocess, basic = parameters.preprocess_parameters, parameters.basic_parameters
    assert (preprocess.image_max_pixels, preprocess.video_max_pixels, preprocess.video_fps, preprocess.video_maxlen) == (262144, 16384, 2.0, 64)
    assert parameters.attr.system_tag is None
    assert basic.dataset == str(tmp_path / "data" / "mllm_format_llava_instruct_data.json")
    assert (basic.cache_dir, basic.preprocessing_num_workers) == (str(tmp_path / "data" / "cache_dir"), 16)


def test_data_keys_without_effect_are_named_together(tmp_path: Path) -> None:
    data = public_data()
    data["dataset_param"]["preprocess_parameters"] |= {"image_resolution": 512, "audio_sampling_rate": 16000}
    data["dataloader_param"] |= {"num_workers": 2}
    with pytest.raises(ConfigError, match="MindSpeed-MM keys without effect here; remove them") as error:
        parse_data(data, "data.json", tmp_path)
    assert all(key in str(error.value) for key in ("image_resolution", "audio_sampling_rate", "dataloader_param.num_workers"))


def test_packing_is_switched_on_elsewhere(files: Files, tmp_path: Path) -> None:
    """MindSpeed-MM reads attr.packing; here it is basic_parameters.packing, and passing over the other would train unpacked."""
    files.data["dataset_param"].setdefault("attr", {})["packing"] = True
    with pytest.raises(
        ConfigError, match=r"data.json: dataset_param.attr.packing: true cannot be had here, only false or null: .*basic_parameters.packing"
    ):
        parse_data(files.data, "data.json", tmp_path)


def test_relative_paths_start_from_the_base(files: Files) -> None:
    files.data["dataset_param"]["basic_parameters"]["dataset"] = "a.json, sub/b.json,/c.json"
    folder = files.write()
    parameters = read_data(folder / "data.json", base=folder).dataset_param
    assert parameters.basic_parameters.dataset == f"{folder}/a.json,{folder}/sub/b.json,/c.json"


@pytest.mark.parametrize("folder", ["qwen2vl", "qwen2.5vl", "llava1.5"])
def test_data_files_of_examples_are_read(folder: str, tmp_path: Path) -> None:
    parameters = read_data(EXAMPLES.parent / folder / "data.json", base=tmp_path).dataset_param
    assert parameters.basic_parameters.dataset == str(tmp_path / "data" / "mllm_format_llava_instruct_data.json")


def test_tools_file(tmp_path: Path) -> None:
    tools = read_tools(EXAMPLES / "tools.json", base=tmp_path)
    assert read_tools(EXAMPLES.parent / "qwen2vl" / "tools.json", base=tmp_path) == tools
    assert tools.profile.static_param.save_path == str(tmp_path / "profiling")
    assert parse_tools({}, "tools.json", tmp_path).memory_profile.save_path == str(tmp_path / "memory_snapshot")
    with pytest.raises(ConfigError, match="static_param: end_step 3 must be larger than start_step 3"):
        parse_tools({"profile": {"static_param": {"start_step": 3, "end_step": 3}}}, "tools.json", tmp_path)
    with pytest.raises(ConfigError, match="'sorafeature' is a MindSpeed-MM key without effect here"):
        parse_tools({"sorafeature": {}}, "tools.json", tmp_path)
    with pytest.raises(ConfigError, match="profile.profile_type: 'dynamic' cannot be had here, only 'static'"):
        parse_tools({"profile": {"profile_type": "dynamic"}}, "tools.json", tmp_path)


def test_the_page_of_public_keys_is_current() -> None:
    assert (EXAMPLES.parents[1] / "docs" / "public-keys.md").read_text() == keys_markdown()


def test_the_example_of_the_page_of_data_json_passes_the_check(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    from tangram.config.preflight import check_run

    page = (EXAMPLES.parents[1] / "docs" / "data-json.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    files.data = json.loads(example)
    folder = files.write()
    parameters = files.data["dataset_param"]
    for path, target in (
        (parameters["preprocess_parameters"]["model_name_or_path"], "tokenizer"),
        (parameters["basic_parameters"]["dataset"], "samples.json"),
    ):
        (folder / path).parent.mkdir()
        (folder / path).symlink_to(folder / target)
    monkeypatch.chdir(folder)
    found = check_run(files.run("--seq-length", "2048", "--eval-interval", "2", "--eval-iters", "1"), None)
    assert not found.errors
