"""Options of mm-convert as typed sections, one per command; no torch here, so that its help is quick."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from tangram.config.model import LayerList
from tangram.config.parsing import Section

DTypeName = Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MANIFEST_SAYS = "or what the manifest of a directory that is read says"


class ParallelOptions(Section):
    """A split over devices."""

    llm_pp_layers: LayerList | None = Field(
        default=None,
        description=f"text layers per stage, [12,16], or per virtual stage and stage, [[12,16]]; absent: one stage, {MANIFEST_SAYS}",
    )
    vit_pp_layers: LayerList | None = Field(
        default=None, description=f"vision layers per stage, [32,0] or [[32,0]]; absent: all on the first stage, {MANIFEST_SAYS}"
    )
    tp_size: int | None = Field(default=None, ge=1, description=f"tensor-parallel size; absent: 1, {MANIFEST_SAYS}")
    vit_tp_size: int | None = Field(
        default=None, ge=0, description=f"tensor-parallel size of the vision encoder and the projector; 0: tp_size; absent: 0, {MANIFEST_SAYS}"
    )
    ep_size: int | None = Field(default=None, ge=1, description=f"expert-parallel size; absent: 1, {MANIFEST_SAYS}")
    make_vocab_size_divisible_by: int | None = Field(
        default=None, ge=1, description=f"pad the vocabulary to a multiple of this times tp_size; absent: 1, {MANIFEST_SAYS}"
    )

    @property
    def given(self) -> bool:
        """Whether anything is said."""
        return self != ParallelOptions()


class HFOptions(Section):
    """The Hugging Face side."""

    hf_dir: str = Field(description="Hugging Face directory: weights and config, or on the way back config, tokenizer and processor files")


class HFConfigOptions(Section):
    """A Hugging Face directory of which config.json alone is read."""

    hf_dir: str | None = Field(default=None, description="Hugging Face directory whose config.json describes the model; absent: the manifest's")


class LanguageModelOptions(Section):
    """Another language model's weights."""

    hf_dir: str | None = Field(default=None, description="directory of a text-only model of the same sizes, whose weights the text decoder takes")


class FormOptions(Section):
    """Form of an mp_rank directory."""

    enable_canonical_hf_struct: bool | None = Field(
        default=None, description=f"q, k, v and gate, up as separate parameters; absent: false, {MANIFEST_SAYS}"
    )


class FormAndTextOptions(FormOptions):
    """Form of the mp_rank directory, and where the text decoder's weights come from."""

    llm_hf_dir: str | None = Field(default=None, description="the same as llm_hf_config.hf_dir")


class ToMMOptions(Section):
    """Options of hf_to_mm."""

    mm_dir: str = Field(description="mp_rank directory to write")
    hf_config: HFOptions
    parallel_config: ParallelOptions = Field(default_factory=ParallelOptions)
    common_model_config: FormAndTextOptions = Field(default_factory=FormAndTextOptions)
    llm_hf_config: LanguageModelOptions = Field(default_factory=LanguageModelOptions)
    save_vit_only: bool = Field(default=False, description="write the vision encoder and the projector alone")
    trust_remote_code: Literal[False] = Field(default=False, description="accepted as false only: nothing here runs a model's own code")

    @model_validator(mode="after")
    def _one_language_model(self) -> ToMMOptions:
        one, other = self.llm_hf_config.hf_dir, self.common_model_config.llm_hf_dir
        if one is not None and other is not None and one != other:
            raise ValueError(f"llm_hf_config.hf_dir {one} and common_model_config.llm_hf_dir {other} differ; give one of them")
        if self.language_model is not None and self.save_vit_only:
            raise ValueError(f"save_vit_only leaves out the text decoder, so the weights of {self.language_model} go nowhere; give one of the two")
        return self

    @property
    def language_model(self) -> str | None:
        """Directory of another language model."""
        return self.llm_hf_config.hf_dir or self.common_model_config.llm_hf_dir


class ToHFOptions(Section):
    """Options of mm_to_hf."""

    mm_dir: str = Field(description="mp_rank directory to read")
    save_hf_dir: str = Field(description="Hugging Face directory to write")
    hf_config: HFOptions
    parallel_config: ParallelOptions = Field(default_factory=ParallelOptions)
    common_model_config: FormOptions = Field(default_factory=FormOptions)
    save_vit_only: bool = Field(default=False, description="write the vision encoder and the projector alone")
    trust_remote_code: Literal[False] = Field(default=False, description="accepted as false only: nothing here runs a model's own code")


