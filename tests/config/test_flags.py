"""Launch flags: every one works, is compared, holds anyway or is refused with the mend."""

from __future__ import annotations

import argparse
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tangram.config.flag_table import BUILT_IN, CHECKED, REFUSED, WORKS, flags_markdown
from tangram.config.flags import build_parser, parse_flags
from tangram.config.run import RunConfig
from tangram.errors import ConfigError
from tests.config.conftest import EXAMPLES, Files

VALUES: dict[str, tuple[str, Any]] = {
    "--tensor-model-parallel-size": ("2", 2),
    "--vision-tensor-model-parallel-size": ("2", 2),
    "--pipeline-model-parallel-size": ("2", 2),
    "--virtual-pipeline-model-parallel-size": ("2", 2),
    "--context-parallel-size": ("2", 2),
    "--context-parallel-algo": ("megatron_cp_algo", "megatron_cp_algo"),
    "--expert-model-parallel-size": ("2", 2),
    "--moe-token-dispatcher-type": ("allgather", "allgather"),
    "--attention-backend": ("flash", "flash"),
    "--distributed-timeout-minutes": ("20", 20),
    "--distributed-backend": ("nccl", "nccl"),
    "--make-vocab-size-divisible-by": ("128", 128),
    "--micro-batch-size": ("3", 3),
    "--global-batch-size": ("6", 6),
    "--seq-length": ("128", 128),
    "--train-iters": ("7", 7),
    "--seed": ("3", 3),
    "--optimizer": ("adam", "adam"),
    "--lr": ("2e-5", 2e-5),
    "--min-lr": ("1e-6", 1e-6),
    "--lr-decay-style": ("constant", "constant"),
    "--lr-decay-iters": ("9", 9),
    "--lr-warmup-iters": ("2", 2),
    "--lr-warmup-fraction": ("0.1", 0.1),
    "--weight-decay": ("0", 0.0),
    "--clip-grad": ("0.0", 0.0),
    "--adam-beta1": ("0.8", 0.8),
    "--adam-beta2": ("0.95", 0.95),
    "--adam-eps": ("1e-6", 1e-6),
    "--log-interval": ("5", 5),
    "--exit-interval": ("4", 4),
    "--num-workers": ("0", 0),
    "--manual-gc-interval": ("50", 50),
    "--tensorboard-dir": ("/events", "/events"),
    "--wandb-project": ("eyes", "eyes"),
}
TOGETHER: dict[str, list[str]] = {
    "--sequence-parallel": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "--ulysses-degree-in-cp": [
        *("--context-parallel-size", "4", "--context-parallel-algo", "hybrid_cp_algo"),
        *("--ulysses-degree-in-cp", "2"),
    ],
    "--wandb-project": ["--wandb-project", "eyes", "--wandb-exp-name", "first", "--wandb-save-dir", "/wandb"],
    "--recompute-granularity": ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "2"],
    "--eval-interval": ["--eval-interval", "5", "--eval-iters", "2"],
    "--save-interval": ["--save", "out", "--save-interval", "5"],
    "--async-save": ["--save", "out", "--async-save"],
    "--save-total-limit": ["--save", "out", "--save-total-limit", "2"],
    "--save-hf-interval": ["--save", "out", "--save-hf-interval", "5"],
    "--overlap-param-gather": ["--overlap-param-gather", "--overlap-grad-reduce", "--use-distributed-optimizer"],
}
COMPANIONS = {
    "--wandb-exp-name": "--wandb-project",
    "--wandb-save-dir": "--wandb-project",
    "--recompute-method": "--recompute-granularity",
    "--recompute-num-layers": "--recompute-granularity",
    "--eval-iters": "--eval-interval",
    "--save": "--save-interval",
}
FILES = ("--mm-model", "--mm-data", "--mm-tool", "--plugin", "--load")


def at(run: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), run)


@pytest.mark.parametrize("name", [name for name in WORKS if name not in FILES])
def test_every_working_flag_reaches_the_run(files: Files, name: str) -> None:
    flag = WORKS[name]
    without = at(files.run(), flag.key)
    if name in TOGETHER or name in COMPANIONS:
        words = TOGETHER[COMPANIONS.get(name, name)]
        given = words[words.index(name) + 1] if flag.const is None else None
        expected = flag.const if flag.const is not None else str(Path("out").resolve()) if name == "--save" else flag.kind(given)
    elif flag.const is not None:
        words, expected = [name], flag.const
    else:
        text, expected = VALUES[name]
        words = [name, text]
    got = at(files.run(*words), flag.key)
    assert got == expected
    if name != "--optimizer":
        assert got != without


