"""The six sections of a run file of the ``fsdp2`` backend, under the names that MindSpeed-MM's FSDP2 files use.

``tangram.config.fsdp2_run`` turns them into the ``RunConfig`` that the loop, the data and the checkpoints know; what concerns this backend
alone is read from here (``run.fsdp2``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from tangram.config.data import DataConfig, DataloaderParam
from tangram.config.parsing import LocalPath, Section
from tangram.config.tools import ToolsConfig


def _listed(value: Any) -> Any:
    """A text is the list of its parts between commas, which paths of modules cannot hold; null is an empty list."""
    if value is None:
        return []
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _resolve_plugin(value: str, info: ValidationInfo) -> str:
    """Files and folders become absolute; else it is the name of a package."""
    base = (info.context or {}).get("base")
    if not value.strip():
        raise ValueError("the name of a plug-in is empty; give a Python file, a folder or a package")
    path = Path(base or "", Path(value).expanduser())
    is_path = value.endswith(".py") or value.startswith((".", "~", "/")) or path.exists()
    return str(path.resolve()) if is_path and base else value


Names = Annotated[list[str], BeforeValidator(_listed)]
Patterns = Names
"""Module paths in the language of ``tangram.config.patterns``."""
FolderOrNone = Annotated[LocalPath | None, BeforeValidator(lambda value: None if value == "" else value)]
"""An empty text is none, as files of MindSpeed-MM have it."""
Plugin = Annotated[str, AfterValidator(_resolve_plugin)]
FloatType = Literal["fp16", "bf16", "fp32"]


class FsdpPlan(Section):
    """Which modules are sharded as units of their own, and how."""

    apply_modules: Patterns = []
    """In order of execution, which is also the order of prefetching. What no unit holds belongs to the root."""
    ignored_modules: Patterns = []
    """Their parameters are not sharded: every rank holds them whole."""
    hook_modules: Patterns | None = None
    """Units below one of these modules are gathered when it is entered, all at once, rather than each by itself."""
    param_dtype: FloatType | None = None
    """Type that weights are gathered in and computed with; None: fp32. The sharded weights themselves are fp32."""
    reduce_dtype: FloatType | None = None
    """Type that gradients are summed in; None: ``param_dtype``."""
    output_dtype: FloatType | None = None
    cast_forward_inputs: bool = True
    reshard_after_forward: bool = True
    """Free gathered weights after a unit's forward pass and gather them again for its backward pass."""
    num_to_forward_prefetch: int = Field(default=0, ge=0)
    """Units that are gathered ahead; 0: torch's own choice."""
    num_to_backward_prefetch: int = Field(default=0, ge=0)
    pregather: bool = False
    """Gather all units before the first forward pass of a step."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in host memory."""


class EpPlan(Section):
    """Which modules hold experts, and how tokens reach them."""

    apply_modules: Patterns = []
    apply_efsdp_modules: Patterns = []
    """Expert modules that are sharded over the ranks that hold the same experts; none given: ``apply_modules``."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"


class Fsdp2Parallel(Section):
    data_parallel_size: int | None = Field(default=None, ge=1)
    """None: what the number of processes leaves; else it must be that."""
    fully_shard_parallel_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Ranks that share one copy of the weights, context-parallel ranks included; fewer than all: copies (HSDP)."""
    ulysses_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of a sample."""
    expert_parallel_size: int = Field(default=1, ge=1)
    expert_fully_shard_parallel_size: int | None = Field(default=None, ge=1)
    fsdp_plan: FsdpPlan = FsdpPlan()
    ep_plan: EpPlan = EpPlan()
    distributed_timeout_minutes: int = Field(default=10, ge=1)
    distributed_backend: Literal["gloo", "nccl", "hccl"] | None = None
    """None: what the platform offers."""


class Fsdp2Model(Section):
    model_id: str | None = None
    """Of a class that ``model_register`` knows; None: the class that config.json names, as transformers has it."""
    model_name_or_path: LocalPath
    """Hugging Face directory: config.json, and the weights where ``training.load`` names none."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    trust_remote_code: bool = False
    freeze: Patterns = []
    """Modules whose parameters are not trained."""


class RecomputePlan(Section):
    apply_modules: Patterns = []
    use_reentrant: bool = False


class LossConfig(Section):
    loss_type: Literal["raw", "default", "per_sample_loss", "per_token_loss"] = "default"
    """raw: the model's own loss. The others: see ``tangram.losses.modes``."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)


class ChunkLossPlan(Section):
    apply_module: str = "lm_head"
    chunk_size: int = Field(default=1024, ge=1)
    """Positions of each row that reach the head at a time."""
    total_chunk_size: int = Field(default=4096, ge=1)
    """The same over all rows, with ``enable_dynamic_chunk_loss``."""


class ActivationOffloadPlan(Section):
    apply_modules: Patterns = []


class ChunkMbsPlan(Section):
    apply_modules: Patterns = []
    chunk_mbs: int = Field(default=1, ge=1)
    batch_dim: int = 0
    chunk_arg_indexs: Annotated[list[int], BeforeValidator(_listed)] = [0]
    chunk_kwarg_names: Names = []


class Fsdp2Features(Section):
    recompute: bool = False
    recompute_plan: RecomputePlan = RecomputePlan()
    loss_cfg: LossConfig = LossConfig()
    enable_chunk_loss: bool = False
    enable_dynamic_chunk_loss: bool = False
    chunkloss_plan: ChunkLossPlan = ChunkLossPlan()
    enable_activation_offload: bool = False
    activation_offload_plan: ActivationOffloadPlan = ActivationOffloadPlan()
    enable_chunk_mbs: bool = False
    chunkmbs_plan: ChunkMbsPlan = ChunkMbsPlan()


class Fsdp2Dataloader(DataloaderParam):
    """As of data.json, and what the other backend takes from its launch flags."""

    num_workers: int = Field(default=2, ge=0)
    """Processes on each rank that read micro-batches; 0: the rank's own."""


