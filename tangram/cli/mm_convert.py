"""``mm-convert CONVERTER hf_to_mm|mm_to_hf``: weights between Hugging Face and ``mp_rank`` directories."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser

from tangram.checkpoints.options import ToHFOptions, ToMMOptions
from tangram.config.parsing import parse_section
from tangram.errors import ConfigError, TangramError, suggest

CONVERTERS = {"Qwen2_5_VLConverter": "qwen2_5_vl", "Qwen2VLConverter": "qwen2_vl"}
"""Converter names, as MindSpeed-MM has them, and the family each is for."""
DIRECTIONS = {
    "hf_to_mm": (ToMMOptions, "write the mp_rank directory of a split from Hugging Face weights"),
    "mm_to_hf": (ToHFOptions, "write a Hugging Face directory from an mp_rank directory"),
}


def fail(message: str) -> NoReturn:
    """Print one line and exit with status 2."""
    print(f"mm-convert: error: {message}", file=sys.stderr)
    raise SystemExit(2)


class _Words(argparse.ArgumentParser):
    """Reads the converter and the direction; the options after them are for ``_Options``."""

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)'", message)
        hint = suggest(choice[1], (*CONVERTERS, *DIRECTIONS)) if choice else "; see mm-convert --help"
        fail(f"{message.replace(', options', '')}{hint}")


class _Options(ArgumentParser):
    """Reports every fault in one line that names the option."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        text = " ".join(str(message).split())
        known = [string for action in self._actions for string in action.option_strings]
        key = re.search(r"\b(cfg\.[\w.]+)", text)
        value = re.search(r"Given value: (.*?)(?: Subtypes| - Expected|$)", text)
        unknown = re.search(r"(?:unrecognized arguments: |does not accept option )'?([^ ']+)", text)
        if unknown:
            fail(f"unknown option {unknown[1]}{suggest(unknown[1], known)}; see --help")
        if key and value:
            hint = "a list of layers; write [12,16] or [[12,16]]" if key[1].endswith("_pp_layers") else "of the type that --help shows"
            fail(f"--{key[1]}: {value[1]} is not {hint}")
        fail(re.sub(r'(?:Parser key )?(?<![-\w])"?(cfg\.[\w.]+|config(?=":))"?', r"--\1", text))


def _words() -> argparse.ArgumentParser:
    directions = "\n".join(f"  {name:10}{text}" for name, (_, text) in DIRECTIONS.items())
    parser = _Words(
        prog="mm-convert",
        description="Convert weights between Hugging Face and mp_rank directories.",
        epilog=f"directions:\n{directions}\n\nOptions of a direction: mm-convert CONVERTER DIRECTION --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mm-convert CONVERTER DIRECTION [options]",
    )
    parser.add_argument(
        "converter", choices=CONVERTERS, help=", ".join(f"{name} for {family}" for name, family in CONVERTERS.items()), metavar="CONVERTER"
    )
    parser.add_argument("direction", choices=DIRECTIONS, help=" or ".join(DIRECTIONS), metavar="DIRECTION")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of ``mm-convert``."""
    words = _words().parse_args(args)
    section, help_text = DIRECTIONS[words.direction]
    options = _Options(prog=f"mm-convert {words.converter} {words.direction}", description=help_text, allow_abbrev=False)
    options.add_argument("--config", action=ActionConfigFile, help="YAML file with these options, as --print_config prints it")
    options.add_class_arguments(section, "cfg", help="options")
    raw = options.parse_args(words.options).cfg.as_dict()
    try:
        print(_convert(words.direction, raw, CONVERTERS[words.converter]))
    except TangramError as error:
        fail(str(error))


def _convert(direction: str, raw: dict[str, object], family: str) -> object:
    try:
        to_mm = parse_section(ToMMOptions, raw, "--cfg") if direction == "hf_to_mm" else None
        to_hf = parse_section(ToHFOptions, raw, "--cfg") if direction == "mm_to_hf" else None
    except ConfigError as error:
        raise ConfigError(str(error).replace("--cfg: ", "--cfg.", 1)) from None
    from tangram.checkpoints.convert import convert_hf_to_mm, convert_mm_to_hf

    if to_mm is not None:
        return convert_hf_to_mm(to_mm, family)
    assert to_hf is not None
    return convert_mm_to_hf(to_hf, family)


if __name__ == "__main__":
    main()