def test_file_flags_reach_the_run(files: Files, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('{"profile": {"enable": true}}')
    run = files.run("--mm-tool", str(tmp_path / "tools.json"), "--load", "weights")
    assert run.tools.profile.enable
    assert run.model.load == str(Path("weights").resolve())
    assert run.model.config.text_decoder.vocab_size == 320
    assert run.data.dataset_param.basic_parameters.dataset == str(tmp_path / "samples.json")


def test_plugin_flag_imports_the_file(files: Files, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom tangram.families.base import get_family, register_family\n"
        "register_family(replace(get_family('qwen2_5_vl'), name='mine_vl', model_ids=()))\n"
    )
    files.model["model_id"] = "mine_vl"
    run = files.run("--plugin", str(tmp_path / "mine.py"))
    assert run.model.config.model_id == "mine_vl"
    assert run.model.plugin == [str(tmp_path / "mine.py")]


def test_absent_flags_have_megatrons_defaults(files: Files) -> None:
    training = files.run().training
    assert (training.seed, training.lr_decay_style, training.log_interval, training.num_workers) == (1234, "linear", 100, 2)
    assert (training.weight_decay, training.clip_grad, training.adam_beta1, training.adam_beta2, training.adam_eps) == (0.01, 1.0, 0.9, 0.999, 1e-8)
    assert (training.min_lr, training.lr_warmup_iters, training.dtype) == (0.0, 0, "fp32")


@pytest.mark.parametrize("name", ["--mm-model", "--mm-data", "--micro-batch-size", "--seq-length", "--train-iters", "--lr"])
def test_required_flags(files: Files, name: str) -> None:
    words = files.flags()
    where = words.index(name)
    with pytest.raises(ConfigError, match=f"flags: {name} is missing; add it"):
        parse_flags(words[:where] + words[where + 2 :])


CHECKED_VALUES: dict[str, tuple[str, str, str]] = {
    "--num-layers": ("4", "5", "--num-layers 5 does not agree with text_decoder.num_layers 4 of model.json; correct it or remove the flag"),
    "--hidden-size": ("32", "64", "--hidden-size 64 does not agree with text_decoder.hidden_size 32"),
    "--ffn-hidden-size": ("48", "64", "text_decoder.ffn_hidden_size 48"),
    "--num-attention-heads": ("4", "8", "text_decoder.num_attention_heads 4"),
    "--num-query-groups": ("2", "4", "text_decoder.num_query_groups 2"),
    "--max-position-embeddings": ("32768", "1024", "text_decoder.max_position_embeddings 32768"),
    "--vocab-size": ("320", "152064", "--vocab-size 152064 does not agree with text_decoder.vocab_size 320"),
    "--position-embedding-type": ("mrope", "rope", "text_decoder.position_embedding_type mrope"),
    "--normalization": ("RMSNorm", "LayerNorm", "--normalization LayerNorm does not agree with text_decoder.normalization RMSNorm"),
    "--norm-epsilon": ("1e-5", "1e-6", "--norm-epsilon 1e-06 does not agree with text_decoder.layernorm_epsilon 1e-05"),
    "--tokenizer-type": ("NullTokenizer", "HuggingFaceTokenizer", "only NullTokenizer: data.json names the tokenizer; remove the flag"),
    "--ckpt-format": ("torch_dist", "torch", "--ckpt-format torch cannot be had, only torch_dist"),
}
CHECKED_SWITCHES: dict[str, tuple[str, Any, str]] = {
    "--untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", False, "text_decoder.untie_embeddings_and_output_weights False"),
    "--swiglu": ("activation_func", "gelu", "whose text_decoder has gated_linear_unit true and activation_func gelu"),
    "--use-fused-swiglu": ("gated_linear_unit", False, "whose text_decoder has gated_linear_unit false and activation_func silu"),
    "--use-fused-rmsnorm": ("normalization", "LayerNorm", "whose text_decoder has normalization LayerNorm"),
    "--group-query-attention": ("num_query_groups", 4, "whose text_decoder has num_query_groups 4 and num_attention_heads 4"),
}


def test_manual_collection_needs_an_interval(files: Files) -> None:
    assert files.run("--manual-gc", "--manual-gc-interval", "5").training.manual_gc_interval == 5
    with pytest.raises(
        ConfigError, match="flags: --manual-gc needs --manual-gc-interval, steps after which garbage is collected; give it, or remove"
    ):
        files.run("--manual-gc")


