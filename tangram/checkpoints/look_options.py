"""Options of verify and inspect as typed sections; no torch here, so that help is quick."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from tangram.checkpoints.options import HFOptions, ParallelOptions
from tangram.config.parsing import Section


class VerifyOptions(Section):
    """Options of verify."""

    source_dir: str = Field(description="first checkpoint: Hugging Face directory, mp_rank directory or training checkpoint")
    target_dir: str = Field(description="second checkpoint, of any kind and split")
    source_parallel_config: ParallelOptions | None = Field(default=None, description="split of the first; absent: by its manifest or its folders")
    target_parallel_config: ParallelOptions | None = Field(default=None, description="split of the second; absent: by its manifest or its folders")
    hf_config: HFOptions | None = Field(default=None, description="where config.json lies when a checkpoint holds none and the other neither")
    workers: int = Field(default=2, ge=1, description="tensors compared at the same time")
    tolerance: float | None = Field(
        default=None, ge=0, description="elements whose difference is at most this times the larger magnitude are equal; absent: bits must be equal"
    )
    ignore_dtype: bool = Field(default=False, description="compare values of different element types, converted exactly")
    json_output: bool = Field(default=False, description="print JSON")


class InspectOptions(Section):
    """Options of inspect."""

    dir: str | None = Field(default=None, description="directory to describe")
    mm_dir: str | None = Field(default=None, description="another name of dir")
    hf_config: HFOptions | None = Field(default=None, description="where config.json lies when the directory holds none")
    json_output: bool = Field(default=False, description="print JSON")

    @model_validator(mode="after")
    def _one_directory(self) -> Self:
        if (self.dir is None) == (self.mm_dir is None):
            raise ValueError("give one of dir and mm_dir")
        return self

    @property
    def path(self) -> str:
        return self.dir or self.mm_dir or ""
