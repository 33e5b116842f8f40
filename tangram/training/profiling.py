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

import torch
from torch.profiler import ProfilerActivity, profile

from tangram.config.tools import MemoryProfile, StepRange, ToolsConfig
from tangram.errors import ConfigError

logger = logging.getLogger(__name__)


class StepProfiler:
    """Starts and stops what this rank records; does nothing on ranks that record nothing.

    Args:
        rank: global rank.
        completed: iterations done before the first that this process runs.

    Raises:
        ConfigError: allocations are to be recorded on a machine without CUDA.
    """

    def __init__(self, tools: ToolsConfig, rank: int, completed: int = 0) -> None:
        self._rank = rank
        self._completed = completed
        self._trace = tools.profile if tools.profile.enable and _records(tools.profile.ranks, rank) else None
        memory = tools.memory_profile
        self._history = memory if memory.enable and _records(memory.dump_ranks, rank) else None
        self._mem_info = memory.mem_info
        self._profiler: profile | None = None
        self._recording = False
        if memory.enable and not torch.cuda.is_available():
            raise ConfigError("memory_profile.enable records the CUDA allocator, and there is no CUDA device; use memory_profile.mem_info")

    def __enter__(self) -> StepProfiler:
        self._start(self._completed)
        return self

    def step(self, iteration: int) -> None:
        """To be called after iteration ``iteration`` (the first is 1)."""
        if self._mem_info:
            logger.info("[rank %d] iteration %d: %s", self._rank, iteration, peak_memory())
        self._stop(iteration)
        self._start(iteration)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop(None)

    def _start(self, completed: int) -> None:
        if self._trace is not None and self._profiler is None and _inside(self._trace.static_param, completed):
            parameters = self._trace.static_param
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profiler = profile(
                activities=kinds,
                with_stack=parameters.with_stack,
                profile_memory=parameters.with_memory,
                record_shapes=parameters.record_shapes,
            )
            self._profiler.start()
        if self._history is not None and not self._recording and _inside(self._history, completed):
            torch.cuda.memory._record_memory_history()
            self._recording = True

    def _stop(self, completed: int | None) -> None:
        """Write what has been recorded if its range is over; with None, the run is."""
        if self._profiler is not None and self._trace is not None and (completed is None or completed >= self._trace.static_param.end_step):
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._file(self._trace.static_param.save_path, f"rank_{self._rank}.json")))
            self._profiler = None
        if self._recording and self._history is not None and (completed is None or completed >= self._history.end_step):
            torch.cuda.memory._dump_snapshot(str(self._file(self._history.save_path, f"rank_{self._rank}.pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._recording = False

    def _file(self, folder: str, name: str) -> Path:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder, name)
        logger.info("[rank %d] writing %s", self._rank, path)
        return path


def _records(ranks: Sequence[int], rank: int) -> bool:
    return rank in ranks or list(ranks) == [-1]


def _inside(steps: StepRange | MemoryProfile, completed: int) -> bool:
    return steps.start_step <= completed < steps.end_step


def peak_memory() -> str:
    """Peak since the last call on CUDA, of the allocator; on CPU the process's peak so far. In MB (2^20 bytes)."""
    if torch.cuda.is_available():
        text = f"max allocated {torch.cuda.max_memory_allocated() / 2**20:.1f} MB, max reserved {torch.cuda.max_memory_reserved() / 2**20:.1f} MB"
        torch.cuda.reset_peak_memory_stats()
        return text
    unit = 1 if sys.platform == "darwin" else 1024
    return f"max resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:.1f} MB"
