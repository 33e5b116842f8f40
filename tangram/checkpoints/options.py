"""Options of mm-convert as typed sections; no torch here, so that its help is quick."""

from __future__ import annotations

from pydantic import Field

from tangram.config.model import LayerList
from tangram.config.parsing import Section


class ParallelOptions(Section):
    """The split of the ``mp_rank`` directory."""

    llm_pp_layers: LayerList | None = Field(
        default=None,
        description="text layers per stage, [12,16], or per virtual stage and stage, [[12,16]]; absent: one stage, or what the manifest says",
    )
    vit_pp_layers: LayerList | None = Field(
        default=None, description="vision layers per stage, [[32,0]]; absent: all on the first stage, or what the manifest says"
    )
    tp_size: int | None = Field(default=None, ge=1, description="tensor-parallel size; absent: 1, or what the manifest says")
    make_vocab_size_divisible_by: int = Field(default=1, ge=1, description="pad the vocabulary to a multiple of this times tp_size")


class HFOptions(Section):
    """The Hugging Face side."""

    hf_dir: str = Field(description="Hugging Face directory: weights and config, or on the way back config, tokenizer and processor files")


class ToMMOptions(Section):
    """Options of hf_to_mm."""

    mm_dir: str = Field(description="mp_rank directory to write")
    hf_config: HFOptions
    parallel_config: ParallelOptions = ParallelOptions()


class ToHFOptions(ToMMOptions):
    """Options of mm_to_hf."""

    mm_dir: str = Field(description="mp_rank directory to read")
    save_hf_dir: str = Field(description="Hugging Face directory to write")
