"""Options of the LoRA commands of mm-convert as typed sections; no torch here, so that help is quick."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tangram.checkpoints.options import CopyOptions, ParallelOptions, ShardOptions
from tangram.config.parsing import Section

BASE = "Hugging Face directory of the base, of which config.json alone is read; absent: "


class AdapterOptions(Section):
    """The adapter's PEFT side."""

    hf_dir: str = Field(description="PEFT directory: adapter_config.json and adapter_model.safetensors")


class AdapterConfigOptions(Section):
    """The adapter's configuration alone."""

    hf_dir: str | None = Field(default=None, description="directory with adapter_config.json; absent: mm_dir")


class BaseOptions(Section):
    """The base's side."""

    hf_dir: str = Field(description="Hugging Face directory of the base: config, weights, tokenizer and processor files")


class LoraToMMOptions(Section):
    """Options of lora_hf_to_mm."""

    mm_dir: str = Field(description="mp_rank directory of the adapter to write")
    hf_config: AdapterOptions
    base_hf_dir: str | None = Field(default=None, description=f"{BASE}base_model_name_or_path of adapter_config.json")
    parallel_config: ParallelOptions = Field(default_factory=ParallelOptions)


class LoraToHFOptions(Section):
    """Options of lora_mm_to_hf."""

    mm_dir: str = Field(description="mp_rank directory of the adapter to read")
    save_hf_dir: str = Field(description="PEFT directory to write")
    hf_config: AdapterConfigOptions = Field(default_factory=AdapterConfigOptions)
    base_hf_dir: str | None = Field(default=None, description=f"{BASE}what mm_dir's manifest says, or base_model_name_or_path")
    parallel_config: ParallelOptions = Field(default_factory=ParallelOptions, description="split of a directory without a manifest")
    key_layout: Literal["hub", "state_dict"] | None = Field(
        default=None, description="names of the modules: model.layers (hub) or model.language_model.layers (state_dict); absent: as they were"
    )


class LoraMergeOptions(Section):
    """Options of lora_merge."""

    lora_dir: str = Field(description="adapter to merge: a PEFT directory or an mp_rank directory of an adapter")
    hf_config: BaseOptions
    save_hf_dir: str = Field(description="Hugging Face directory to write")
    parallel_config: ParallelOptions = Field(default_factory=ParallelOptions, description="split of an mp_rank adapter without a manifest")


class LoraToMM(CopyOptions):
    """lora_hf_to_mm."""

    cfg: LoraToMMOptions


class LoraToHF(CopyOptions):
    """lora_mm_to_hf."""

    cfg: LoraToHFOptions


class LoraMerge(ShardOptions):
    """lora_merge."""

    cfg: LoraMergeOptions
