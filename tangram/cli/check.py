"""``tangram check``: everything that can be checked before processes start."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from tangram.errors import ConfigError

if TYPE_CHECKING:
    from tangram.config.preflight import NamedRules, Report
    from tangram.config.run import RunConfig


def add_parser(subparsers: Any) -> None:
    """Register the command. Launch flags pass through it unread: another prefix makes them plain words."""
    parser = subparsers.add_parser("check", help="check a run before it starts", prefix_chars="+", add_help=False)
    parser.add_argument("words", nargs="*")


def run(args: argparse.Namespace) -> int:
    """Print what was checked and the split; 2 where something is wrong."""
    options, words = _own_parser().parse_known_args(args.words)
    from tangram.config.preflight import check_run

    config = _read(words)
    report = check_run(config, _world_size(options.world_size), _more(config))
    _show(report)
    return 2 if report.errors else 0


def _more(config: RunConfig) -> NamedRules:
    """Rules that need torch, which the other backend's run files are spared."""
    if config.backend != "fsdp2":
        return ()
    from tangram.backends.fsdp2.checks import RULES

    return RULES


def _own_parser() -> argparse.ArgumentParser:
    from tangram.config.flag_parser import FlagParser

    parser = FlagParser(
        prog="tangram check",
        allow_abbrev=False,
        usage="tangram check RUN.yaml [section.key=value ...] | tangram check --mm-model FILE --mm-data FILE [launch flags]",
        description="Check a run and show its split. Launch flags are those of pretrain_vlm.py (docs/flags.md).",
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="number of processes; default: WORLD_SIZE of the environment, else not checked")
    return parser


def _read(words: list[str]) -> RunConfig:
    from tangram.config.flags import parse_flags
    from tangram.config.yaml_config import read_run

    if not words:
        raise ConfigError("check: give a run file (tangram check run.yaml) or launch flags (tangram check --mm-model model.json ...)")
    return parse_flags(words).run if words[0].startswith("-") else read_run(words[0], words[1:])


def _world_size(given: int | None) -> int | None:
    text = os.environ.get("WORLD_SIZE")
    if given is None and text is not None and text.isdecimal():
        given = int(text)
    if given is not None and given < 1:
        raise ConfigError(f"--world-size {given} must be at least 1")
    return given


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # one line per finding, for logs and grep
    table = Table("checked", "", "found", box=None, pad_edge=False)
    for finding in report.findings:
        mark = "[red]wrong[/red]" if finding.error else "[green]ok[/green]"
        table.add_row(escape(finding.rule), mark, escape(str(finding.error) if finding.error else finding.detail))
    console.print(table)
    for line in report.split:
        console.print(escape(line), highlight=False)
    for note in report.notes:
        console.print(f"note: {escape(note)}", highlight=False)
