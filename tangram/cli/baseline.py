"""``tangram baseline make``: a run as what later runs are held against."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from tangram.cli.parser import Parser

EPILOG = """\
examples:
  tangram baseline make runs/good -o good.json                         runs/good holds metrics.jsonl (training.save)
  tangram baseline make train.log -o good.json --margin time=+0.05     a log in Megatron's form; a faster run is no fault
  tangram baseline make runs/good/metrics.jsonl -o good.json --mode "digits 6"
"""
RUN_HELP = "metrics.jsonl, a folder that holds one, or a log in Megatron's form"


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram``."""
    text = "keep what a run left behind as the baseline of later ones"
    parser = subparsers.add_parser("baseline", help=text, description=text)
    commands = parser.add_subparsers(dest="baseline_command", metavar="COMMAND", required=True, parser_class=Parser)
    make = commands.add_parser("make", help=text, description=text, epilog=EPILOG)
    make.add_argument("run", metavar="RUN", type=Path, help=RUN_HELP)
    make.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="file to write")
    make.add_argument("--force", action="store_true", help="replace a file that lies there")
    add_settings(make, "as they are here")


def add_settings(parser: argparse.ArgumentParser, default: str) -> None:
    """Options that say how closely a run must repeat its baseline."""
    mode = "how losses and gradient norms are compared: margin, exact, or 'digits N' (significant digits)"
    parser.add_argument("--mode", metavar="MODE", help=f"{mode} ({'margin' if default == 'as they are here' else default})")
    margins = "loss=0.01, grad_norm=0.05, time=0.05, memory=0.1" if default == "as they are here" else default
    margin = "relative margin of loss, grad_norm, time or memory; +X: less than the baseline is no fault; may be repeated"
    parser.add_argument("--margin", metavar="METRIC=X", action="append", default=[], help=f"{margin} ({margins})")
    warm_up = "1" if default == "as they are here" else default
    parser.add_argument("--warm-up", metavar="N", type=int, help=f"first steps whose times do not count ({warm_up})")


def refuse_to_overwrite(written: Mapping[str, Path | None], read: Mapping[str, Path]) -> None:
    """Refuse to write over what is read, or twice to one file.

    Raises:
        ConfigError: two names are of one file.
    """
    from tangram.errors import ConfigError

    there = {os.path.realpath(place): name for name, path in read.items() for place in _files_of(path)}
    for name, path in written.items():
        if path is None:
            continue
        if (other := there.get(os.path.realpath(path))) is not None:
            raise ConfigError(f"{name} {path}: the same file as {other}, which it would replace; give another name")
        there[os.path.realpath(path)] = name


def _files_of(run: Path) -> list[Path]:
    """What is read where a run or a baseline is named."""
    metrics = run / "metrics.jsonl" if run.is_dir() else run
    return [metrics, metrics.with_suffix(".ranks.jsonl")]


def run(args: argparse.Namespace) -> int:
    """Write the file and say what is in it."""
    from tangram.align.gate.baseline import make_baseline, write_baseline
    from tangram.align.gate.read_run import read_run
    from tangram.align.gate.settings import Settings
    from tangram.errors import ConfigError

    settings = Settings().changed(args.mode, args.margin, args.warm_up)
    refuse_to_overwrite({"-o": args.out}, {"RUN": args.run})
    if args.out.exists() and not args.out.is_dir() and not args.force:
        raise ConfigError(f"{args.out}: lies there already; give another name, or --force to replace it")
    recorded = read_run(args.run)
    baseline = make_baseline(recorded, settings)
    write_baseline(baseline, args.out)
    for note in recorded.notes:
        print(f"note: {note}")
    if not recorded.facts:
        print("note: the run does not say its split, seed, data and samples, so a gate cannot compare them")
    margins = ", ".join(f"{name} {margin}" for name, margin in settings.margins.items())
    ranks = len(next(iter(recorded.ranks.values())).grad_norm) if recorded.ranks else 0
    what = f"{len(recorded.steps)} steps of {recorded.where}{f', {ranks} ranks' if ranks else ''}"
    print(f"{args.out}: {what}; mode {settings.mode}; margins {margins}; warm-up {settings.warm_up}")
    return 0
