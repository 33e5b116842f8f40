"""Megatron-style launch flags with three JSON files, read into a RunConfig."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from tangram.config.flag_parser import FlagParser
from tangram.config.flag_table import BUILT_IN, CHECKED, REFUSED, WORKS
from tangram.config.model import ModelConfig
from tangram.config.parsing import merge, parse_section
from tangram.config.public_keys import RunFacts
from tangram.config.run import RunConfig
from tangram.config.sources import read_data, read_model, read_tools
from tangram.errors import ConfigError, suggest

EXCLUSIVE = (("--bf16", "--fp16"), ("--calculate-per-sample-loss", "--calculate-per-token-loss"))


@dataclass(frozen=True)
class ParsedFlags:
    """A run and the flags it came from.

    ``namespace`` has every flag under its Megatron name (``micro_batch_size``, ``bf16``, ...) and those that the caller added.
    """

    run: RunConfig
    namespace: argparse.Namespace


def build_parser() -> argparse.ArgumentParser:
    """A parser of all flags that are accepted. An absent flag is None, an absent switch False."""
    parser = FlagParser(prog="pretrain_vlm.py", allow_abbrev=False)
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all accepted flags to ``parser``."""
    group = parser.add_argument_group("flags that work")
    for name, flag in WORKS.items():
        if flag.const is not None:
            group.add_argument(name, action="store_true", help=flag.says)
        else:
            group.add_argument(name, type=flag.kind, nargs="+" if flag.many else None, metavar=flag.kind.__name__.upper(), help=flag.says or flag.key)
    group = parser.add_argument_group("flags that must agree with the model or the run")
    for name, check in CHECKED.items():
        if check.switch:
            group.add_argument(name, action="store_true", help=check.against)
        else:
            group.add_argument(name, type=check.kind, metavar=check.kind.__name__.upper(), help=check.against)
    group = parser.add_argument_group("flags that hold anyway")
    for name, held in BUILT_IN.items():
        group.add_argument(name, action="store_true", help=held.says)


