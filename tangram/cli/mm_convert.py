"""``mm-convert CONVERTER hf_to_mm|mm_to_hf``: weights between Hugging Face and ``mp_rank`` directories."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, auto_cli

from tangram.checkpoints.options import ToHFOptions, ToMMOptions
from tangram.errors import TangramError, suggest

CONVERTERS = {"Qwen2_5_VLConverter": "qwen2_5_vl", "Qwen2VLConverter": "qwen2_vl"}
"""Converter names of MindSpeed-MM and the family each is for."""


class _Parser(ArgumentParser):
    """Reports every fault in one line on standard error and exits with status 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        fail(_one_line(message))


def fail(message: str) -> NoReturn:
    """Print one line and exit with status 2."""
    print(f"mm-convert: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _one_line(message: str) -> str:
    """jsonargparse's finding, of several lines, as one that names the option."""
    text = " ".join(str(message).split())
    unknown = re.search(r"invalid choice: '([^']*)'", text)
    if unknown:
        return f"{text}{suggest(unknown[1], (*CONVERTERS, 'hf_to_mm', 'mm_to_hf'))}"
    layers = re.search(r'key "?\'?([\w.]*_pp_layers)', text)
    if layers:
        value = re.search(r"Given value type: .*?Given value: (.*?)(?: Subtypes|$)", text)
        return f"--{layers[1]}: {value[1] if value else text} is not a list of layers; write [12,16] or [[12,16]]"
    return re.sub(r'key "([\w.]+)"', r"--\1", text)


def _hf_to_mm(family: str) -> Callable[..., None]:
    def hf_to_mm(cfg: ToMMOptions) -> None:
        """Hugging Face weights into the mp_rank layout of a split."""
        from tangram.checkpoints.convert import convert_hf_to_mm

        print(convert_hf_to_mm(cfg, family))

    return hf_to_mm


def _mm_to_hf(family: str) -> Callable[..., None]:
    def mm_to_hf(cfg: ToHFOptions) -> None:
        """An mp_rank directory back into a Hugging Face directory."""
        from tangram.checkpoints.convert import convert_mm_to_hf

        print(convert_mm_to_hf(cfg, family))

    return mm_to_hf


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of ``mm-convert``."""
    components: Any = {name: {"_help": f"weights of {family}", "hf_to_mm": _hf_to_mm(family), "mm_to_hf": _mm_to_hf(family)} for name, family in CONVERTERS.items()}
    try:
        auto_cli(components, args=list(args) if args is not None else None, as_positional=False, parser_class=_Parser, prog="mm-convert")
    except TangramError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