def test_the_place_of_a_writer_switches_it_on_over_what_tools_json_says(files: Files, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('{"profile": {"ranks": [3]}, "wandb": {"project": "old", "tags": ["a"]}}')
    tools = files.run("--mm-tool", str(tmp_path / "tools.json"), "--wandb-project", "eyes", "--tensorboard-dir", "events").tools
    assert (tools.profile.ranks, tools.wandb.enable, tools.wandb.project, tools.wandb.tags) == ([3], True, "eyes", ["a"])
    assert (tools.tensorboard.enable, tools.tensorboard.log_dir) == (True, str(Path("events").resolve()))
    assert not files.run().tools.wandb.enable and not files.run().tools.tensorboard.enable
    for name in ("--wandb-exp-name", "--wandb-save-dir"):
        with pytest.raises(ConfigError, match=f"flags: {name} does nothing without --wandb-project; give it, or remove {name}"):
            files.run(name, "x")


@pytest.mark.parametrize("name", [name for name in CHECKED if name != "--manual-gc"])
def test_every_compared_flag_is_compared(files: Files, name: str) -> None:
    if name in CHECKED_VALUES:
        right, wrong, message = CHECKED_VALUES[name]
        files.run(name, right)
        words = files.flags(name, wrong)
    else:
        key, value, message = CHECKED_SWITCHES[name]
        files.run(name)
        files.text[key] = value
        words = files.flags(name)
    with pytest.raises(ConfigError) as error:
        parse_flags(words)
    assert message in str(error.value)


@pytest.mark.parametrize("name", BUILT_IN)
def test_flags_that_hold_anyway_change_nothing(files: Files, name: str) -> None:
    assert files.run(name) == files.run()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_flags_say_why(files: Files, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        files.run(name, "1")
    assert str(error.value) == f"flags: {name}: {REFUSED[name].why}"


def test_unknown_flags_get_a_suggestion_and_names_are_not_shortened(files: Files) -> None:
    with pytest.raises(ConfigError, match=r"flags: unknown flag --tensor-model-paralel-size \(did you mean '--tensor-model-parallel-size'\?\)"):
        files.run("--tensor-model-paralel-size", "2")
    with pytest.raises(ConfigError, match=r"unknown flag --train-iter \(did you mean '--train-iters'\?\)"):
        files.run("--train-iter", "2")
    with pytest.raises(ConfigError, match="flags: 'stray' belongs to no flag; remove it"):
        files.run("stray")


def test_exclusive_flags(files: Files) -> None:
    with pytest.raises(ConfigError, match="flags: --bf16 and --fp16 exclude each other"):
        files.run("--bf16", "--fp16")
    with pytest.raises(ConfigError, match="flags: --calculate-per-sample-loss and --calculate-per-token-loss exclude each other"):
        files.run("--calculate-per-sample-loss", "--calculate-per-token-loss")
    with pytest.raises(ConfigError, match=r"lr_warmup_fraction 0.1 and lr_warmup_iters 5: give one of them"):
        files.run("--lr-warmup-fraction", "0.1", "--lr-warmup-iters", "5")


def test_bad_values_name_the_flag(files: Files) -> None:
    with pytest.raises(ConfigError, match=r"flags: argument --lr: invalid float value: 'abc'"):
        files.run("--lr", "abc")
    with pytest.raises(ConfigError, match=r"flags: --micro-batch-size: Input should be greater than or equal to 1, got 0"):
        files.run("--micro-batch-size", "0")
    with pytest.raises(ConfigError, match=r"flags: --lr-decay-style: Input should be .* got 'cosin' \(did you mean 'cosine'\?\)"):
        files.run("--lr-decay-style", "cosin")
    with pytest.raises(ConfigError, match=r"overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce"):
        files.run("--overlap-param-gather")
    with pytest.raises(ConfigError, match=r"eval_interval 10000 and eval_iters 0 belong together"):
        files.run("--eval-interval", "10000")
    with pytest.raises(ConfigError, match=r"save_interval 10 needs save"):
        files.run("--save-interval", "10")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo",
            "hybrid_cp_algo needs ulysses_degree_in_cp, the ranks that share heads; give it",
        ),
        (
            "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 3",
            "ulysses_degree_in_cp 3 must divide context_parallel_size 4 and be neither 1 (megatron_cp_algo) nor all of it (ulysses_cp_algo)",
        ),
        (
            "--context-parallel-size 2 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2",
            "ulysses_degree_in_cp 2 must divide context_parallel_size 2 and be neither 1 (megatron_cp_algo) nor all of it (ulysses_cp_algo)",
        ),
        (
            "--context-parallel-size 4 --ulysses-degree-in-cp 2",
            "ulysses_degree_in_cp 2 is of hybrid_cp_algo, and context_parallel_algo is ulysses_cp_algo; remove one",
        ),
        ("--context-parallel-algo ring", "Input should be 'ulysses_cp_algo', 'megatron_cp_algo' or 'hybrid_cp_algo', got 'ring'"),
    ],
)
def test_context_ranks_must_fit_their_algorithm(files: Files, flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        files.run(*flags.split())


def test_callers_own_flags_and_defaults(files: Files) -> None:
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-flag", type=int, default=3)
        return parser

    parsed = parse_flags(files.flags("--my-flag", "4"), provider, {"seed": 7, "lr": 9.0, "bf16": True})
    assert parsed.namespace.my_flag == 4
    assert (parsed.run.training.seed, parsed.run.training.lr, parsed.run.training.dtype) == (7, 1e-3, "bf16")
    assert (parsed.namespace.adam_beta2, parsed.namespace.pipeline_model_parallel_size) == (0.999, 1)
    with pytest.raises(ConfigError, match=r"unknown flag --my-flg \(did you mean '--my-flag'\?\)"):
        parse_flags(files.flags("--my-flg", "4"), provider)


def test_model_json_may_repeat_the_runs_dtype_only(files: Files) -> None:
    files.text["params_dtype"] = "bf16"
    assert files.run("--bf16").training.dtype == "bf16"
    with pytest.raises(ConfigError, match="text_decoder.params_dtype: 'bf16' does not agree with the run's dtype, which is 'fp32'"):
        files.run()


# fmt: off
PUBLIC_7B = [
    "--use-mcore-models", "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2", "--context-parallel-size", "1",
    "--context-parallel-algo", "ulysses_cp_algo",
    "--micro-batch-size", "1", "--global-batch-size", "192", "--tokenizer-type", "NullTokenizer", "--vocab-size", "152064", "--seq-length",
    "1024", "--make-vocab-size-divisible-by", "1", "--normalization", "RMSNorm", "--use-fused-rmsnorm", "--swiglu", "--use-fused-swiglu",
    "--no-masked-softmax-fusion", "--lr", "1.0e-5", "--lr-decay-style", "cosine", "--weight-decay", "0", "--train-iters", "10000",
    "--lr-warmup-fraction", "0.1", "--clip-grad", "0.0", "--adam-beta1", "0.9", "--adam-beta2", "0.999", "--seed", "42", "--bf16", "--load",
    "ckpt", "--use-flash-attn", "--variable-seq-lengths", "--use-distributed-optimizer", "--no-load-optim", "--no-load-rng", "--no-save-optim",
    "--no-save-rng", "--num-workers", "8", "--distributed-timeout-minutes", "20", "--log-interval", "1", "--save-interval", "10000", "--save",
    "save_dir", "--log-tps", "--distributed-backend", "nccl",
]
# fmt: on
"""Flags of the public 7B launch script, less --ckpt-format torch, --eval-interval and --eval-iters."""


def test_public_launch_flags_port() -> None:
    files = ["--mm-model", str(EXAMPLES / "model_7b.json"), "--mm-data", str(EXAMPLES / "data.json"), "--mm-tool", str(EXAMPLES / "tools.json")]
    run = parse_flags([*files, *PUBLIC_7B]).run
    assert run.topology().order[1].text == range(12, 28)
    assert (run.training.lr, run.training.clip_grad, run.training.weight_decay, run.training.global_batch_size) == (1e-5, 0.0, 0.0, 192)
    for flag, message in (("--ckpt-format torch", "only torch_dist"),):
        with pytest.raises(ConfigError, match=message):
            parse_flags([*files, *PUBLIC_7B, *flag.split()])


def test_the_table_is_complete_and_the_page_is_current() -> None:
    options = {option for action in build_parser()._actions for option in action.option_strings} - {"-h", "--help"}
    assert options == {*WORKS, *CHECKED, *BUILT_IN}
    assert not options & set(REFUSED)
    page = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
    assert page == flags_markdown()
    assert set(re.findall(r"^\| `(--[\w-]+)`", page, re.M)) == options | set(REFUSED)
