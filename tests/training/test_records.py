"""The log line, and metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.errors import ConfigError
from tangram.training.records import MetricsFile, StepRecord, log_line

RECORD = StepRecord(
    step=3,
    consumed_samples=24,
    loss=2.5,
    supervised_tokens=40,
    tokens=600,
    padded_tokens=800,
    samples=8,
    grad_norm=1.23456,
    lr=1e-3,
    step_ms=200.0,
    loss_scale=1.0,
    skipped=False,
)
LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration [ \d]{7}\d/[ \d]{7}\d \| consumed samples: [ \d]{11}\d \| "
    r"elapsed time per iteration \(ms\): \d+\.\d \| learning rate: \d\.\d{6}E[+-]\d\d \| global batch size: [ \d]{4}\d \| "
    r"(?:tokens per sample: \d\.\d{6}E[+-]\d\d \| )?loss: (?:-?\d\.\d{6}E[+-]\d\d|NAN|-?INF) \| loss scale: \d+\.\d \| "
    r"grad norm: (?:\d+\.\d{3}|nan|inf) \| number of skipped iterations: [ \d]{2}\d \| number of nan iterations: [ \d]{2}\d \| tokens/s: \d+\.\d \|"
)
"""Megatron-LM's line (training_log in megatron/training/training.py) and tokens/s."""


def test_the_line_by_hand() -> None:
    assert re.sub(r"\[.*?\]", "[T]", log_line([RECORD], 100)) == (
        " [T] iteration        3/     100 | consumed samples:           24 | elapsed time per iteration (ms): 200.0 | "
        "learning rate: 1.000000E-03 | global batch size:     8 | loss: 2.500000E+00 | loss scale: 1.0 | grad norm: 1.235 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | tokens/s: 3000.0 |"
    )


@pytest.mark.parametrize("loss", [2.5, -1.0, math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("grad_norm", [0.5, math.nan, math.inf])
@pytest.mark.parametrize("tokens_per_sample", [False, True])
def test_every_value_is_printed(loss: float, grad_norm: float, tokens_per_sample: bool) -> None:
    """Megatron's own logger prints a metric only above 0, so that a loss that is not a number vanishes from the line."""
    line = log_line([replace(RECORD, loss=loss, grad_norm=grad_norm)], 100, show_tokens_per_sample=tokens_per_sample)
    assert LINE.fullmatch(line), line
    shown = re.search(r"\| loss: (\S+) \|", line)
    assert shown and (float(shown[1]) == loss or (math.isnan(loss) and math.isnan(float(shown[1]))))
    assert ("tokens per sample: 1.000000E+02" in line) == tokens_per_sample
    assert ("nan iterations:   1" in line) == (not math.isfinite(loss) or not math.isfinite(grad_norm))


def test_loss_time_and_tokens_are_means_over_the_interval() -> None:
    records = [replace(RECORD, step=step, loss=loss, step_ms=ms, tokens=tokens) for step, loss, ms, tokens in ((1, 4, 100, 10), (2, 1, 300, 50))]
    line = log_line([records[0], replace(records[1], skipped=True)], 100)
    assert "iteration        2/" in line and "loss: 2.500000E+00" in line and "(ms): 200.0" in line
    assert "tokens/s: 150.0" in line, "60 tokens in 400 ms"
    assert "skipped iterations:   1" in line


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_metrics_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "new" / "metrics.jsonl")
    metrics.write(RECORD)
    metrics.write(replace(RECORD, step=4, loss=math.nan, grad_norm=math.inf, valid_loss=-math.inf))
    rows = [json.loads(line, parse_constant=_refuse) for line in metrics.path.read_text().splitlines()]
    assert rows[0]["loss"] == 2.5 and rows[0]["tokens_per_s"] == 3000.0 and rows[0]["nan"] is False and "valid_loss" not in rows[0]
    assert (rows[1]["loss"], rows[1]["grad_norm"], rows[1]["nan"], rows[1]["valid_loss"]) == ("nan", "inf", True, "-inf")


def test_a_resumed_run_cuts_off_what_it_will_repeat(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(1, 6):
        first.write(replace(RECORD, step=step))
    path.write_text(path.read_text() + '{"step": 6, "lo')
    MetricsFile(path, resumed_step=3).write(replace(RECORD, step=4, loss=9.0))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 2.5), (2, 2.5), (3, 2.5), (4, 9.0)]
    MetricsFile(path)
    assert path.read_text() == "", "a run from step 0 begins anew"


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A run as root that names /dev/null would otherwise put a file in its place."""
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path, "a folder"), (tmp_path / "pipe", "no regular file")):
        with pytest.raises(ConfigError, match=f"metrics_file {path}: {kind}; give the path of a file"):
            MetricsFile(path)
    assert (tmp_path / "pipe").is_fifo()
