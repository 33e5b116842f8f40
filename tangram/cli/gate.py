"""``tangram gate``: whether a run still gives the numbers of its baseline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.cli.baseline import RUN_HELP, add_settings, refuse_to_overwrite
from tangram.cli.parser import Parser
from tangram.errors import ConfigError, suggest

if TYPE_CHECKING:
    from tangram.align.gate.baseline import Baseline
    from tangram.align.gate.settings import Settings

EPILOG = """\
examples:
  tangram gate runs/new good.json
  tangram gate runs/new good.json --margin loss=0.001 --html gate.html
  tangram gate runs/four_cards eight_cards.json --ignore topology      losses, gradient norms and samples alone are compared

The exit status is 0 if the run repeats the baseline, 1 if it does not, 2 if one of them cannot be read. A pipe to tee hides it: set -o pipefail.
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    text = "hold a run against a baseline: loss, gradient norm, samples, ranks, time, memory"
    parser = subparsers.add_parser("gate", help=text, description=text, epilog=EPILOG)
    parser.add_argument("run", metavar="RUN", type=Path, help=RUN_HELP)
    parser.add_argument("baseline", metavar="FILE", type=Path, help="what tangram baseline make wrote")
    add_settings(parser, "the baseline's")
    ignore = "a check to leave out, by its name in the table; may be repeated. topology: also what means nothing at another one (ranks, time, memory)"
    parser.add_argument("--ignore", metavar="CHECK", action="append", default=[], help=ignore)
    add_reports(parser)


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Where the verdict goes besides the terminal."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the verdict as JSON")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page with both curves side by side")


def run(args: argparse.Namespace) -> int:
    """Print table and verdict; 0 passed, 1 failed."""
    from tangram.align.gate.baseline import read_baseline
    from tangram.align.gate.compare import CHECKS

    for name in args.ignore:
        if name not in CHECKS:
            raise ConfigError(f"--ignore {name!r}: no such check{suggest(name, CHECKS)}; there are {', '.join(CHECKS)}")
    if len(set(args.ignore)) == len(CHECKS):
        raise ConfigError("--ignore leaves nothing to compare; leave out fewer checks")
    refuse_to_overwrite({"--json": args.json, "--html": args.html}, {"RUN": args.run, "FILE": args.baseline})
    baseline = read_baseline(args.baseline)
    settings = baseline.settings.changed(args.mode, args.margin, args.warm_up)
    return show_gate(args.run, args.baseline, baseline, settings, args.ignore, args.json, args.html)


def show_gate(path: Path, file: Path, baseline: Baseline, settings: Settings, ignore: list[str], as_json: Path | None, as_html: Path | None) -> int:
    """Compare the run at ``path``, print and write what was found, and return the exit status.

    Args:
        file: that the baseline was read from.
    """
    from dataclasses import replace

    from tangram.align.gate.compare import hold_against
    from tangram.align.gate.page import render_page
    from tangram.align.gate.read_run import read_run
    from tangram.align.gate.render import render

    recorded = read_run(path)
    verdict = replace(hold_against(recorded, baseline, settings, ignore), baseline=str(file))
    print(render(verdict))
    if as_json is not None:
        _write(as_json, json.dumps(verdict.as_dict(), indent=1) + "\n")
    if as_html is not None:
        _write(as_html, render_page(verdict, baseline.recorded, recorded))
    return 0 if verdict.passed else 1


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
