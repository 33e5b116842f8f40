"""``tangram data``: convert, check, show and make datasets."""

from __future__ import annotations

import argparse
from importlib import import_module

from tangram.cli.parser import Parser

COMMANDS = {"llava-to-mllm": "data_llava", "check": "data_check", "show": "data_show", "mock": "data_mock"}
"""Word -> module of this package with ``add_parser(subparsers)`` and ``run(args) -> int``."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    text = "convert, check, show and make datasets"
    parser = subparsers.add_parser("data", help=text, description=f"{text[0].upper()}{text[1:]} (docs/data.md).")
    own = parser.add_subparsers(dest="data_command", metavar="COMMAND", required=True, parser_class=Parser)
    for module in COMMANDS.values():
        import_module(f"tangram.cli.{module}").add_parser(own)


def run(args: argparse.Namespace) -> int:
    """Run the command that was named."""
    return int(import_module(f"tangram.cli.{COMMANDS[args.data_command]}").run(args))


def spellings(name: str) -> tuple[str, ...]:
    """An option as the public tools write it, and with dashes."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))
