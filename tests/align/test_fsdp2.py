"""The fsdp2 backend against transformers, by ``tangram align``; its processes are forked from the tests' warm server, not started by torchrun."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tangram.align.run as run_module
from tangram.align.batch import micro_batches, write_batch
from tangram.align.observation import read_observation
from tangram.align.run import Outcome, align, open_subject, prepare_batch
from tangram.align.sharded import Sharded
from tangram.align.task import Task, TaskList
from tangram.cli.main import main
from tangram.errors import ConfigError
from tests.fsdp2.ranks import on_ranks

CASES = Path(__file__).with_name("cases_fsdp2.py")
SMALL = {"hidden": 32, "text_layers": 2, "vision_layers": 2, "weight_std": 0.1}
VISION = "[model.visual.blocks.{*},model.visual.patch_embed]"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def running(tasks: Sequence[Task], work: Path) -> Iterator[None]:
        for task in tasks:
            task.folder.mkdir(parents=True, exist_ok=True)
        (work / "tasks.json").write_text(TaskList(tasks=list(tasks)).model_dump_json(), encoding="utf-8")
        yield

    def finish(_: None, tasks: Sequence[Task], work: Path) -> None:
        on_ranks(TaskList(tasks=list(tasks)).processes, CASES, "work_off", str(work / "tasks.json"))

    monkeypatch.setattr(run_module, "running", running)
    monkeypatch.setattr(run_module, "finish", finish)


def passed(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.report.passed, f"{outcome.split}: {outcome.report.failures}"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava"])
def test_rows_of_text_pictures_and_videos_dealt_over_ranks_give_what_transformers_gives(tiny_hf: Callable[..., Path], family: str) -> None:
    outcomes = align(tiny_hf(family, tied=family == "qwen2_vl", **SMALL), [Sharded(processes=2), Sharded()], micro_batch_size=1)
    passed(outcomes)
    names = {row.name for row in outcomes[0].report.rows if row.kind == "gradient"}
    assert len(names) > 40
    assert outcomes[0].report.tolerance == 1e-5
