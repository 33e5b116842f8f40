"""``tangram inspect`` and ``mm-convert inspect``: what is in a checkpoint directory."""

from __future__ import annotations

import argparse

from tangram.cli.parser import Parser

HELP = "describe a checkpoint directory, also an incomplete one"
EPILOG = """\
DIR is a Hugging Face directory, an mp_rank directory, a training checkpoint or a LoRA adapter. Headers and names are read, no values.
Status: 0 whole, 1 something is wrong with it (listed under "problems"), 2 no checkpoint.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("dir", metavar="DIR", help="directory to describe")
    parser.add_argument("--hf", metavar="DIR", help="directory with the config.json of a checkpoint that holds none")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    add_arguments(subparsers.add_parser("inspect", help=HELP, description=HELP, epilog=EPILOG))


def run(args: argparse.Namespace) -> int:
    """Print the description; 0 where nothing is wrong, else 1."""
    from tangram.checkpoints.inspect import inspect, inspection_text

    found = inspect(args.dir, args.hf)
    print(inspection_text(found, args.json))
    return found.exit_code
