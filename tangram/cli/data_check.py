"""``tangram data check``: everything that is wrong with a dataset, in one walk over it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tangram.cli.parser import Parser
from tangram.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tangram.data.subject import Encoding
    from tangram.data.survey import Survey

HELP = "look at every sample of a dataset and list all that is wrong"
EPILOG = """\
Looked at: format and roles of every record, empty answers, placeholders against media, every media file (decoded), truncation at the cutoff,
token counts, samples that say the same. Without a tokenizer: format and media alone.
Status: 0 every sample can be used, 1 some cannot, 2 the dataset cannot be opened. Truncated and repeated samples are told, and are no fault.
The validation set of a run file is looked at with: tangram data check VALIDATION.json --config run.yaml
"""
FIRST_SAMPLES = 5


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say where the dataset and the tokenizer lie; ``check`` and ``show`` have them."""
    parser.add_argument("--config", metavar="FILE", help="run file or data.json with the settings of training; the options below go before it")
    parser.add_argument("--dataset-dir", metavar="DIR", help="folder that media paths start from (of --config, else the folder of DATASET)")
    parser.add_argument("--tokenizer", metavar="HF", help="Hugging Face folder: tokenizer, image processor and config.json")
    parser.add_argument("--template", metavar="NAME", help="chat template (the family's)")
    parser.add_argument("--cutoff", type=int, metavar="N", help="longest sample, tokens (of --config, else none)")
    parser.add_argument("--family", metavar="NAME", help="read the folder's config.json as of this family (its model_type)")


def subject_options(args: argparse.Namespace) -> dict[str, object]:
    """What was given of them."""
    return {name: getattr(args, name) for name in ("dataset", "config", "dataset_dir", "tokenizer", "template", "cutoff", "family")}


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written before the work that it is for.

    Raises:
        ConfigError: ``path`` is a folder, or lies in none.
    """
    if path is not None and path.is_dir():
        raise ConfigError(f"{option} {path}: a folder; give the path of a file")
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it, or give another path")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the parser of ``tangram data``."""
    parser = subparsers.add_parser("check", help=HELP, description=HELP, epilog=EPILOG)
    parser.add_argument("dataset", metavar="DATASET", nargs="?", help="path of the samples, or several separated by commas; left out: --config's")
    add_subject_arguments(parser)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes (one a core); 0: this one alone")
    parser.add_argument("--headers-only", action="store_true", help="read only the headers of media files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found, every sample by number")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 where a sample cannot be used."""
    import json

    from rich.console import Console

    from tangram.cli.progress import count_progress
    from tangram.config.parsing import parse_section
    from tangram.data.subject import SubjectOptions, build_subject
    from tangram.data.survey import survey

    if args.workers < 0:
        raise ConfigError(f"--workers {args.workers} must be at least 0")
    check_output("--json", args.json)
    options = parse_section(SubjectOptions, subject_options(args), "check", names={"cutoff": "--cutoff"})
    subject = build_subject(options, needs_pixels=False)
    encoder = subject.encoding.encoder if subject.encoding else None
    with count_progress("check") as progress:
        found = survey(subject.dataset, encoder, decode=not args.headers_only, workers=args.workers, progress=progress)
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # one line per kind, for logs and grep
    _show(console, found, subject.encoding)
    if args.json:
        args.json.write_text(json.dumps(found.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if found.faults else 0


def _show(console: Console, found: Survey, encoding: Encoding | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    if found.faults:
        table = Table(box=None, pad_edge=False)
        for name in ("found in", "fault", "count", "first samples", "for instance"):
            table.add_column(name, overflow="fold")  # nothing is left out, however long a path is
        for kind in found.kinds():
            samples = ", ".join(map(str, kind.samples))
            table.add_row(kind.stage, f"[red]{escape(kind.kind)}[/red]", str(kind.count), samples, escape(kind.example))
        console.print(table)
    verdict = f"[red]{found.bad_samples} cannot be used[/red]" if found.faults else "[green]all can be used[/green]"
    console.print(f"{found.samples} samples, {found.media_files} media files: {verdict}", highlight=False)
    for sentence in _remarks(found, encoding):
        console.print(escape(sentence), highlight=False)


def _remarks(found: Survey, encoding: Encoding | None) -> list[str]:
    remarks = []
    if found.truncated:
        cutoff = encoding.cutoff if encoding else None
        remarks.append(f"truncated at {cutoff} tokens: {len(found.truncated)} samples lose turns: {_some(found.truncated)}")
    if found.duplicates:
        pairs = [f"{sample} (as {first})" for sample, first in found.duplicates]
        remarks.append(f"repeated: {len(pairs)} samples say what an earlier one says: {_some(pairs)}")
    tokens = found.tokens
    if tokens:
        sizes = f"min {tokens.min}, median {tokens.median:g}, p95 {tokens.p95:g}, max {tokens.max}, total {tokens.total}"
        remarks.append(
            f"tokens of {tokens.samples} samples: {sizes}; {100 * tokens.supervised_share:.1f} % supervised, {tokens.media} of images and videos"
        )
    elif encoding is None:
        remarks.append("format and media were checked alone; with --tokenizer HF or --config FILE tokens and truncation are checked too")
    return remarks


def _some(values: list[int] | list[str]) -> str:
    return ", ".join(map(str, values[:FIRST_SAMPLES])) + (", ..." if len(values) > FIRST_SAMPLES else "")