class ResplitOptions(Section):
    """Options of resplit."""

    source_dir: str = Field(description="mp_rank directory to read")
    target_dir: str = Field(description="mp_rank directory to write")
    source_parallel_config: ParallelOptions = Field(default_factory=ParallelOptions)
    target_parallel_config: ParallelOptions = Field(default_factory=ParallelOptions)
    source_common_model_config: FormOptions = Field(default_factory=FormOptions)
    common_model_config: FormOptions = Field(default_factory=FormOptions, description="of the directory that is written; absent: as the source")
    hf_config: HFConfigOptions = Field(default_factory=HFConfigOptions)
    save_vit_only: bool = Field(default=False, description="write the vision encoder and the projector alone")


class MMToDCPOptions(Section):
    """Options of mm_to_dcp."""

    mm_dir: str = Field(description="mp_rank directory to read")
    parallel_config: ParallelOptions = Field(default_factory=ParallelOptions)
    common_model_config: FormOptions = Field(default_factory=FormOptions)
    hf_config: HFConfigOptions = Field(default_factory=HFConfigOptions)


class CommandOptions(Section):
    """What every command takes besides its own options."""

    dtype: DTypeName | None = Field(default=None, description="element type of the weights; absent: each tensor keeps its own")
    dry_run: bool = Field(default=False, description="print what would be written, and the memory it takes, and write nothing")
    plugin: list[str] = Field(default=[], description="Python file or folder to import first; may be repeated")

    @property
    def dtype_name(self) -> str | None:
        """``dtype`` as torch spells it."""
        return SHORT_DTYPES.get(self.dtype, self.dtype) if self.dtype else None


class CopyOptions(CommandOptions):
    """Of a command that writes several files; a training checkpoint is one, written piece by piece."""

    workers: int = Field(default=2, ge=1, le=256, description="tensors copied at the same time")


class ShardOptions(CopyOptions):
    """Of a command that writes a Hugging Face directory."""

    max_shard_size: str | None = Field(
        default=None,
        pattern=r"(?i)^\s*[0-9]{1,15}(\.[0-9]{1,15})?\s*([KMGT]i?)?B?\s*$",
        description="largest weight file, such as 5GB (10^9 bytes) or 500MiB; absent: the files of hf_dir",
    )

    @field_validator("max_shard_size")
    @classmethod
    def _holds_a_byte(cls, size: str | None) -> str | None:
        if size is not None and parse_size(size) < 1:
            raise ValueError(f"{size!r} is less than one byte; write a size such as 5GB")
        return size

    @property
    def max_shard_bytes(self) -> int | None:
        """``max_shard_size`` in bytes."""
        return None if self.max_shard_size is None else parse_size(self.max_shard_size)


class HFToMM(CopyOptions):
    """hf_to_mm."""

    cfg: ToMMOptions


class MMToHF(ShardOptions):
    """mm_to_hf."""

    cfg: ToHFOptions


class Resplit(CopyOptions):
    """resplit."""

    cfg: ResplitOptions


class MMToDCP(CommandOptions):
    """mm_to_dcp."""

    cfg: MMToDCPOptions
    dcp_dir: str = Field(description="folder of training checkpoints to write")


class HFToDCP(CommandOptions):
    """hf_to_dcp."""

    hf_dir: str = Field(description="Hugging Face directory to read")
    dcp_dir: str = Field(description="folder of training checkpoints to write")


class DCPToHF(ShardOptions):
    """dcp_to_hf."""

    load_dir: str = Field(description="folder of one training checkpoint, or of checkpoints, whose newest is taken")
    save_dir: str = Field(description="Hugging Face directory to write")
    model_assets_dir: str | None = Field(
        default=None, description="Hugging Face directory whose tokenizer, processor and other small files are copied, and its weight files imitated"
    )
    to_bf16: bool = Field(default=False, description="the same as --dtype bfloat16")

    @model_validator(mode="after")
    def _one_dtype(self) -> DCPToHF:
        if self.to_bf16 and self.dtype_name not in (None, "bfloat16"):
            raise ValueError(f"to_bf16 true and dtype {self.dtype} contradict each other; give one of them")
        return self

    @property
    def dtype_name(self) -> str | None:
        return "bfloat16" if self.to_bf16 else super().dtype_name


def parse_size(text: str) -> int:
    """``5GB``, ``500 MiB`` or ``1000`` in bytes; K, M, G, T are powers of 1000, and with an i of 1024.

    Raises:
        ValueError: not a size.
    """
    word = text.strip().lower().removesuffix("b").strip()
    base = 1024 if word.endswith("i") else 1000
    word = word.removesuffix("i")
    power = "kmgt".find(word[-1]) + 1 if word else 0
    return int(float(word[: -1 if power else None]) * base**power)
