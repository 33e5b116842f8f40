"""``tangram verify`` and ``mm-convert verify``: whether two checkpoints hold the same model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tangram.cli.parser import Parser

if TYPE_CHECKING:
    from tangram.checkpoints.look_options import VerifyOptions

HELP = "compare two checkpoints of any two formats and splits, tensor by tensor"
EPILOG = """\
FIRST and SECOND are Hugging Face directories, mp_rank directories or training checkpoints. Status: 0 equal, 1 different, 2 not comparable.
An mp_rank directory without a manifest needs the config.json of its model, from the other checkpoint or from --hf; its folders tell its split.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("first", metavar="FIRST", help="a checkpoint")
    parser.add_argument("second", metavar="SECOND", help="the other")
    parser.add_argument("--hf", metavar="DIR", help="directory with the config.json of a checkpoint that holds none")
    parser.add_argument("--tolerance", type=float, metavar="T", help="elements that differ by at most T times the larger magnitude are equal")
    parser.add_argument("--ignore-dtype", action="store_true", help="compare values of different element types, converted exactly")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="tensors compared at the same time (2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plugin", action="append", default=[], metavar="PATH", help="Python file or folder to import first; may be repeated")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    add_arguments(subparsers.add_parser("verify", help=HELP, description=HELP, epilog=EPILOG))


def run(args: argparse.Namespace) -> int:
    """Print the verdict; 0 equal, 1 different."""
    from tangram.checkpoints.look_options import VerifyOptions
    from tangram.config.parsing import parse_section

    raw = {
        "source_dir": args.first,
        "target_dir": args.second,
        "hf_config": {"hf_dir": args.hf},
        "workers": args.workers,
        "tolerance": args.tolerance,
        "ignore_dtype": args.ignore_dtype,
    }
    options = parse_section(VerifyOptions, raw, "verify", names={"workers": "--workers", "tolerance": "--tolerance"})

    from tangram.families.plugins import load_plugins

    load_plugins(args.plugin)
    return show_verdict(options, (), args.json)


def show_verdict(options: VerifyOptions, families: tuple[str, ...], as_json: bool) -> int:
    """Compare, print, and return the exit status.

    Args:
        families: that the checkpoints may be of; empty: any.
    """
    from tangram.checkpoints.verify import run_verify, verdict_text
    from tangram.cli.progress import byte_progress

    with byte_progress("verify") as progress:
        verdict = run_verify(options, families, progress)
    print(verdict_text(verdict, as_json))
    return verdict.exit_code
