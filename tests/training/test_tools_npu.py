"""Profiler and memory recorder on accelerators that are not here: how stand-ins of torch_npu and of the CUDA allocator are called."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tangram.config.tools import ToolsConfig
from tangram.errors import ConfigError
from tangram.platform import CudaPlatform, NpuPlatform
from tangram.training import profiling
from tangram.training.profiling import StepProfiler, check_tools


class NpuProfiler(ModuleType):
    """The names of torch_npu.profiler that are used."""

    def __init__(self) -> None:
        super().__init__("torch_npu.profiler")
        self.given: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.ProfilerLevel = SimpleNamespace(Level0="L0", Level1="L1", Level2="L2")
        self.AiCMetrics = SimpleNamespace(PipeUtilization="pipe", ArithmeticUtilization="arithmetic")
        self.ProfilerActivity = SimpleNamespace(CPU="cpu", NPU="npu")

    def _ExperimentalConfig(self, **settings: Any) -> dict[str, Any]:
        return settings

    def tensorboard_trace_handler(self, folder: str, analyse_flag: bool) -> tuple[str, bool]:
        return folder, analyse_flag

    def profile(self, **settings: Any) -> Any:
        self.given.append(settings)
        return SimpleNamespace(start=lambda: self.calls.append("start"), stop=lambda: self.calls.append("stop"))


def steps(config: ToolsConfig, last: int = 4) -> None:
    with StepProfiler(config, 0) as profiler:
        for iteration in range(1, last + 1):
            profiler.step(iteration)


def test_each_key_reaches_the_npu_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npu, package = NpuProfiler(), ModuleType("torch_npu")
    package.profiler = npu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    monkeypatch.setattr(profiling, "current", NpuPlatform)
    range_ = {"start_step": 1, "end_step": 2, "save_path": str(tmp_path)}
    changed = {"level": "level2", "aic_metrics_type": "ArithmeticUtilization", "data_simplification": True, "analyse_flag": False, "with_cpu": False}
    shared = {"with_stack": True, "with_memory": True, "record_shapes": True}
    for static in (range_, {**range_, **changed, **shared}):
        steps(ToolsConfig.model_validate({"profile": {"enable": True, "static_param": static}}))
    assert npu.calls == ["start", "stop"] * 2
    assert npu.given == [
        {
            "activities": ["cpu", "npu"],
            "experimental_config": {"profiler_level": "L1", "aic_metrics": "pipe", "data_simplification": False},
            "on_trace_ready": (str(tmp_path), True),
            "with_stack": False,
            "profile_memory": False,
            "record_shapes": False,
        },
        {
            "activities": ["npu"],
            "experimental_config": {"profiler_level": "L2", "aic_metrics": "arithmetic", "data_simplification": True},
            "on_trace_ready": (str(tmp_path), False),
            "with_stack": True,
            "profile_memory": True,
            "record_shapes": True,
        },
    ]


def test_the_memory_recorder_keeps_the_stacks_and_entries_that_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **settings: calls.append(settings))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    monkeypatch.setattr(profiling, "current", CudaPlatform)
    memory = {"enable": True, "start_step": 1, "end_step": 3, "save_path": str(tmp_path), "stacks": "python", "max_entries": 500}
    steps(ToolsConfig.model_validate({"memory_profile": memory}))
    assert calls == [{"stacks": "python", "max_entries": 500}, str(tmp_path / "rank_0.pickle"), {"enabled": None}]
    calls.clear()
    steps(ToolsConfig.model_validate({"memory_profile": {"enable": True, "save_path": str(tmp_path)}}))
    assert calls[0] == {"stacks": "all", "max_entries": sys.maxsize}
    calls.clear()
    steps(ToolsConfig.model_validate({"memory_profile": {"enable": True, "save_path": str(tmp_path), "dump_ranks": [1]}}))
    assert calls == []


@pytest.mark.parametrize(
    ("tools", "platform", "message"),
    [
        (
            {"memory_profile": {"enable": True}},
            "cpu",
            r"memory_profile.enable records the allocator of an accelerator, and there is none; use .*mem_info",
        ),
        (
            {"profile": {"enable": True, "static_param": {"level": "level2"}}},
            "cuda",
            r"static_param: level: settings of the NPU profiler, .* on cuda; remove",
        ),
        ({"profile": {"enable": True, "static_param": {"with_cpu": False}}}, "cpu", r"with_cpu false leaves nothing to trace on a machine without"),
    ],
)
def test_what_a_machine_cannot_record_is_refused(tools: dict[str, Any], platform: str, message: str) -> None:
    config = ToolsConfig.model_validate(tools)
    with pytest.raises(ConfigError, match=message):
        check_tools(config, platform)
    check_tools(config, "npu")
    for part in tools.values():
        part["enable"] = False
    check_tools(ToolsConfig.model_validate(tools), platform)
