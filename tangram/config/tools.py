"""The typed form of tools.json: the profiler and the memory recorder. Key names are those of MindSpeed-MM's tools.json.

Steps are counted as the log counts iterations: with ``start_step`` 10 and ``end_step`` 12, iterations 11 and 12 are recorded.
"""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator

from tangram.config.parsing import LocalPath, Section


class ToolSection(Section):
    """Defaults are validated again where they are used, so that paths in them are resolved like given ones."""

    model_config = ConfigDict(revalidate_instances="always")


class StepRange(ToolSection):
    """Iterations after ``start_step``, up to and with ``end_step``."""

    start_step: int = Field(default=10, ge=0)
    end_step: int = Field(default=11, ge=1)

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> StepRange:
        if self.end_step <= self.start_step:
            raise ValueError(f"end_step {self.end_step} must be larger than start_step {self.start_step}")
        return self


class StaticProfile(StepRange):
    """What torch.profiler records."""

    save_path: LocalPath = "./profiling"
    """Folder that gets one Chrome trace per rank."""
    with_stack: bool = False
    with_memory: bool = False
    record_shapes: bool = False


class Profile(ToolSection):
    """A trace of operators over a few iterations."""

    enable: bool = False
    ranks: list[int] = [0]
    """Global ranks that record; ``[-1]``: all."""
    static_param: StaticProfile = StaticProfile()


class MemoryProfile(StepRange):
    """Where memory goes."""

    start_step: int = Field(default=0, ge=0)
    end_step: int = Field(default=2, ge=1)
    enable: bool = False
    """Record every allocation and write a snapshot per rank; needs CUDA."""
    save_path: LocalPath = "./memory_snapshot"
    dump_ranks: list[int] = [0]
    """Global ranks that record; ``[-1]``: all."""
    mem_info: bool = False
    """Log the peak memory of every iteration on every rank: of the allocator on CUDA, of the process on CPU."""


class ToolsConfig(ToolSection):
    """Profiling and memory tools."""

    profile: Profile = Profile()
    memory_profile: MemoryProfile = MemoryProfile()
