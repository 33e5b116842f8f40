"""The step profiler: which iterations and ranks it records."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.config.tools import ToolsConfig
from tangram.training.profiling import StepProfiler


def tools(folder: Path, **profile: Any) -> ToolsConfig:
    static = {"start_step": 2, "end_step": 4, "save_path": str(folder), "record_shapes": True}
    return ToolsConfig.model_validate({"profile": {"enable": True, "static_param": static, **profile}})


def train(config: ToolsConfig, rank: int = 0, first: int = 0, last: int = 6) -> None:
    with StepProfiler(config, rank, completed=first) as profiler:
        for iteration in range(first + 1, last + 1):
            torch.ones(iteration, 7).cumsum(0)
            profiler.step(iteration)


def recorded(path: Path) -> list[int]:
    """First dimension of the operand of every cumsum in a trace: the iterations that were recorded."""
    events = json.loads(path.read_text())["traceEvents"]
    return [event["args"]["Input Dims"][0][0] for event in events if event.get("name") == "aten::cumsum"]


def test_records_the_iterations_after_start_step_up_to_end_step(tmp_path: Path) -> None:
    train(tools(tmp_path))
    assert recorded(tmp_path / "rank_0.json") == [3, 4]


def test_a_resumed_run_counts_from_its_first_iteration(tmp_path: Path) -> None:
    train(tools(tmp_path), first=3)
    assert recorded(tmp_path / "rank_0.json") == [4]


def test_a_run_that_ends_inside_the_range_writes_what_it_has(tmp_path: Path) -> None:
    train(tools(tmp_path), last=3)
    assert recorded(tmp_path / "rank_0.json") == [3]


@pytest.mark.parametrize(("ranks", "rank", "written"), [([0], 1, False), ([1], 1, True), ([-1], 5, True)])
def test_only_the_named_ranks_record(tmp_path: Path, ranks: list[int], rank: int, written: bool) -> None:
    train(tools(tmp_path, ranks=ranks), rank=rank)
    assert (tmp_path / f"rank_{rank}.json").exists() is written


def test_nothing_is_recorded_when_off(tmp_path: Path) -> None:
    train(tools(tmp_path, enable=False))
    assert not list(tmp_path.iterdir())


def test_memory_of_every_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = ToolsConfig.model_validate({"memory_profile": {"mem_info": True}})
    parent = logging.getLogger("tangram")
    before = parent.level
    parent.setLevel(logging.WARNING)  # as on every rank but the first
    train(config, rank=1, last=2)
    parent.setLevel(before)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["rank 1, iteration 1", "rank 1, iteration 2"]
    assert float(lines[0].split()[-2]) > 50  # a process with torch in it holds more than 50 MB
