"""The six-section run file: sections, overrides, paths, and the dump that reads back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tangram.config.flags import parse_flags
from tangram.config.model import ModelConfig
from tangram.config.parsing import leaf_keys, merge, section_at
from tangram.config.run import RunConfig
from tangram.config.yaml_config import dump, read_run
from tangram.errors import ConfigError
from tests.config.conftest import EXAMPLES, Files

RUN = """
backend: megatron
model: {config: model.json}
data: {config: data.json}
training: {lr: 1.0e-3, train_iters: 10, seq_length: 64}
"""


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", '"1e-5"', "0.00001"])
def test_numbers_written_as_strings(files: Files, text: str) -> None:
    assert read_run(files.run_file(RUN.replace("1.0e-3", text))).training.lr == 1e-5
    assert read_run(files.run_file(RUN), [f"training.lr={text}"]).training.lr == 1e-5


def test_words_for_numbers_name_the_key(files: Files) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml: training.lr: Input should be a valid number, unable to parse string as a number, got 'abc'"):
        read_run(files.run_file(RUN.replace("1.0e-3", "abc")))
    with pytest.raises(ConfigError, match=r"run.yaml: training.train_iters: expected a number, got true"):
        read_run(files.run_file(RUN.replace("train_iters: 10", "train_iters: yes")))


@pytest.mark.parametrize("setting", ["lr=.inf", "lr=inf", "weight_decay=.inf", "clip_grad=nan", "adam_eps=.inf", f"seed={2**32}"])
def test_numbers_that_no_run_can_use(files: Files, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"run.yaml: training.{setting.split('=')[0]}: Input should be "):
        read_run(files.run_file(RUN), [f"training.{setting}"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr: 1.0e-3", "lr: 1.0e-3, learnig_rate: 1", "run.yaml: unknown key 'training.learnig_rate'"),
        ("lr: 1.0e-3", "lr: 1.0e-3, micro_batchsize: 1", "unknown key 'training.micro_batchsize' (did you mean 'micro_batch_size'?)"),
        (
            "lr: 1.0e-3",
            "lr: 1.0e-3, recompute_granularity: full",
            "belongs under features: write features.recompute_granularity",
        ),
        ("lr: 1.0e-3", "lr: 1.0e-3, plugin: [a.py]", "training.plugin: 'plugin' belongs under model: write model.plugin"),
        ("backend: megatron", "backend: megatron\nseed: 1", "'seed' belongs under training: write training.seed"),
        ("backend: megatron", "backend: megatron\nfeature: {}", "unknown section 'feature' (did you mean 'features'?)"),
        ("backend: megatron", "backend: fsdp", "backend: Input should be 'megatron' or 'fsdp2', got 'fsdp' (did you mean 'fsdp2'?)"),
        (
            "backend: megatron",
            "parallel: {context_parallel_size: 0}",
            "parallel.context_parallel_size: Input should be greater than or equal to 1, got 0",
        ),
        (
            "backend: megatron",
            "parallel: {tensor_parallel_size: 2}",
            "'parallel.tensor_parallel_size' (did you mean 'tensor_model_parallel_size'?)",
        ),
        ("backend: megatron", "features: 3", "features: expected a mapping of keys to values, got 3"),
        ("{config: model.json}", "{}", "model: give config (the path of model.json, or its content) or hf_dir"),
        ("{config: model.json}", "{config: model.json, overrides: {text_decoder: {foo: 1}}}", "unknown key 'text_decoder.foo'"),
        ("{config: data.json}", "{config: data.json, dataset_param: {foo: 1}}", "unknown key 'dataset_param.foo'"),
        ("{config: data.json}", "{config: nothing.json}", "nothing.json: no such file"),
        ("lr: 1.0e-3, ", "", "run.yaml: training.lr is missing; add it"),
    ],
)
def test_faults_name_the_key_and_the_mend(files: Files, old: str, new: str, message: str) -> None:
    assert old in RUN
    with pytest.raises(ConfigError) as error:
        read_run(files.run_file(RUN.replace(old, new)))
    assert message in str(error.value)


def test_overrides(files: Files) -> None:
    path = files.run_file(RUN)
    run = read_run(
        path,
        [
            "parallel.tensor_model_parallel_size=2",
            "data.dataset_param.basic_parameters.max_samples=5",
            "model.overrides.text_decoder.freeze=true",
            "training.save=out",
            "features.freeze_vision_encoder=false",
        ],
    )
    assert run.parallel.tensor_model_parallel_size == 2
    assert run.data.dataset_param.basic_parameters.max_samples == 5
    assert run.model.config.text_decoder.freeze
    assert run.training.save == str(files.folder / "out")
    assembled = run.assembled_model()
    assert assembled.image_encoder is not None
    assert not assembled.image_encoder.vision_encoder.freeze
    for override, message in (
        ("training.lr", "write section.key=value"),
        ("--lr=3", "write section.key=value"),
        ("training.lr.x=3", "override 'training.lr.x=3': lr holds a value, not keys"),
        ("training.lr=[1", "override 'training.lr=[1': not valid YAML: "),
        ("training={lr: 1, lr: 2}", "key 'lr' stands twice in one mapping; remove one"),
        ("training.lrr=3", "unknown key 'training.lrr'"),
    ):
        with pytest.raises(ConfigError) as error:
            read_run(path, [override])
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "which"),
    [
        ("training.lr=1", "training.lr=2", "both set training.lr; remove one"),
        ("training.lr=2", "training={lr: 1, train_iters: 3}", "both set training.lr, the one as a part of the other; remove one"),
        ("training={lr: 1, train_iters: 3}", "training.lr=2", "both set training.lr, the one as a part of the other; remove one"),
    ],
)
def test_no_override_replaces_another(first: str, second: str, which: str, files: Files) -> None:
    with pytest.raises(ConfigError) as error:
        read_run(files.run_file(RUN), [first, "features.freeze_vision_encoder=false", second])
    assert str(error.value) == f"overrides {first!r} and {second!r} {which}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# nothing but a comment\n", "the file is empty"),
        ("? [training]\n: 3\n", "found unhashable key"),
        ("training: 2026-13-45\n", "month must be in 1..12; correct it, or quote the value"),
        ("a: " + "[" * 1500, "nested too deeply"),
        ("training: *nowhere\n", "found undefined alias 'nowhere'"),
    ],
)
def test_a_file_that_is_no_run_file_is_told_in_one_line(text: str, message: str, files: Files) -> None:
    path = files.run_file(text)
    with pytest.raises(ConfigError) as error:
        read_run(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value) and "\n" not in str(error.value)


def test_what_is_no_file_is_called_what_it_is(files: Files) -> None:
    for path, message in (
        (str(files.folder), "is a folder; give the path of a file in it"),
        ("/dev/null", "no regular file"),
        (str(files.folder / "gone.yaml"), "no such file"),
        ("x" * 5000, "File name too long"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_run(path)


def test_anchors_merge_and_own_keys_win(files: Files) -> None:
    """YAML 1.1's merge key, by its own example: keys of the mapping stand before those merged in."""
    text = RUN.replace("training: {", "x_is_no_section: &common {seed: 7, log_interval: 3}\ntraining: {<<: *common, log_interval: 5, ")
    assert text != RUN
    with pytest.raises(ConfigError, match="unknown section 'x_is_no_section'"):
        read_run(files.run_file(text))
    text = RUN.replace("training: {", "training: {<<: {seed: 7, log_interval: 3}, log_interval: 5, ")
    training = read_run(files.run_file(text)).training
    assert (training.seed, training.log_interval) == (7, 5)


