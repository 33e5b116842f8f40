"""``tangram align --trace``: the first module in which two runs differ."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.align.trace.find import Finding

EPILOG = """\
the first difference, module by module forward and tensor by tensor backward:
  tangram align --hf runs/tiny --tp 2 --pp 2 --trace               transformers against the split
  tangram align --hf runs/tiny --tp 2 --trace-to runs/before       keep both traces: runs/before/reference, runs/before/split
  tangram align --trace runs/before/split runs/after/split         two traces: of two versions, splits, machines or backends
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of traces to those of ``tangram align``."""
    group = parser.add_argument_group("first difference")
    walk = "name the first module that differs: of transformers and the split, or of two traces A and B (then no other option is needed)"
    group.add_argument("--trace", nargs="*", metavar="DIR", type=Path, help=walk)
    group.add_argument("--trace-to", metavar="DIR", type=Path, help="keep the traces: DIR/reference of transformers, DIR/split")
    only = "record modules of these names alone, such as 'model.language_model.layers.{0-3}.*'; may be repeated"
    group.add_argument("--trace-only", action="append", default=[], metavar="PATTERN", help=only)


def traces(args: argparse.Namespace) -> tuple[Path, Path] | None:
    """The two traces to be compared; None: a model is to be run.

    Raises:
        ConfigError: one directory, or more than two, or options of a run beside two.
    """
    if not args.trace:
        return None
    if len(args.trace) != 2:
        raise ConfigError(f"--trace takes two traces, or none and a model by --hf; it got {len(args.trace)}: {' '.join(map(str, args.trace))}")
    given = [name for name in ("hf", "checkpoint", "batch", "dump", "steps", "trace_to", "trace_only", "pack") if getattr(args, name)]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{options}: --trace with two directories runs nothing, it reads what is there; leave out one or the other")
    return args.trace[0], args.trace[1]


def check_options(args: argparse.Namespace) -> None:
    """Refuse options of a trace beside those that it does not go with.

    Raises:
        ConfigError: naming them.
    """
    if args.trace is None and args.trace_to is None:
        if args.trace_only:
            raise ConfigError("--trace-only says what is in a trace; add --trace or --trace-to DIR")
        return
    if args.pack:
        raise ConfigError("--pack: transformers runs each row alone and has no packed row to hold against it; leave out --pack or the trace")
    if args.steps is not None:
        raise ConfigError("--steps: a trace is of one step; leave out one of them")


@contextlib.contextmanager
def trace_folder(args: argparse.Namespace) -> Iterator[Path | None]:
    """Where the traces go: a folder that stays, one that goes when they have been compared, or None."""
    if args.trace_to is not None:
        yield args.trace_to
    elif args.trace is not None:
        with tempfile.TemporaryDirectory(prefix="tangram-trace-") as name:
            yield Path(name)
    else:
        yield None


def compare(first: Path, second: Path, tolerance: float | None, json_file: Path | None) -> int:
    """Print the first difference of two traces; the exit status is 0 where there is none, else 1."""
    from tangram.align.trace.find import first_difference
    from tangram.align.trace.render import render

    finding = first_difference(first, second, tolerance)
    print(render(finding))
    if json_file is not None:
        _write(finding, json_file)
    return 0 if finding.passed else 1


def _write(finding: Finding, path: Path) -> None:
    from tangram.align.trace.render import as_dict

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_dict(finding), indent=1) + "\n", encoding="utf-8")
