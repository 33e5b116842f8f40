"""The six sections of a run file of the ``fsdp2`` backend, under the names that MindSpeed-MM's FSDP2 files use.

``tangram.config.fsdp2_run`` turns them into the ``RunConfig`` that the loop, the data and the checkpoints know; what concerns this backend
alone is read from here (``run.fsdp2``).
"""

from __future__ import annotations

import re
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


def _expression(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression ({error}); correct it") from None
    return value


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
    """Type of what units give, the whole model with its loss left out; None: as it comes."""
    cast_forward_inputs: bool = True
    """Cast what units get to ``param_dtype``."""
    reshard_after_forward: bool = True
    """Free gathered weights after a unit's forward pass and gather them again for its backward pass."""
    num_to_forward_prefetch: int = Field(default=0, ge=0)
    """Units that are gathered ahead; 0: torch's own choice."""
    num_to_backward_prefetch: int = Field(default=0, ge=0)
    """The same for the backward pass."""
    pregather: bool = False
    """Gather all units before the first forward pass of a step."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer state in host memory."""


class EpPlan(Section):
    """Which modules hold experts, and how tokens reach them."""

    apply_modules: Patterns = []
    """Modules that hold a layer's experts, which ``expert_parallel_size`` shares out."""
    apply_efsdp_modules: Patterns = []
    """Expert modules that are sharded over the ranks that hold the same experts; none given: ``apply_modules``."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How: each token sent to its experts, or all tokens to all ranks."""
    use_npu_fused_ops: bool = True
    """There are none: on NPUs it must be false."""


class Fsdp2Parallel(Section):
    data_parallel_size: int | None = Field(default=None, ge=1)
    """None: what the number of processes leaves; else it must be that."""
    fully_shard_parallel_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Ranks that share one copy of the weights, context-parallel ranks included; fewer than all: copies (HSDP)."""
    ulysses_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of a sample."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share out the experts of a layer."""
    expert_fully_shard_parallel_size: int | None = Field(default=None, ge=1)
    """Ranks that share one copy of the same experts; None: all that hold them."""
    fsdp_plan: FsdpPlan = FsdpPlan()
    ep_plan: EpPlan = EpPlan()
    distributed_timeout_minutes: int = Field(default=10, ge=1)
    """After which a rank that waits for others gives up."""
    distributed_backend: Literal["gloo", "nccl", "hccl"] | None = None
    """None: what the platform offers."""


class Fsdp2Model(Section):
    model_id: str | None = None
    """Of a class that ``model_register`` knows; None: the class that config.json names, as transformers has it."""
    model_name_or_path: LocalPath
    """Hugging Face directory: config.json, and the weights where ``training.load`` names none."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """As transformers names them."""
    trust_remote_code: bool = False
    """Run Python code that lies in ``model_name_or_path``."""
    freeze: Patterns = []
    """Modules whose parameters are not trained."""


class RecomputePlan(Section):
    apply_modules: Patterns = []
    """Modules that keep their inputs alone for the backward pass, and run again in it."""
    use_reentrant: bool = False
    """torch's older way to do it."""


class LossConfig(Section):
    loss_type: Literal["raw", "default", "per_sample_loss", "per_token_loss"] = "default"
    """raw: the model's own loss. The others: see ``tangram.losses.modes``."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the loss that keeps experts evenly used; 0: none."""


class ChunkLossPlan(Section):
    apply_module: str = "lm_head"
    """The head: one linear layer, whose logits are made a few positions at a time."""
    chunk_size: int = Field(default=1024, ge=1)
    """Positions of each row that reach the head at a time."""
    total_chunk_size: int = Field(default=4096, ge=1)
    """The same over all rows, with ``enable_dynamic_chunk_loss``."""


class ActivationOffloadPlan(Section):
    apply_modules: Patterns = []
    """Modules whose kept inputs wait in host memory for the backward pass."""


class ChunkMbsPlan(Section):
    apply_modules: Patterns = []
    """Modules that run on a few rows of a micro-batch at a time."""
    chunk_mbs: int = Field(default=1, ge=1)
    """Rows."""
    batch_dim: int = 0
    """Where rows lie in the arguments that are cut."""
    chunk_arg_indexs: Annotated[list[int], BeforeValidator(_listed)] = [0]
    """Positional arguments that are cut."""
    chunk_kwarg_names: Names = []
    """Named arguments that are cut."""


class Fsdp2Features(Section):
    recompute: bool = False
    """Use ``recompute_plan``."""
    recompute_plan: RecomputePlan = RecomputePlan()
    loss_cfg: LossConfig = LossConfig()
    enable_chunk_loss: bool = False
    """Use ``chunkloss_plan`` with its ``chunk_size``."""
    enable_dynamic_chunk_loss: bool = False
    """Use it with its ``total_chunk_size``."""
    chunkloss_plan: ChunkLossPlan = ChunkLossPlan()
    enable_activation_offload: bool = False
    """Use ``activation_offload_plan``."""
    activation_offload_plan: ActivationOffloadPlan = ActivationOffloadPlan()
    enable_chunk_mbs: bool = False
    """Use ``chunkmbs_plan``."""
    chunkmbs_plan: ChunkMbsPlan = ChunkMbsPlan()


class Fsdp2Dataloader(DataloaderParam):
    """As of data.json, and what the other backend takes from its launch flags."""

    num_workers: int = Field(default=2, ge=0)
    """Processes on each rank that read micro-batches; 0: the rank's own."""


class Fsdp2Data(DataConfig):
    dataloader_param: Fsdp2Dataloader = Fsdp2Dataloader()


class LrScale(Section):
    match: Annotated[str, AfterValidator(_expression)]
    """Regular expression for the beginning of a parameter's name (Python's ``re.match``); the first that matches counts."""
    scale: float = Field(default=1.0, gt=0)
    """Factor of the learning rate."""


class Fsdp2Training(Section):
    micro_batch_size: int = Field(default=1, ge=1)
    """Samples of a forward pass on each data-parallel rank."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches of a step; the global batch is micro_batch_size x data-parallel size x this."""
    train_iters: int | None = Field(default=None, ge=1)
    """Steps; this or ``train_epochs`` is needed."""
    train_epochs: int | None = Field(default=None, ge=1)
    """Passes over the data in place of ``train_iters``."""
    seq_length: int | None = Field(default=None, ge=1)
    """Longest sample, tokens; None: ``cutoff_len`` of the data, or 1024."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Of the order of the data, random weights and dropout."""
    lr: float = Field(default=5e-5, gt=0)
    """Largest learning rate."""
    lr_min: float = Field(default=0.0, ge=0)
    """Rate at the end of the decay."""
    lr_start: float = Field(default=0.0, ge=0)
    """Rate of the first step of a warm-up."""
    lr_warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Part of all steps in which the rate rises from ``lr_start`` to ``lr``."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls from ``lr`` to ``lr_min``."""
    lr_decay_ratio: float = Field(default=1.0, gt=0, le=1)
    """Part of all steps after which it has fallen."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of all parameters, but for the next two keys."""
    no_decay_modules: Names = []
    """Parts of class names of modules whose own parameters have no weight decay, such as RMSNorm."""
    no_decay_params: Names = []
    """Parts of parameter names that have none."""
    lr_scaling_plan: list[LrScale] = []
    """Factors of the learning rate for some parameters, each ``{match, scale}``."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for matrices of hidden layers; AdamW for all else."""
    adam_fused: bool = True
    """One kernel for the whole update; false: torch's foreach one."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """AdamW's."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's."""
    matched_adamw_rms: float = Field(default=0.2, gt=0)
    """Size of Muon's updates, to suit AdamW's learning rate."""
    ns_steps: int = Field(default=5, ge=1)
    """Newton-Schulz iterations of Muon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""
    clip_grad_foreach: bool = True
    """Clip all gradients in one operation."""
    use_deter_comp: bool = False
    """Deterministic kernels alone."""
    init_model_with_meta_device: bool = False
    """True: weights are first made where they stay, each rank its own part. False: every rank builds the whole model in host memory first,
    which models need whose constructors compute something."""
    load: FolderOrNone = None
    """Weights to start from: a Hugging Face directory or a training checkpoint; None: those of ``model_name_or_path`` where it has any."""
    load_format: Literal["auto", "hf", "dcp"] = "auto"
    """What must lie there: a Hugging Face directory or a training checkpoint; auto: whatever is found."""
    no_load_optim: bool = False
    """Leave the optimizer state of a training checkpoint."""
    no_load_rng: bool = False
    """Leave its random state."""
    random_init: bool = False
    """Start from random weights although ``model_name_or_path`` has some."""
    save: FolderOrNone = None
    """Folder of checkpoints, metrics and the run file as it was; None: nothing is saved."""
    save_interval: int | None = Field(default=None, ge=1)
    """Steps after which a checkpoint is written; one is at the end too."""
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
    """Save no optimizer state."""
    no_save_rng: bool = False
    """Save no random state."""
    log_interval: int = Field(default=1, ge=1)
    """Steps after which a line is logged."""
    log_tps: bool = False
    """Write tokens per sample to the log line."""
    val_interval: int = Field(default=0, ge=0)
    """Steps after which validation data are read; 0: never."""
    val_iters: int | None = Field(default=None, ge=1)
    """Global batches of a validation; None: all of the validation data."""
    exit_interval: int | None = Field(default=None, ge=1)
    """Save and stop at the first step that is a multiple of this."""
    manual_gc_interval: int = Field(default=0, ge=0)
    """Steps after which all ranks collect garbage together; 0: Python does when it likes."""
    metrics_file: LocalPath | None = None
    """JSON-lines file with one record per step; None: metrics.jsonl in ``save``."""
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
