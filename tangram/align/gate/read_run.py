"""Reads what a run has left behind: metrics.jsonl with the file beside it, or a log in Megatron's form."""

from __future__ import annotations

from pathlib import Path

from tangram.align.gate.read_log import ITERATION, read_log
from tangram.align.gate.read_metrics import read_metrics
from tangram.align.gate.recorded import Recorded
from tangram.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
MARK = "tangram_baseline"
"""Key of the version in a baseline, which is its first."""


def read_run(path: Path) -> Recorded:
    """The run of a metrics.jsonl, of a folder that holds one, or of a log.

    Raises:
        ConfigError: none of these, empty, or damaged.
    """
    if path.is_dir():
        if not (path / METRICS_FILE).is_file():
            raise ConfigError(f"{path}: a folder without {METRICS_FILE}; give that file, the folder that holds it, or a log")
        path = path / METRICS_FILE
    text = read_text(path)
    if text.startswith(f'{{\n"{MARK}"'):
        raise ConfigError(f"{path}: is a baseline; give the run first and the baseline second")
    if text.lstrip().startswith("{"):
        return read_metrics(path, text)
    if not ITERATION.search(text):
        raise ConfigError(f"{path}: neither {METRICS_FILE} nor a log with lines of Megatron's form ('iteration N/ M | ... | loss: ...')")
    return read_log(path, text)


def read_text(path: Path) -> str:
    """The text of a file that holds some.

    Raises:
        ConfigError: it is missing, a folder, empty, or no text.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file; correct the path")
    if not path.is_file():
        raise ConfigError(f"{path}: {'a folder' if path.is_dir() else 'no regular file'}; give the path of a file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no text (byte {error.start} is not UTF-8); give metrics.jsonl, a log, or a baseline") from None
    if not text.strip():
        raise ConfigError(f"{path}: is empty; the run has not ended its first step")
    return text
