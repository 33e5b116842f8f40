"""``tangram data show``: one sample as the model gets it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.cli.parser import Parser

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from tangram.data.show import Run, SampleView

HELP = "show one sample as the model gets it: tokens, labels, positions, pictures"
EPILOG = """\
examples:
  tangram data show data.json 0 --tokenizer ckpt/Qwen2.5-VL-7B-Instruct
  tangram data show data.json 0 --config run.yaml --html sample.html
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram data``."""
    from tangram.cli.data_check import add_subject_arguments

    parser = subparsers.add_parser("show", help=HELP, description=HELP, epilog=EPILOG)
    parser.add_argument("dataset", metavar="DATASET", help="path of the samples, or several separated by commas")
    parser.add_argument("number", metavar="N", type=int, help="the sample, from 0")
    add_subject_arguments(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the pictures and their grids, which needs no other file")


def run(args: argparse.Namespace) -> int:
    """Print the sample, and write the page where one is wanted."""
    from rich.console import Console

    from tangram.cli.data_check import check_output, subject_options
    from tangram.config.parsing import parse_section
    from tangram.data.show import view_sample
    from tangram.data.subject import SubjectOptions, build_subject

    check_output("--html", args.html)
    options = parse_section(SubjectOptions, subject_options(args), "show", names={"cutoff": "--cutoff"})
    view = view_sample(build_subject(options, needs_pixels=True), args.number)
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # one line per run, for logs and grep
    show_sample(console, view)
    if args.html:
        from tangram.data.show_page import render_sample

        args.html.write_text(render_sample(view), encoding="utf-8")
        print(args.html)
    return 0


def show_sample(console: Console, view: SampleView) -> None:
    """Print facts, media and tokens."""
    from rich.table import Table

    console.print(f"sample {view.id}: {view.where}", markup=False, highlight=False)
    share = 100 * view.learnt / len(view.tokens)
    counts = f"{len(view.tokens)} tokens, {view.learnt} of them learnt ({share:.1f} %), {view.positions} positions"
    console.print(counts, markup=False, highlight=False)
    if view.turns_dropped:
        console.print(f"{view.turns_dropped} turns are left out at the cutoff", markup=False, highlight=False)
    for number, medium in enumerate(view.media):
        width, height = medium.pictures[0].size
        grid = " x ".join(map(str, medium.grid))
        line = f"{medium.kind} {number}: {medium.path}: {width} x {height} pixels, grid {grid}, {len(medium.places)} tokens"
        console.print(line, markup=False, highlight=False)
    table = Table("places", "", box=None, pad_edge=False)
    for name in ("text", "ids", "positions"):
        table.add_column(name, overflow="fold")  # nothing is left out, however long a word is
    for run in view.runs():
        medium_number = run.tokens[0].medium
        what = f"{view.media[medium_number].kind} {medium_number}" if medium_number is not None else "learnt" if run.tokens[0].learnt else ""
        table.add_row(run.places, what, *_cells(run), run.positions)
    console.print(table)


def _cells(run: Run) -> tuple[Text, Text]:
    """Text and ids; of a medium once, and how often."""
    from rich.text import Text

    first = run.tokens[0]
    if first.medium is not None:
        return Text(f"{first.text} x {len(run.tokens)}", style="magenta"), Text(f"{first.id} x {len(run.tokens)}", style="dim")
    text = run.text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return Text(text, style="bold green" if first.learnt else ""), Text(" ".join(str(token.id) for token in run.tokens), style="dim")
