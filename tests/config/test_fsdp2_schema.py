"""Run files of the fsdp2 backend: what is read, what is refused and how it is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.config.fsdp2 import Fsdp2Config
from tangram.config.fsdp2_keys import FSDP2, VALUES
from tangram.config.parsing import leaf_keys, section_at
from tangram.config.public_keys import NoEffect
from tangram.config.run import RunConfig
from tangram.config.yaml_config import dump, read_run
from tangram.errors import ConfigError, TangramError
from tests.config.fsdp2_kit import CONTENT, write_run


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_run(path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.recompute=true", "'model.recompute' belongs under features: write features.recompute"),
        ("parallel.recompute=true", "'parallel.recompute' belongs under features: write features.recompute"),
        ("parallel.recompute_plan={apply_modules: [a]}", "'parallel.recompute_plan' belongs under features: write features.recompute_plan"),
        ("model.loss_cfg={loss_type: raw}", "'model.loss_cfg' belongs under features: write features.loss_cfg"),
        ("model.enable_chunk_loss=true", "'model.enable_chunk_loss' belongs under features: write features.enable_chunk_loss"),
        ("features.freeze=[a]", "'features.freeze' belongs under model: write model.freeze"),
        ("features.loss_type=raw", "'features.loss_type' belongs under features.loss_cfg: write features.loss_cfg.loss_type"),
        ("training.param_dtype=bf16", "'training.param_dtype' belongs under parallel.fsdp_plan: write parallel.fsdp_plan.param_dtype"),
        ("lr=1", "'lr' belongs under training: write training.lr"),
        ("training.num_workers=3", "'training.num_workers' belongs under data.dataloader_param: write data.dataloader_param.num_workers"),
        ("model.plugin=[a]", "'model.plugin' belongs under training: write training.plugin"),
        ("features.chunk_size=3", "'features.chunk_size' belongs under features.chunkloss_plan: write features.chunkloss_plan.chunk_size"),
        ("features.apply_modules=[a]", "'features.apply_modules' belongs elsewhere: write parallel.fsdp_plan.apply_modules or"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_the_right_one(override: str, said: str, tmp_path: Path) -> None:
    assert refusal(write_run(tmp_path), override).startswith(said)


@pytest.mark.parametrize(
    ("override", "here"),
    [
        ("parallel.tensor_model_parallel_size=2", "weights are shared out by parallel.fully_shard_parallel_size"),
        ("parallel.context_parallel_size=2", "write parallel.ulysses_parallel_size"),
        ("training.min_lr=0", "write training.lr_min"),
        ("training.global_batch_size=8", "write training.gradient_accumulation_steps"),
        ("training.lr_warmup_fraction=0.1", "write training.lr_warmup_ratio"),
        ("training.eval_interval=3", "write training.val_interval"),
        ("training.dtype=bf16", "write parallel.fsdp_plan.param_dtype"),
        ("features.freeze_vision_encoder=true", "name the modules in model.freeze"),
        ("features.recompute_granularity=full", "write features.recompute and features.recompute_plan.apply_modules"),
        ("model.hf_dir=a", "write model.model_name_or_path"),
    ],
)
def test_settings_of_the_other_backend_are_told_their_name_here(override: str, here: str, tmp_path: Path) -> None:
    key = override.split("=")[0]
    assert refusal(write_run(tmp_path), override).startswith(f"{key} is a setting of another backend; here {here}")


def test_every_setting_of_the_other_backend_is_either_of_this_one_too_or_told_its_name(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    own = {key[-1] for key in leaf_keys(Fsdp2Config)}
    for section, name in (key for key in leaf_keys(RunConfig) if len(key) == 2 and key[0] in ("parallel", "features", "training")):
        if name not in own:
            said = refusal(path, f"{section}.{name}=1")
            assert "is a setting of another backend" in said, said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.micro_batchsize=2", "unknown key 'training.micro_batchsize' (did you mean 'micro_batch_size'?)"),
        ("parallel.fsdp_plan.apply_module=[a]", "'parallel.fsdp_plan.apply_module' belongs under features.chunkloss_plan"),
        ("data.dataset_param.dataset_typ=a", "unknown key 'data.dataset_param.dataset_typ' (did you mean 'dataset_type'?)"),
        ("trainig={lr: 1}", "unknown key 'trainig' (did you mean 'training'?)"),
        ("training.lr_scaling_plan=[{match: a, scal: 2}]", "unknown key 'training.lr_scaling_plan.0.scal'"),
        ("training.lr_scaling_plan=[{match: '('}]", "lr_scaling_plan.0.match: '(' is no regular expression (missing ), unterminated"),
        ("parallel=3", "parallel: expected a mapping of keys to values, got 3"),
        ("features.chunkloss_plan=7", "features.chunkloss_plan: expected a mapping of keys to values, got 7"),
        ("model.freeze=3", "model.freeze: Input should be a valid list, got 3"),
        ("parallel.fsdp_plan.param_dtype=fp8", "parallel.fsdp_plan.param_dtype: Input should be 'fp16', 'bf16' or 'fp32', got 'fp8'"),
        ("backend=3", "backend: Input should be 'megatron' or 'fsdp2', got 3"),
        ("training=", "training: train_iters None and train_epochs None: give one of them"),
        ("training.train_epochs=1", "training: train_iters 10 and train_epochs 1: give one of them"),
        ("training.lr_min=1", "training: lr_min 1 is larger than lr 0.001"),
        ("training.lr_start=1", "training: lr_start 1 is larger than lr 0.001"),
        ("training.save_interval=1", "training: save_interval 1 needs save"),
        ("training.save_async=true", "training: save_async needs save"),
        ("training.val_iters=3", "training: val_iters 3 does nothing without val_interval"),
        ("model.model_name_or_path=Qwen/Qwen2.5-VL-3B-Instruct", "no such folder; give the model's Hugging Face directory (nothing is downloaded)"),
        ("training.plugin=nowhere.py", "no such file or folder"),
        ("training.plugin=nowhere.at.all", "plug-in nowhere.at.all: no such file or folder, nor a package that Python finds"),
    ],
)
def test_nonsense_is_told_in_one_line(override: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(write_run(tmp_path), override)


def test_public_keys_without_effect_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    for place, entries in FSDP2.items():
        for key, entry in entries.items():
            said = refusal(path, f"{'.'.join((*place, key))}={{recipe_name: a, enable: true}}")
            assert entry.why in said  # type: ignore[union-attr]
            assert f"'{'.'.join((*place, key))}' is a MindSpeed-MM key without effect here" in said or not isinstance(entry, NoEffect)
    for place, values in VALUES.items():
        for value, mend in values.items():
            assert mend in refusal(path, f"{'.'.join(place)}={json.dumps(value)}")


def test_public_keys_that_say_what_is_done_anyway_may_stay(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    harmless = ["parallel.tensor_parallel_size=1", "parallel.ring_attention_size=1", "training.load_strict=true", "training.lora={enable: false}"]
    harmless += ["training.quantization_plan={recipe_name: null, extra_args: {}}", "model.mtp_num_layers=0", "training.ckpt_manager=dcp"]
    harmless += ["data.dataloader_param.persistent_workers=true", "features.enable_ep_balance=false", "training.load="]
    assert read_run(path, harmless) == read_run(path)


def test_data_keys_of_public_files(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    loading = "data.dataloader_param"
    collate = f"{loading}.collate_param={{collator_id: qwen3vl, pad_to_multiple_of: 8, ignore_pad_token_for_loss: true}}"
    run = read_run(path, [f"{loading}.num_workers=3", f"{loading}.prefetch_factor=2", f"{loading}.enable_preload=true", collate])
    loaded = run.data.dataloader_param
    assert (run.training.num_workers, loaded.prefetch_factor, loaded.enable_preload) == (3, 2, True)
    assert (loaded.collate_param.model_name, loaded.pad_to_multiple_of) == ("qwen3vl", 8)
    assert read_run(path).training.num_workers == 2
    assert "say the same thing; give one of them" in refusal(path, f"{loading}.collate_param={{collator_id: a, model_name: b}}")


def test_data_and_tools_may_be_files_of_their_own(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    whole = read_run(path)
    (tmp_path / "data.json").write_text(json.dumps(CONTENT["data"]))
    (tmp_path / "tools.yaml").write_text("profile: {enable: true}")
    path.write_text(yaml.safe_dump({**CONTENT, "data": {"config": "data.json"}, "tools": {"config": "tools.yaml"}}))
    run = read_run(path, ["data.dataset_param.basic_parameters.max_samples=3"])
    assert run.tools.profile.enable
    assert run.data.dataset_param.basic_parameters.max_samples == 3
    assert read_run(path).data == whole.data
    assert "nothing.json: no such file" in refusal(path, "data.config=nothing.json")


def test_the_length_of_samples_is_that_of_the_data_where_none_is_given(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    assert read_run(path).training.seq_length == 1024
    assert read_run(path, ["data.dataset_param.basic_parameters.cutoff_len=77"]).training.seq_length == 77
    assert read_run(path, ["training.seq_length=99", "data.dataset_param.basic_parameters.cutoff_len=77"]).training.seq_length == 99


def test_validation_settings(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    found = [read_run(path, given).training for given in (["training.val_interval=0"], ["training.val_interval=5"])]
    assert [(one.eval_interval, one.eval_iters) for one in found] == [(None, 0), (5, None)]
    assert read_run(path, ["training.val_interval=5", "training.val_iters=2"]).training.eval_iters == 2


def test_a_dump_reads_back_as_the_same_run_from_another_folder(tmp_path: Path) -> None:
    changes = {"training": {"save": "out", "plugin": ["own.py"], "lr_scaling_plan": [{"match": "lm_head", "scale": 0.5}], "metrics_file": "m.jsonl"}}
    (tmp_path / "own.py").write_text("")
    run = read_run(write_run(tmp_path, changes), ["parallel.fsdp_plan.hook_modules=[a.{*}]", "data.dataloader_param.shuffle=true"])
    (tmp_path / "elsewhere").mkdir()
    written = tmp_path / "elsewhere" / "again.yaml"
    written.write_text(dump(run))
    assert read_run(written) == run
    assert run.fsdp2 is not None
    assert run.fsdp2.training.plugin == [str(tmp_path / "own.py")]


def value_at(content: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        content = content[part]
    return content


def test_every_key_can_be_overridden(tmp_path: Path) -> None:
    path = write_run(tmp_path, {"training": {"save": "out"}})
    run = read_run(path)
    whole = yaml.safe_load(dump(run))
    for key in leaf_keys(Fsdp2Config):
        if section_at(Fsdp2Config, key[:-1]) is not section_at(Fsdp2Config, ("training", "lr_scaling_plan")):
            assert read_run(path, [f"{'.'.join(key)}={json.dumps(value_at(whole, key))}"]) == run, key


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[model.visual.blocks.{*},lm_head]", ["model.visual.blocks.{*}", "lm_head"]),
        ("[model.visual.blocks.{0-3}, *.mlp]", ["model.visual.blocks.{0-3}", "*.mlp"]),
        ('["model.visual.blocks.{*}"]', ["model.visual.blocks.{*}"]),
        ("model.visual.blocks.{*},lm_head", ["model.visual.blocks.{*}", "lm_head"]),
        ("model.visual", ["model.visual"]),
        ("[]", []),
        ("", []),
    ],
)
def test_lists_of_patterns_on_the_command_line(text: str, expected: list[str], tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path), [f"parallel.fsdp_plan.apply_modules={text}", "features.chunkmbs_plan.chunk_arg_indexs=0,2"])
    assert run.fsdp2 is not None
    assert run.fsdp2.parallel.fsdp_plan.apply_modules == expected
    assert run.fsdp2.features.chunkmbs_plan.chunk_arg_indexs == [0, 2]


def test_a_file_that_names_no_backend_is_recognised(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    path.write_text(yaml.safe_dump({key: value for key, value in CONTENT.items() if key != "backend"}))
    assert refusal(path) == "parallel.fsdp_plan is of the fsdp2 backend; write backend: fsdp2 at the top of the file"


def test_plugins_may_be_packages_and_failures_name_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path)
    package = tmp_path / "elsewhere" / "own_fsdp2_models"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "model.py").write_text("import builtins\nbuiltins.own_fsdp2_model_was_imported = True\n")
    monkeypatch.syspath_prepend(str(package.parent))
    run = read_run(path, ["training.plugin=own_fsdp2_models/deep"])
    assert run.fsdp2 is not None and run.fsdp2.training.plugin == ["own_fsdp2_models/deep"]
    import builtins

    assert vars(builtins).pop("own_fsdp2_model_was_imported")
    (package / "deep" / "broken.py").write_text("\n1 / 0\n")
    said = refusal(path, "training.plugin=own_fsdp2_models.deep")
    assert said == "plug-in own_fsdp2_models.deep: broken.py, line 2: ZeroDivisionError: division by zero"


def test_reading_and_checking_needs_neither_torch_nor_ranks(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    code = (
        "import sys\nfrom tangram.config.yaml_config import read_run\nfrom tangram.config.preflight import check_run\n"
        f"report = check_run(read_run({str(path)!r}), 4)\nassert not report.errors, report.errors\n"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


KEYS = [".".join(key[:depth]) for key in leaf_keys(Fsdp2Config) for depth in range(1, len(key) + 1)]
WORDS = st.sampled_from(
    ["", "null", "-1", "0", "1e400", ".nan", "[]", "{}", "[[1]]", "{a: 1}", "yes", "x", "[a, {b: 2}]", "'", "a.{*}", "{*}", "&a *a", "!!x"]
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(overrides=st.lists(st.tuples(st.sampled_from(KEYS), st.one_of(WORDS, st.text(max_size=8))), min_size=1, max_size=2))
def test_any_value_anywhere_gives_a_run_or_one_line(overrides: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any" / "run.yaml"
    if not path.exists():
        write_run(path.parent)
    try:
        assert isinstance(read_run(path, [f"{key}={value}" for key, value in overrides]), RunConfig)
    except TangramError as error:
        assert str(error) and "\n" not in str(error)


def test_every_key_is_read_somewhere() -> None:
    root = Path(__file__).parents[2] / "tangram"
    kept_out = {"fsdp2.py", "fsdp2_keys.py"}
    source = "".join(path.read_text(encoding="utf-8") for path in root.rglob("*.py") if path.name not in kept_out)
    own = {key for key in leaf_keys(Fsdp2Config) if key[0] in ("parallel", "model", "features", "training")}
    unread = {".".join(key) for key in own if not re.search(rf"[.\"]{key[-1]}\b", source)}
    assert not unread