class Fsdp2Data(DataConfig):
    dataloader_param: Fsdp2Dataloader = Fsdp2Dataloader()


class LrScale(Section):
    match: str
    """Regular expression for the beginning of a parameter's name (Python's ``re.match``); the first that matches counts."""
    scale: float = Field(default=1.0, gt=0)


class Fsdp2Training(Section):
    micro_batch_size: int = Field(default=1, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    train_iters: int | None = Field(default=None, ge=1)
    train_epochs: int | None = Field(default=None, ge=1)
    """Passes over the data in place of ``train_iters``."""
    seq_length: int | None = Field(default=None, ge=1)
    """Longest sample, tokens; None: ``cutoff_len`` of the data, or 1024."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    lr: float = Field(default=5e-5, gt=0)
    lr_min: float = Field(default=0.0, ge=0)
    lr_start: float = Field(default=0.0, ge=0)
    """Rate of the first step of a warm-up."""
    lr_warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_ratio: float = Field(default=1.0, gt=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    no_decay_modules: Names = []
    """Parts of class names of modules whose own parameters have no weight decay, such as RMSNorm."""
    no_decay_params: Names = []
    """Parts of parameter names that have none."""
    lr_scaling_plan: list[LrScale] = []
    optimizer: Literal["adamw", "muon"] = "adamw"
    adam_fused: bool = True
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    matched_adamw_rms: float = Field(default=0.2, gt=0)
    ns_steps: int = Field(default=5, ge=1)
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""
    clip_grad_foreach: bool = True
    use_deter_comp: bool = False
    init_model_with_meta_device: bool = False
    """True: weights are first made where they stay, each rank its own part. False: every rank builds the whole model in host memory first,
    which models need whose constructors compute something."""
    load: FolderOrNone = None
    """Weights to start from: a Hugging Face directory or a training checkpoint; None: those of ``model_name_or_path`` where it has any."""
    load_format: Literal["auto", "hf", "dcp"] = "auto"
    """What must lie there: a Hugging Face directory or a training checkpoint; auto: whatever is found."""
    no_load_optim: bool = False
    no_load_rng: bool = False
    random_init: bool = False
    """Start from random weights although ``model_name_or_path`` has some."""
    save: FolderOrNone = None
    save_interval: int | None = Field(default=None, ge=1)
    save_format: Literal["dcp", "hf"] = "dcp"
    """hf: Hugging Face directories in ``hf`` of ``save`` in place of training checkpoints; no run can be resumed from them."""
    save_async: bool = False
    """Write checkpoints while training goes on, from a copy in host memory: once more the bytes of a rank's weights and optimizer state."""
    save_ckpt_dtype: FloatType | None = None
    """Type that weights are saved in, those in Hugging Face directories too; None: ``param_dtype``. The fp32 values of trained weights are saved
    besides where it is smaller, so resuming loses nothing."""
    save_total_limit: int | None = Field(default=None, ge=1)
    """Checkpoints of this run that are kept, the newest; None: all."""
    save_hf_interval: int | None = Field(default=None, ge=1)
    """Steps after which, and at the end, the weights are also written as a Hugging Face directory, in ``hf`` of ``save``."""
    no_save_optim: bool = False
    no_save_rng: bool = False
    log_interval: int = Field(default=1, ge=1)
    log_tps: bool = False
    """Write tokens per sample to the log line."""
    val_interval: int = Field(default=0, ge=0)
    """Steps after which validation data are read; 0: never."""
    val_iters: int | None = Field(default=None, ge=1)
    """Global batches of a validation; None: all of the validation data."""
    exit_interval: int | None = Field(default=None, ge=1)
    manual_gc_interval: int = Field(default=0, ge=0)
    """Steps after which all ranks collect garbage together; 0: Python does when it likes."""
    metrics_file: LocalPath | None = None
    plugin: Annotated[list[Plugin], BeforeValidator(_listed)] = []
    """Python files, folders, or dotted names of packages, imported first; they register models and datasets."""

    @model_validator(mode="after")
    def _one_length(self) -> Fsdp2Training:
        if (self.train_iters is None) == (self.train_epochs is None):
            raise ValueError(f"train_iters {self.train_iters} and train_epochs {self.train_epochs}: give one of them")
        return self

    @model_validator(mode="after")
    def _choices_fit(self) -> Fsdp2Training:
        for name, value in (("lr_min", self.lr_min), ("lr_start", self.lr_start)):
            if value > self.lr:
                raise ValueError(f"{name} {value:g} is larger than lr {self.lr:g}; lower it")
        if self.val_iters is not None and not self.val_interval:
            raise ValueError(f"val_iters {self.val_iters} does nothing without val_interval; give both, or neither")
        if self.load is not None and self.random_init:
            raise ValueError(f"random_init is true, but load names weights ({self.load}); remove one of them")
        return self


class Fsdp2Config(Section):
    """A whole run file of this backend."""

    backend: Literal["fsdp2"] = "fsdp2"
    parallel: Fsdp2Parallel = Fsdp2Parallel()
    data: Fsdp2Data
    model: Fsdp2Model
    features: Fsdp2Features = Fsdp2Features()
    training: Fsdp2Training
    tools: ToolsConfig = ToolsConfig()
