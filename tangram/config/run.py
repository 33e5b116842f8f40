"""One run as data. All surfaces (Megatron-style flags with three JSON files, the six-section YAML) are read into ``RunConfig``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tangram.config.data import DataConfig
from tangram.config.model import LayerList, ModelConfig
from tangram.config.parsing import Section
from tangram.config.tools import ToolsConfig
from tangram.placement.topology import Topology


class ParallelConfig(Section):
    """Sizes of the parallel axes. The data-parallel size is the world size divided by the others."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=1)
    vit_pp_layers: LayerList | None = None
    """Vision layers per stage; the same as ``pipeline_num_layers`` of model.json, and it must agree where both are given."""
    llm_pp_layers: LayerList | None = None
    use_distributed_optimizer: bool = False
    """ZeRO-1: optimizer state sharded over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    distributed_timeout_minutes: int = Field(default=10, ge=1)
    distributed_backend: Literal["gloo", "nccl", "hccl"] | None = None
    """None: what the platform offers."""
    make_vocab_size_divisible_by: int = Field(default=1, ge=1)


class ModelSource(Section):
    """Where the model's description and its weights come from."""

    config: ModelConfig
    hf_dir: str | None = None
    """Hugging Face directory whose config the model was read from or is compared with."""
    load: str | None = None
    """Weights to start from: a Hugging Face directory, an mp_rank directory or a training checkpoint. None: random, from the seed."""
    plugin: list[str] = []
    """Python files or folders imported first; they register families and components."""


class FeaturesConfig(Section):
    """Freezing and recomputation; None leaves what model.json says."""

    freeze_vision_encoder: bool | None = None
    freeze_vision_projector: bool | None = None
    freeze_text_decoder: bool | None = None
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = Field(default=None, ge=1)


class TrainingConfig(Section):
    micro_batch_size: int = Field(default=1, ge=1)
    global_batch_size: int | None = Field(default=None, ge=1)
    """None: micro_batch_size times the data-parallel size."""
    seq_length: int = Field(default=1024, ge=1)
    """Longest sample, tokens; the data's cutoff."""
    train_iters: int = Field(default=1, ge=1)
    seed: int = Field(default=42, ge=0)
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of parameters and activations; the optimizer keeps fp32 masters."""
    optimizer: Literal["adam"] = "adam"
    lr: float = Field(gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    lr_decay_iters: int | None = Field(default=None, ge=1)
    """None: train_iters."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    lr_warmup_fraction: float | None = Field(default=None, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""
    loss_type: Literal["default", "per_sample_loss", "per_token_loss"] = "default"
    log_interval: int = Field(default=1, ge=1)
    log_tps: bool = False
    eval_interval: int | None = Field(default=None, ge=1)
    eval_iters: int = Field(default=0, ge=0)
    save: str | None = None
    """Folder of checkpoints; None: nothing is saved."""
    save_interval: int | None = Field(default=None, ge=1)
    no_save_optim: bool = False
    no_save_rng: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False
    num_workers: int = Field(default=0, ge=0)
    metrics_file: str | None = None
    """JSON-lines file that gets one record per step. None: metrics.jsonl in ``save``."""
    deterministic: bool = False

    @model_validator(mode="after")
    def _choices_fit(self) -> TrainingConfig:
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise ValueError(f"lr_warmup_fraction {self.lr_warmup_fraction} and lr_warmup_iters {self.lr_warmup_iters}: give one of them")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is larger than lr {self.lr}")
        if self.save_interval is not None and self.save is None:
            raise ValueError(f"save_interval {self.save_interval} needs save, the folder to write to")
        return self


class RunConfig(Section):
    backend: Literal["megatron"] = "megatron"
    parallel: ParallelConfig = ParallelConfig()
    model: ModelSource
    data: DataConfig
    features: FeaturesConfig = FeaturesConfig()
    training: TrainingConfig
    tools: ToolsConfig = ToolsConfig()

    def topology(self) -> Topology:
        """The split that ``parallel`` and the model's ``pipeline_num_layers`` describe.

        Raises:
            ConfigError: as ``Topology.build``.
        """
        encoder = self.model.config.image_encoder
        vision = encoder.vision_encoder if encoder else None
        text = self.model.config.text_decoder
        vit = self.parallel.vit_pp_layers or (vision.pipeline_num_layers if vision else None)
        llm = self.parallel.llm_pp_layers or text.pipeline_num_layers
        return Topology.build(
            vision_layers=vision.num_layers if vision else 0,
            text_layers=text.num_layers,
            tensor=self.parallel.tensor_model_parallel_size,
            vit_pp_layers=vit,
            llm_pp_layers=llm,
        )
