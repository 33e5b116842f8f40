"""Reads what a run has left behind: metrics.jsonl with the file beside it, or a log in Megatron's form."""

from __future__ import annotations

import json
from pathlib import Path

from tangram.align.gate.read_log import ITERATION, read_log
from tangram.align.gate.read_metrics import read_metrics
from tangram.align.gate.read_text import read_text
from tangram.align.gate.recorded import Recorded
from tangram.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
MARK = "tangram_baseline"
"""Key of the version in a baseline, which is its first."""


def read_run(path: Path) -> Recorded:
    """The run of a metrics.jsonl, of a folder that holds one, or of a log; each may be compressed with gzip.

    Raises:
        ConfigError: none of these, empty, or damaged.
    """
    if path.is_dir():
        found = [path / name for name in (METRICS_FILE, f"{METRICS_FILE}.gz") if (path / name).is_file()]
        if not found:
            raise ConfigError(f"{path}: a folder without {METRICS_FILE}; give that file, the folder that holds it, or a log")
        path = found[0]
    try:
        text = read_text(path)
    except ConfigError:
        # Progress bars and names of files leave bytes in logs that are no text.
        if not path.is_file() or not path.stat().st_size or not ITERATION.search(text := read_text(path, damaged="?")):
            raise
    if f'"{MARK}"' in text[:200]:
        raise ConfigError(f"{path}: is a baseline; give the run first and the baseline second")
    is_log = ITERATION.search(text) is not None
    if text.lstrip().startswith("{") and not (is_log and not looks_like_metrics(text)):
        return read_metrics(path, text)
    if not is_log:
        raise ConfigError(f"{path}: neither {METRICS_FILE} nor a log with lines of Megatron's form ('iteration N/ M | ... | loss: ...')")
    return read_log(path, text)


def looks_like_metrics(text: str) -> bool:
    """Whether the first line is a step of metrics.jsonl."""
    first = text.lstrip().partition("\n")[0]
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "step" in row
