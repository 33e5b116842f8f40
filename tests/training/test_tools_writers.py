"""Writers: what reaches TensorBoard's files and Weights & Biases, and what a run without their packages is told."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tangram.config import preflight_rules
from tangram.config.preflight_rules import Subject, tools
from tangram.config.run import RunConfig
from tangram.config.yaml_config import read_run
from tangram.errors import ConfigError
from tangram.training.records import StepRecord, row_of
from tangram.training.writers import TensorboardWriter, open_writers
from tests.trial import Trial

RECORD = StepRecord(
    step=3, consumed_samples=12, loss=2.5, supervised_tokens=5, tokens=30, padded_tokens=40, samples=4, grad_norm=1.5, lr=1e-3, step_ms=10.0,
    loss_scale=1.0, skipped=False, model_tflop=0.02, peak_tflops=8.0,
)  # fmt: skip


class StandInRun:
    def __init__(self, number: str) -> None:
        self.id, self.logged, self.finished = number, list[tuple[int, dict[str, float]]](), False

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.finished = True


class StandIn(ModuleType):
    """Records how wandb is called."""

    class errors:
        class Error(Exception):
            pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls, self.runs, self.refuses = list[dict[str, Any]](), list[StandInRun](), ""

    def init(self, **given: Any) -> StandInRun:
        if self.refuses:
            raise self.errors.Error(self.refuses)
        self.calls.append(given)
        self.runs.append(StandInRun(given["id"] or f"made-up-{len(self.runs)}"))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def asked(trial: Trial, folder: Path, **changes: Any) -> RunConfig:
    words = [f"tools.{key.replace('__', '.')}={value}" for key, value in changes.items()]
    return read_run(trial.run_file, [f"training.save={folder}", *words])


def test_every_number_of_a_record_reaches_wandb_under_its_name(trial: Trial, wandb: StandIn, tmp_path: Path) -> None:
    run = asked(trial, tmp_path, wandb__enable=True, wandb__project="eyes", wandb__name="first", wandb__tags="[a, b]", wandb__mode="offline")
    (writer,) = open_writers(run, 0)
    writer.write(RECORD)
    writer.write(replace(RECORD, step=4, loss=math.nan, valid_loss=1.25))
    writer.close()
    (given,), (made,) = wandb.calls, wandb.runs
    assert (given["project"], given["name"], given["tags"], given["mode"], given["id"], given["resume"]) == (
        "eyes",
        "first",
        ["a", "b"],
        "offline",
        None,
        None,
    )
    assert given["dir"] == str(tmp_path) and given["config"]["training"]["lr"] == run.training.lr
    (step, numbers), (later, with_nan) = made.logged
    assert (step, later, made.finished) == (3, 4, True)
    assert {"step": 3, **numbers} == row_of(RECORD) and numbers["tflops_per_device"] == 2.0 and numbers["mfu"] == 0.25
    assert math.isnan(with_nan["loss"]) and with_nan["nan"] == 1 and with_nan["valid_loss"] == 1.25 and "valid_loss" not in numbers


def test_a_resumed_run_goes_on_in_wandb_and_a_fresh_one_begins(trial: Trial, wandb: StandIn, tmp_path: Path) -> None:
    run = asked(trial, tmp_path, wandb__enable=True)
    for resumed in (0, 2, 0):
        open_writers(run, resumed)
    assert [(call["id"], call["resume"]) for call in wandb.calls] == [(None, None), ("made-up-0", "allow"), (None, None)]
    open_writers(asked(trial, tmp_path, wandb__enable=True, wandb__id="mine"), 2)
    assert wandb.calls[-1]["id"] == "mine"


def test_what_wandb_refuses_is_one_line(trial: Trial, wandb: StandIn, tmp_path: Path) -> None:
    wandb.refuses = "no API key\nconfigured"
    with pytest.raises(ConfigError, match="tools.wandb: no API key configured; log in with `wandb login`, set mode to offline"):
        open_writers(asked(trial, tmp_path, wandb__enable=True), 0)


def test_nothing_is_imported_unless_it_is_asked_for(trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert open_writers(asked(trial, tmp_path), 0) == []
    with pytest.raises(ImportError):
        open_writers(asked(trial, tmp_path, tensorboard__enable=True), 0)


def test_nan_is_seen_in_tensorboard(trial: Trial, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tests.training.test_tools_run import points

    run = asked(trial, tmp_path, tensorboard__enable=True)
    writer = TensorboardWriter(run.tools.tensorboard, run.training.save, 0)
    writer.write(replace(RECORD, loss=math.nan, grad_norm=math.inf))
    writer.close()
    curves = points(tmp_path / "tensorboard")
    assert math.isnan(curves["loss"][0][1]) and curves["grad_norm"] == [(3, math.inf)] and curves["nan"] == [(3, 1.0)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_before_anything_starts(name: str, trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(asked(trial, tmp_path, **{f"{name}__enable": True}), 1)
    monkeypatch.setattr(preflight_rules, "find_spec", lambda package: None if package == name else object())
    with pytest.raises(ConfigError, match=f"tools.{name}.enable needs the package {name}: pip install {name}; or set it to false"):
        tools(subject)
    monkeypatch.setattr(preflight_rules, "find_spec", lambda package: object())
    assert tools(subject) == name


def test_tensorboard_needs_a_place(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_rules, "find_spec", lambda package: object())
    with pytest.raises(ConfigError, match=r"tools.tensorboard.enable needs log_dir, or training.save"):
        tools(Subject(read_run(trial.run_file, ["tools.tensorboard.enable=true"]), 1))
