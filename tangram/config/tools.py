"""The typed form of tools.json: profiler, memory recorder, and where a run's numbers go besides the log. Names of the first two are MindSpeed-MM's.

Steps are counted as the log counts iterations: with ``start_step`` 10 and ``end_step`` 12, iterations 11 and 12 are recorded.
"""

from __future__ import annotations

from typing import Literal

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
    """Folder that gets one Chrome trace per rank; on an NPU what its own profiler writes."""
    with_cpu: bool = True
    """False: the accelerator alone is traced."""
    with_stack: bool = False
    with_memory: bool = False
    record_shapes: bool = False
    level: Literal["level0", "level1", "level2"] = "level1"
    """How much an NPU tells of its kernels."""
    aic_metrics_type: Literal["PipeUtilization", "ArithmeticUtilization"] = "PipeUtilization"
    """What an NPU counts in its cores."""
    data_simplification: bool = False
    """Remove an NPU's raw data once they are analysed."""
    analyse_flag: bool = True
    """Analyse an NPU's raw data when the last step is recorded."""

    @property
    def npu_keys(self) -> list[str]:
        """Those changed of the keys that only an NPU heeds."""
        keys = ("level", "aic_metrics_type", "data_simplification", "analyse_flag")
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]


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
    stacks: Literal["python", "all"] = "all"
    """all: C++ frames too."""
    max_entries: int | None = Field(default=None, ge=1)
    """Newest events that are kept; None: all."""
    mem_info: bool = False
    """Log the peak memory of every iteration on every rank: of the allocator on CUDA, of the process on CPU."""


class StepTrace(ToolSection):
    """What modules compute in one iteration, to be held against another run's by ``tangram align --trace``."""

    step: int | None = Field(default=None, ge=1)
    """Iteration that is recorded; None: none is."""
    save_path: LocalPath = "./trace"
    """Folder of the trace."""
    only: list[str] = []
    """Patterns of the modules that are recorded; none: all."""


class TensorboardConfig(ToolSection):
    """Event files for TensorBoard; needs its package."""

    enable: bool = False
    log_dir: LocalPath | None = None
    """None: ``tensorboard`` in the folder of checkpoints."""


class WandbConfig(ToolSection):
    """A run of Weights & Biases; needs its package."""

    enable: bool = False
    project: str = "tangram"
    name: str | None = None
    """Of the run; None: the server makes one up."""
    entity: str | None = None
    group: str | None = None
    tags: list[str] = []
    id: str | None = None
    """Of the run that is gone on with; None: that of ``wandb_id`` in ``dir`` where this run is resumed, else a new one."""
    dir: LocalPath | None = None
    """Where files of the run lie; None: the folder of checkpoints, or the current folder."""
    mode: Literal["online", "offline"] = "online"
    """offline: nothing is sent; ``wandb sync`` sends it later."""


class ToolsConfig(ToolSection):
    """Profiling and memory tools, and writers."""

    profile: Profile = Profile()
    memory_profile: MemoryProfile = MemoryProfile()
    trace: StepTrace = StepTrace()
    tensorboard: TensorboardConfig = TensorboardConfig()
    wandb: WandbConfig = WandbConfig()
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak speed of a device in TFLOP/s, which MFU is a part of; None: that of ``tangram.platform.peaks``."""