def parse_flags(
    argv: Sequence[str],
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> ParsedFlags:
    """Read launch flags.

    Args:
        argv: without the program's name.
        extra_args_provider: adds flags of the caller's own; they are left in the namespace.
        args_defaults: values, by Megatron name, of flags that ``argv`` lacks.

    Raises:
        ConfigError: a flag that is unknown, refused, missing or has a bad value; a file that cannot be read.
    """
    parser = build_parser()
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    namespace, rest = parser.parse_known_args(list(argv))
    if rest:
        raise _unknown(rest, parser)
    for name, value in (args_defaults or {}).items():
        if getattr(namespace, name, None) in (None, False):
            setattr(namespace, name, value)
    for first, second in EXCLUSIVE:
        if _value(namespace, first) and _value(namespace, second):
            raise ConfigError(f"flags: {first} and {second} exclude each other; give one of them")
    for name, flag in WORKS.items():
        if _value(namespace, name) is None:
            if flag.required:
                raise ConfigError(f"flags: {name} is missing; add it ({flag.says or flag.key})")
            setattr(namespace, _dest(name), flag.default)
    run = _build(namespace)
    _compare(namespace, run.described)
    _complete(namespace, run)
    return ParsedFlags(run, namespace)


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _value(namespace: argparse.Namespace, name: str) -> Any:
    return getattr(namespace, _dest(name))


def _unknown(rest: Sequence[str], parser: argparse.ArgumentParser) -> ConfigError:
    word = next((token.split("=", 1)[0] for token in rest if token.startswith("-")), rest[0])
    if word in REFUSED:
        return ConfigError(f"flags: {word}: {REFUSED[word].why}")
    if not word.startswith("-"):
        return ConfigError(f"flags: {word!r} belongs to no flag; remove it")
    known = [option for action in parser._actions for option in action.option_strings]
    return ConfigError(f"flags: unknown flag {word}{suggest(word, known)}; remove it or correct its name (docs/flags.md lists all)")


def _build(namespace: argparse.Namespace) -> RunConfig:
    raw: dict[str, Any] = {"parallel": {}, "model": {}, "features": {}, "training": {}}
    for name, flag in WORKS.items():
        value = _value(namespace, name)
        if flag.key.count(".") != 1 or value is None or value is False:
            continue
        section, key = flag.key.split(".")
        raw[section][key] = value if flag.const is None else flag.const
    if namespace.plugin:
        from tangram.families.plugins import load_plugins

        load_plugins([Path(path) for path in namespace.plugin])
    parallel = raw["parallel"]
    facts = RunFacts(
        raw["training"].get("dtype", "fp32"),
        namespace.seq_length,
        parallel.get("sequence_parallel", False),
        parallel.get("context_parallel_size", 1),
        parallel.get("tensor_model_parallel_size", 1),
        parallel.get("vision_tensor_model_parallel_size"),
    )
    raw["model"]["config"] = read_model(namespace.mm_model, facts)
    raw["data"] = read_data(namespace.mm_data)
    raw["tools"] = merge(read_tools(namespace.mm_tool).model_dump(exclude_unset=True) if namespace.mm_tool is not None else {}, _writers(namespace))
    if not raw["tools"].get("wandb", {}).get("enable"):
        for name in ("--wandb-exp-name", "--wandb-save-dir"):
            if _value(namespace, name) is not None:
                raise ConfigError(f"flags: {name} does nothing without --wandb-project; give it, or remove {name}")
    names = {flag.key: name for name, flag in WORKS.items() if flag.const is None}
    return parse_section(RunConfig, raw, "flags", base=Path.cwd(), names=names)


def _writers(namespace: argparse.Namespace) -> dict[str, Any]:
    """What flags say of ``tools``. As in Megatron, the folder switches TensorBoard on and the project Weights & Biases."""
    tools: dict[str, Any] = {}
    for name, flag in WORKS.items():
        if flag.key.startswith("tools.") and _value(namespace, name) is not None:
            _, writer, key = flag.key.split(".")
            tools.setdefault(writer, {})[key] = _value(namespace, name)
    for writer, switch in (("tensorboard", "log_dir"), ("wandb", "project")):
        if switch in tools.get(writer, {}):
            tools[writer]["enable"] = True
    return tools


def _compare(namespace: argparse.Namespace, model: ModelConfig) -> None:
    """Compare the flags that only repeat something.

    Raises:
        ConfigError: a difference, with both values.
    """
    text = model.text_decoder
    for name, check in CHECKED.items():
        given = _value(namespace, name)
        if given is None or given is False or not check.against.startswith("text_decoder."):
            continue
        own = getattr(text, check.against.removeprefix("text_decoder."))
        if given != own:
            raise ConfigError(f"flags: {name} {given} does not agree with {check.against} {own} of model.json; correct it or remove the flag")
    swiglu = text.gated_linear_unit and text.activation_func == "silu"
    unit = f"gated_linear_unit {str(text.gated_linear_unit).lower()} and activation_func {text.activation_func}"
    facts = {
        "--swiglu": (swiglu, unit),
        "--use-fused-swiglu": (swiglu, unit),
        "--use-fused-rmsnorm": (text.normalization == "RMSNorm", f"normalization {text.normalization}"),
        "--group-query-attention": (
            text.num_query_groups < text.num_attention_heads,
            f"num_query_groups {text.num_query_groups} and num_attention_heads {text.num_attention_heads}",
        ),
    }
    for name, (holds, own) in facts.items():
        if _value(namespace, name) and not holds:
            raise ConfigError(f"flags: {name} does not agree with model.json, whose text_decoder has {own}; correct it or remove the flag")
    if namespace.manual_gc and not namespace.manual_gc_interval:
        raise ConfigError("flags: --manual-gc needs --manual-gc-interval, steps after which garbage is collected; give it, or remove --manual-gc")
    for name, only in (("--tokenizer-type", "NullTokenizer"), ("--ckpt-format", "torch_dist")):
        given = _value(namespace, name)
        if given not in (None, only):
            reason = CHECKED[name].against.split("; ")[1]
            raise ConfigError(f"flags: {name} {given} cannot be had, only {only}: {reason}; remove the flag")


def _complete(namespace: argparse.Namespace, run: RunConfig) -> None:
    """Give absent flags the values that the run has, so that ``namespace`` says what is done."""
    for name, flag in WORKS.items():
        if flag.const is None and "." in flag.key and flag.key != "model.config":
            setattr(namespace, _dest(name), reduce(getattr, flag.key.split("."), run))
