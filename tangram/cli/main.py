"""The command ``tangram``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from tangram import __version__
from tangram.cli.parser import Parser
from tangram.errors import ConfigError, suggest
from tangram.guard import guarded

COMMANDS = ("check", "data", "train", "align", "export", "inspect", "verify", "baseline", "gate", "replay", "tiny", "demo")
"""Modules of this package with ``add_parser(subparsers)`` and ``run(args) -> int``, in the order of the help text."""


def build_parser() -> Parser:
    """Parser of all commands. Importing them imports no torch."""
    parser = Parser(prog="tangram", description="Assemble a vision-language model, split it over many devices, train it, prove it.")
    parser.add_argument("--version", action="version", version=f"tangram {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name in COMMANDS:
        import_module(f"tangram.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tangram`` with ``argv`` (default: the process's) and return the exit status; see ``guarded`` for faults."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def action() -> int:
        word = next((a for a in arguments if not a.startswith("-")), None)
        if word is not None and word not in COMMANDS:
            raise ConfigError(f"unknown command {word!r}{suggest(word, COMMANDS)}; known: {', '.join(COMMANDS)}")
        args = build_parser().parse_args(arguments)
        return int(import_module(f"tangram.cli.{args.command}").run(args))

    return guarded("tangram", action)


if __name__ == "__main__":
    sys.exit(main())