def test_flags_and_run_file_give_the_same_run(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files.folder)
    flags = parse_flags(files.flags("--lr-decay-style", "cosine", "--num-workers", "0", "--log-interval", "1", "--seed", "42")).run
    assert read_run(files.run_file(RUN)) == flags


def test_relative_paths_start_from_the_run_file(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.data["dataset_param"]["basic_parameters"] = {"dataset": "samples.json", "dataset_dir": "."}
    path = files.run_file(RUN)
    monkeypatch.chdir("/")
    parameters = read_run(path).data.dataset_param.basic_parameters
    assert (parameters.dataset, parameters.dataset_dir) == (str(files.folder / "samples.json"), str(files.folder))


def test_the_model_from_a_hugging_face_directory(files: Files) -> None:
    files.hf["rms_norm_eps"] = 3e-6
    files.hf_dir()
    run = read_run(files.run_file(RUN.replace("config: model.json", "hf_dir: hf, overrides: {text_decoder: {init_method_std: 0.5}}")))
    text = run.model.config.text_decoder
    assert (text.layernorm_epsilon, text.init_method_std, text.mrope_section) == (3e-6, 0.5, [1, 1, 2])
    assert run.model.hf_dir == str(files.folder / "hf")
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        read_run(files.run_file(RUN.replace("config: model.json", "hf_dir: nowhere")))


def test_the_dump_reads_back_the_same(files: Files, tmp_path: Path) -> None:
    for run in (read_run(files.run_file(RUN)), files.run("--save", "out", "--bf16"), read_run(EXAMPLES / "run.yaml")):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        (tmp_path / "elsewhere" / "run.yaml").write_text(dump(run))
        assert read_run(tmp_path / "elsewhere" / "run.yaml") == run


def other(value: Any) -> list[Any]:
    """Values that differ from ``value``, likely ones first."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, value * 2, value / 2]
    if isinstance(value, str):
        words = (
            "megatron_cp_algo nccl bf16 hf level2 ArithmeticUtilization python offline linear per_token_loss interleave_over sequential sample skip"
        )
        return [*words.split(), value + "x"]
    if isinstance(value, list):
        return [[*value, 1], [*value, "x"]]
    return [True, 1, 0.1, "gloo", "alltoall", "full", "selective", "uniform", "pad", "flash", "x", [[4]]]


FIXED = {
    ("backend",),
    ("training", "optimizer"),
    ("data", "dataset_param", "dataset_type"),
    ("data", "dataset_param", "own"),
    ("data", "dataset_param", "attr", "formatting"),
    ("data", "dataloader_param", "dataloader_mode"),
    ("data", "dataloader_param", "sampler_type"),
    ("data", "dataloader_param", "collate_param", "ignore_pad_token_for_loss"),
}
TOGETHER = {
    ("parallel", "overlap_param_gather"): {"parallel": {"use_distributed_optimizer": True, "overlap_grad_reduce": True}},
    ("parallel", "ulysses_degree_in_cp"): {
        "parallel": {"context_parallel_size": 8, "context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2}
    },
    ("parallel", "sequence_parallel"): {"parallel": {"tensor_model_parallel_size": 2}},
    ("training", "eval_iters"): {"training": {"eval_interval": 1}},
    ("training", "eval_interval"): {"training": {"eval_iters": 1}},
    ("training", "save_interval"): {"training": {"save": "/x"}},
    ("training", "min_lr"): {"training": {"lr": 1e3}},
    ("training", "lr_warmup_init"): {"training": {"lr": 1e3}},
    ("training", "save_total_limit"): {"training": {"save": "/x", "save_interval": 1}},
    ("training", "save_hf_interval"): {"training": {"save": "/x"}},
    ("training", "save_async"): {"training": {"save": "/x"}},
    ("training", "save_format"): {"training": {"save": "/x"}},
    ("model", "load_format"): {"model": {"load": "/x"}},
    ("data", "dataset_param", "basic_parameters", "interleave_probs"): {
        "data": {"dataset_param": {"basic_parameters": {"mix_strategy": "interleave_over"}}}
    },
    ("features", "chunk_size"): {"features": {"enable_chunk_loss": True}},
    ("features", "recompute_method"): {"features": {"recompute_granularity": "full", "recompute_num_layers": 1}},
    ("features", "recompute_num_layers"): {"features": {"recompute_granularity": "full", "recompute_method": "block"}},
    ("features", "recompute_granularity"): {"features": {"recompute_method": "block", "recompute_num_layers": 1}},
}


def test_every_key_shows_in_the_dump(files: Files) -> None:
    """The dump holds what ``model_dump`` holds, which is looked at for every key; the text, which takes longer, for one key of each section."""
    start = read_run(files.run_file(RUN)).model_dump()
    written = set()
    for path in leaf_keys(RunConfig):
        # The file of the other backend is dumped as it is; tests/config/test_fsdp2_schema.py.
        if path in FIXED or path[:2] == ("model", "config") or path[0] == "fsdp2":
            continue
        content = merge(start, TOGETHER.get(path, {}))
        before = at(content, path)
        after = next((run for value in other(before) if (run := with_value(content, path, value)) is not None), None)
        assert after is not None, f"no other value of {'.'.join(path)} is accepted"
        content = after.model_dump(mode="json")
        if path[:-1] not in written:
            written.add(path[:-1])
            text = yaml.load(dump(after), yaml.CSafeLoader)
            assert text == {name: content[name] for name in text} and path[0] in text
        shown = at(content, path)
        assert shown != before, path
        assert shown == at(after.model_dump(), path), path


def at(content: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        content = content[part]
    return content


def with_value(content: dict[str, Any], path: tuple[str, ...], value: Any) -> RunConfig | None:
    """The run with another value at ``path``; None where it is not accepted."""
    for part in reversed(path):
        value = {part: value}
    try:
        return RunConfig.model_validate(merge(content, value))
    except ValueError:
        return None


def test_fixed_keys_refuse_other_values(files: Files) -> None:
    for path in FIXED:
        content = read_run(files.run_file(RUN)).model_dump()
        section = content
        for part in path[:-1]:
            section = section[part]
        section[path[-1]] = "other"
        with pytest.raises(ValueError, match=path[-1]):
            RunConfig.model_validate(content)


def test_a_familys_own_keys_survive_the_dump(files: Files, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom tangram.config.model import ModelConfig\n"
        "from tangram.families.base import get_family, register_family\n"
        "class OwnConfig(ModelConfig):\n    extra_norm: bool = False\n"
        "register_family(replace(get_family('qwen2_5_vl'), name='own_vl', model_ids=(), config_class=OwnConfig))\n"
    )
    files.model |= {"model_id": "own_vl", "extra_norm": True}
    run = read_run(files.run_file(RUN.replace("config: model.json", "config: model.json, plugin: [own.py]")))
    (tmp_path / "dumped.yaml").write_text(dump(run))
    assert read_run(tmp_path / "dumped.yaml").model.config.model_dump()["extra_norm"] is True
    assert section_at(RunConfig, ("model", "config")) is ModelConfig
