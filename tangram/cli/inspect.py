"""``tangram inspect`` and ``mm-convert inspect``: what is in a checkpoint directory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tangram.cli.parser import Parser

if TYPE_CHECKING:
    from tangram.checkpoints.look_options import InspectOptions

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
    parser.add_argument("--plugin", action="append", default=[], metavar="PATH", help="Python file or folder to import first; may be repeated")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    add_arguments(subparsers.add_parser("inspect", help=HELP, description=HELP, epilog=EPILOG))


def run(args: argparse.Namespace) -> int:
    """Print the description; 0 where nothing is wrong, else 1."""
    from tangram.checkpoints.look_options import InspectOptions
    from tangram.config.parsing import parse_section
    from tangram.families.plugins import load_plugins

    load_plugins(args.plugin)
    raw = {"dir": args.dir, "hf_config": {"hf_dir": args.hf}}
    return show_inspection(parse_section(InspectOptions, raw, "inspect"), (), args.json)


def show_inspection(options: InspectOptions, families: tuple[str, ...], as_json: bool) -> int:
    """Describe, print, and return the exit status.

    Args:
        families: that the directory may be of; empty: any.
    """
    from tangram.checkpoints.inspect import inspection_text, run_inspect

    found = run_inspect(options, families)
    print(inspection_text(found, as_json))
    return found.exit_code
