"""Options of verify and inspect as typed sections; no torch here, so that help is quick."""

from __future__ import annotations

from pydantic import Field

from tangram.checkpoints.options import ParallelOptions
from tangram.config.parsing import Section
from tangram.errors import ConfigError


class ConfigOptions(Section):
    """Where config.json lies."""

    hf_dir: str | None = Field(default=None, description="directory with the config.json of a checkpoint that holds none")


class VerifyOptions(Section):
    """Options of verify."""

    source_dir: str = Field(description="first checkpoint: Hugging Face directory, mp_rank directory or training checkpoint")
    target_dir: str = Field(description="second checkpoint, of any kind and split")
    source_parallel_config: ParallelOptions = Field(
        default_factory=ParallelOptions, description="split of the first; absent: by its manifest or its folders"
    )
    target_parallel_config: ParallelOptions = Field(
        default_factory=ParallelOptions, description="split of the second; absent: by its manifest or its folders"
    )
    hf_config: ConfigOptions = Field(default_factory=ConfigOptions)
    workers: int = Field(default=2, ge=1, le=256, description="tensors compared at the same time")
    tolerance: float | None = Field(
        default=None, ge=0, description="elements whose difference is at most this times the larger magnitude are equal; absent: bits must be equal"
    )
    ignore_dtype: bool = Field(default=False, description="compare values of different element types, converted exactly")


class InspectOptions(Section):
    """Options of inspect."""

    dir: str | None = Field(default=None, description="directory to describe")
    mm_dir: str | None = Field(default=None, description="another name of dir")
    hf_config: ConfigOptions = Field(default_factory=ConfigOptions)

    @property
    def path(self) -> str:
        """The directory.

        Raises:
            ConfigError: neither of the two names is given, or both.
        """
        if self.dir and not self.mm_dir:
            return self.dir
        if self.mm_dir and not self.dir:
            return self.mm_dir
        raise ConfigError(f"--cfg.dir is {self.dir}, --cfg.mm_dir is {self.mm_dir}; give one of them")


class LookOptions(Section):
    """What verify and inspect take besides their own options."""

    json_: bool = Field(default=False, description="print JSON")
    plugin: list[str] = Field(default=[], description="Python file or folder to import first; may be repeated")


class Verify(LookOptions):
    """verify."""

    cfg: VerifyOptions


class Inspect(LookOptions):
    """inspect."""

    cfg: InspectOptions = Field(default_factory=InspectOptions)
