"""What ranks do in the tests of checks and of whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tangram.backends.fsdp2.checks import RULES
from tangram.cli.main import main
from tangram.config.preflight import check_run
from tangram.config.yaml_config import read_run


def findings(runs: Sequence[tuple[Path, Sequence[str], int]]) -> list[dict[str, tuple[str, str]]]:
    """Detail and error of every rule, of each run file with its overrides and number of processes."""
    found = []
    for path, overrides, world_size in runs:
        report = check_run(read_run(path, overrides), world_size, RULES)
        found.append({one.rule: (one.detail, str(one.error or "")) for one in report.findings})
    return found


def trained(path: Path, *overrides: str) -> int:
    """The status of ``tangram train``."""
    return main(["train", str(path), *overrides])
