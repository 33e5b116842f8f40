"""The profiler and the memory recorder that tools.json asks for.

    with StepProfiler(run.tools, rank, completed=first) as profiler:
        for iteration in range(first + 1, last + 1):
            ...
            profiler.step(iteration)

A range of steps ``start_step`` .. ``end_step`` records the iterations after the first number, up to and with the second.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tangram.config.tools import MemoryProfile, StaticProfile, StepRange, ToolsConfig
from tangram.errors import ConfigError
from tangram.platform import current

logger = logging.getLogger(__name__)
# Every rank that records speaks, not the first alone.
logger.setLevel(logging.INFO)


def check_tools(tools: ToolsConfig, platform: str) -> None:
    """Refuse what this machine cannot record.

    Raises:
        ConfigError: a setting of another platform's profiler or allocator.
    """
    static = tools.profile.static_param
    if tools.memory_profile.enable and platform == "cpu":
        raise ConfigError("memory_profile.enable records the allocator of an accelerator, and there is none; use memory_profile.mem_info")
    if not tools.profile.enable or platform == "npu":
        return
    if static.npu_keys:
        keys = ", ".join(static.npu_keys)
        raise ConfigError(f"profile.static_param: {keys}: settings of the NPU profiler, and this machine runs on {platform}; remove them")
    if platform == "cpu" and not static.with_cpu:
        raise ConfigError("profile.static_param.with_cpu false leaves nothing to trace on a machine without an accelerator; set it to true")


class StepProfiler:
    """Starts and stops what this rank records; does nothing on ranks that record nothing.

    Args:
        rank: global rank.
        completed: iterations done before the first that this process runs.
    """

    def __init__(self, tools: ToolsConfig, rank: int, completed: int = 0) -> None:
        self._rank = rank
        self._completed = completed
        self._trace = tools.profile if tools.profile.enable and _records(tools.profile.ranks, rank) else None
        memory = tools.memory_profile
        self._history = memory if memory.enable and _records(memory.dump_ranks, rank) else None
        self._mem_info = memory.mem_info
        self._profiler: Any = None
        self._recording = False

    def __enter__(self) -> StepProfiler:
        self._start(self._completed)
        return self

    def step(self, iteration: int) -> None:
        """To be called after iteration ``iteration`` (the first is 1)."""
        if self._mem_info:
            logger.info("rank %d, iteration %d: %s", self._rank, iteration, peak_memory())
        self._stop(iteration)
        self._start(iteration)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop(None)

    def _start(self, completed: int) -> None:
        if self._trace is not None and self._profiler is None and _inside(self._trace.static_param, completed):
            self._profiler = _profiler(self._trace.static_param)
            self._profiler.start()
        if self._history is not None and not self._recording and _inside(self._history, completed):
            entries = sys.maxsize if self._history.max_entries is None else self._history.max_entries
            _allocator()._record_memory_history(stacks=self._history.stacks, max_entries=entries)
            self._recording = True

    def _stop(self, completed: int | None) -> None:
        """Write what has been recorded if its range is over; with None, the run is."""
        if self._profiler is not None and self._trace is not None and (completed is None or completed >= self._trace.static_param.end_step):
            self._profiler.stop()
            if current().name != "npu":  # whose profiler has written by itself
                self._profiler.export_chrome_trace(str(self._file(self._trace.static_param.save_path, f"rank_{self._rank}.json")))
            self._profiler = None
        if self._recording and self._history is not None and (completed is None or completed >= self._history.end_step):
            _allocator()._dump_snapshot(str(self._file(self._history.save_path, f"rank_{self._rank}.pickle")))
            _allocator()._record_memory_history(enabled=None)
            self._recording = False

    def _file(self, folder: str, name: str) -> Path:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder, name)
        logger.info("rank %d is writing %s", self._rank, path)
        return path


def _profiler(parameters: StaticProfile) -> Any:
    """torch's profiler, or on an NPU torch_npu's, which writes into ``save_path`` when it is stopped."""
    common: dict[str, Any] = {
        "with_stack": parameters.with_stack,
        "profile_memory": parameters.with_memory,
        "record_shapes": parameters.record_shapes,
    }
    if current().name != "npu":
        kinds = [*([ProfilerActivity.CPU] if parameters.with_cpu else []), *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        return profile(activities=kinds, **common)
    from torch_npu import profiler as npu

    settings = npu._ExperimentalConfig(
        profiler_level=getattr(npu.ProfilerLevel, parameters.level.capitalize()),
        aic_metrics=getattr(npu.AiCMetrics, parameters.aic_metrics_type),
        data_simplification=parameters.data_simplification,
    )
    return npu.profile(
        activities=[*([npu.ProfilerActivity.CPU] if parameters.with_cpu else []), npu.ProfilerActivity.NPU],
        experimental_config=settings,
        on_trace_ready=npu.tensorboard_trace_handler(parameters.save_path, analyse_flag=parameters.analyse_flag),
        **common,
    )


def _allocator() -> Any:
    return getattr(torch, current().name).memory


def _records(ranks: Sequence[int], rank: int) -> bool:
    return rank in ranks or list(ranks) == [-1]


def _inside(steps: StepRange | MemoryProfile, completed: int) -> bool:
    return steps.start_step <= completed < steps.end_step


def peak_memory() -> str:
    """Peak since the last call on an accelerator, of the allocator; on CPU the process's peak so far. In MB (2^20 bytes)."""
    if current().name != "cpu":
        device = getattr(torch, current().name)
        text = f"max allocated {device.max_memory_allocated() / 2**20:.1f} MB, max reserved {device.max_memory_reserved() / 2**20:.1f} MB"
        device.reset_peak_memory_stats()
        return text
    unit = 1 if sys.platform == "darwin" else 1024
    return f"max resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.1f} MB"
