"""One run as data. All surfaces (Megatron-style flags with three JSON files, the six-section YAML) are read into ``RunConfig``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SerializeAsAny, model_validator

from tangram.config.data import DataConfig
from tangram.config.experts import check_experts
from tangram.config.fsdp2 import Fsdp2Config
from tangram.config.model import AttentionBackend, ExpertKeys, LayerList, ModelConfig, RecomputeKeys, TokenDispatcher
from tangram.config.parsing import LocalPath, Section
from tangram.config.tools import ToolsConfig
from tangram.config.vision_tensor import check_vision_tensor
from tangram.errors import ConfigError
from tangram.placement.table import padded_vocabulary
from tangram.placement.topology import LayerGrid, Topology, layer_grid


class ParallelConfig(Section):
    """Sizes of the parallel axes. The data-parallel size is the world size divided by the others."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    vision_tensor_model_parallel_size: int | None = Field(default=None, ge=1)
    """Of the vision encoder and the projector: a divisor of ``tensor_model_parallel_size``. The tensor-parallel ranks then hold several copies of
    them, which encode pictures of their own. None: ``tensor_model_parallel_size``."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=1)
    sequence_parallel: bool = False
    """Tensor-parallel ranks divide activations along the sequence wherever they would hold them all; lengths that do not divide are padded."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of a micro-batch."""
    context_parallel_algo: Literal["ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo"] = "ulysses_cp_algo"
    """How they attend: each to all tokens with a share of the heads, keys and values travelling round a ring of ranks, or the first inside the
    second."""
    ulysses_degree_in_cp: int | None = Field(default=None, ge=1)
    """hybrid_cp_algo: ranks that share the heads; the ring has context_parallel_size / this."""
    vit_pp_layers: LayerList | None = None
    """Vision layers per stage; the same as ``pipeline_num_layers`` of model.json, and it must agree where both are given."""
    llm_pp_layers: LayerList | None = None
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks over which the experts of a layer are divided; they are context- and data-parallel ranks for all else."""
    moe_token_dispatcher_type: TokenDispatcher | None = None
    """None: what model.json says."""
    moe_grouped_gemm: bool | None = None
    """Run the experts of a rank as one grouped product; None: what model.json says."""
    encoder_dp_balance: bool = False
    """Deal out the pictures and videos of all data-parallel ranks' micro-batches over them by patches, so that vision encoders have equal work."""
    use_distributed_optimizer: bool = False
    """ZeRO-1: optimizer state sharded over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    distributed_timeout_minutes: int = Field(default=10, ge=1)
    distributed_backend: Literal["gloo", "nccl", "hccl"] | None = None
    """None: what the platform offers."""
    make_vocab_size_divisible_by: int = Field(default=1, ge=1)
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""

    @model_validator(mode="after")
    def _context_fits(self) -> ParallelConfig:
        size, algorithm, degree = self.context_parallel_size, self.context_parallel_algo, self.ulysses_degree_in_cp
        if algorithm != "hybrid_cp_algo":
            if degree is not None:
                raise ValueError(f"ulysses_degree_in_cp {degree} is of hybrid_cp_algo, and context_parallel_algo is {algorithm}; remove one")
            return self
        if degree is None:
            raise ValueError("context_parallel_algo hybrid_cp_algo needs ulysses_degree_in_cp, the ranks that share heads; give it")
        if size % degree or degree in (1, size):
            raise ValueError(
                f"ulysses_degree_in_cp {degree} must divide context_parallel_size {size} and be neither 1 (megatron_cp_algo) nor all of it "
                "(ulysses_cp_algo); choose another, or another context_parallel_algo"
            )
        return self

    @property
    def context_parallel_ring(self) -> int:
        """Ranks of a ring of keys and values; 1: there is none."""
        if self.context_parallel_algo == "ulysses_cp_algo":
            return 1
        return self.context_parallel_size // (self.ulysses_degree_in_cp or 1)

    @model_validator(mode="after")
    def _sequence_needs_ranks(self) -> ParallelConfig:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel divides activations over tensor-parallel ranks, and tensor_model_parallel_size is 1; raise it, or leave "
                "sequence_parallel out"
            )
        return self

    @model_validator(mode="after")
    def _overlaps_fit(self) -> ParallelConfig:
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce; set both, or leave it out")
        return self

    def _vit_layers(self, model: ModelConfig) -> LayerList | None:
        """Vision layers per stage, from wherever they are given."""
        encoder = model.image_encoder
        return self.vit_pp_layers or (encoder.vision_encoder.pipeline_num_layers if encoder else None)

    def _llm_layers(self, model: ModelConfig) -> LayerList | None:
        """Text layers per stage, from wherever they are given."""
        return self.llm_pp_layers or model.text_decoder.pipeline_num_layers

    def topology(self, model: ModelConfig) -> Topology:
        """The split of a model that this and its ``pipeline_num_layers`` describe.

        Raises:
            ConfigError: as ``Topology.build``, ``check_vision_tensor`` and ``check_experts``; the lists given in two places differ; or they do
                not have the pipeline sizes given here.
        """
        vision, text = model.image_encoder.vision_encoder if model.image_encoder else None, model.text_decoder
        _agree("vit_pp_layers", self.vit_pp_layers, "vision_encoder.pipeline_num_layers", vision.pipeline_num_layers if vision else None)
        _agree("llm_pp_layers", self.llm_pp_layers, "text_decoder.pipeline_num_layers", text.pipeline_num_layers)
        pipeline, virtual = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size or 1
        vit_layers, llm_layers = self._vit_layers(model), self._llm_layers(model)
        if llm_layers is None and pipeline * virtual > 1:
            raise ConfigError(
                f"pipeline_model_parallel_size {pipeline} x {virtual} virtual stages needs the layers of each stage: give pipeline_num_layers in "
                "vision_encoder and text_decoder of model.json, or parallel.vit_pp_layers and parallel.llm_pp_layers"
            )
        for what, layers in (("vit_pp_layers", vit_layers), ("llm_pp_layers", llm_layers)):
            if layers is not None:
                _check_lengths(what, layer_grid(layers, what), layers, pipeline, virtual)
        tensor, expert = self.tensor_model_parallel_size, self.expert_model_parallel_size
        check_vision_tensor(model, self.vision_tensor_model_parallel_size, tensor)
        check_experts(model, expert=expert, tensor=tensor, sequence_parallel=self.sequence_parallel)
        return Topology.build(
            vision_layers=vision.num_layers if vision else 0,
            text_layers=text.num_layers,
            tensor=tensor,
            vit_pp_layers=vit_layers,
            llm_pp_layers=llm_layers,
            expert=expert,
            vision_tensor=self.vision_tensor_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
            context=self.context_parallel_size,
            ring=self.context_parallel_ring,
            vision_balance=self.encoder_dp_balance,
        )


class ModelSource(Section):
    """Where the model's description and its weights come from."""

    config: SerializeAsAny[ModelConfig] | None = None
    """None: a model of no family, which the fsdp2 backend takes from ``hf_dir`` as transformers has it."""
    hf_dir: LocalPath | None = None
    """Hugging Face directory whose config the model was read from or is compared with."""
    load: LocalPath | None = None
    """Weights to start from: a Hugging Face directory, an mp_rank directory or a training checkpoint. None: random, from the seed."""
    load_format: Literal["auto", "hf", "dcp"] = "auto"
    """What must lie at ``load``: a Hugging Face directory or a training checkpoint; auto: whatever is found."""
    cast_weights: bool = False
    """Allow the loaded weights' element type to be changed to the run's dtype."""
    plugin: list[LocalPath] = []
    """Python files or folders imported first; they register families and components."""

    @model_validator(mode="after")
    def _format_of_something(self) -> ModelSource:
        if self.load is None and self.load_format != "auto":
            raise ValueError(f"load_format {self.load_format}, but there is nothing to load; give load, or leave load_format out")
        return self


class FeaturesConfig(RecomputeKeys):
    """Freezing, recomputation, offload, attention and loss of the assembled model; None leaves what model.json says."""

    freeze_vision_encoder: bool | None = None
    freeze_vision_projector: bool | None = None
    freeze_text_decoder: bool | None = None
    attention_backend: AttentionBackend | None = None
    """The library of core attention in all components, as ``attention_backend`` in model.json."""
    enable_activation_offload: bool | None = None
    """What layers of all components save for the backward pass waits in host memory, as ``activation_offload`` in model.json."""
    enable_chunk_loss: bool | None = None
    """Compute the loss for ``chunk_size`` supervised tokens of a micro-batch at a time; as ``loss_chunk_size`` in model.json."""
    chunk_size: int | None = Field(default=None, ge=1)
    """None: 1024."""

    @model_validator(mode="after")
    def _chunks_are_switched_on(self) -> FeaturesConfig:
        if self.chunk_size is not None and not self.enable_chunk_loss:
            raise ValueError(f"chunk_size {self.chunk_size} has no effect while enable_chunk_loss is off; set enable_chunk_loss, or remove it")
        return self


class TrainingConfig(Section):
    micro_batch_size: int = Field(default=1, ge=1)
    global_batch_size: int | None = Field(default=None, ge=1)
    """None: micro_batch_size times the data-parallel size, times ``gradient_accumulation_steps``."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches of a step on each data-parallel rank, where ``global_batch_size`` is not given."""
    seq_length: int = Field(default=1024, ge=1)
    """Longest sample, tokens; the data's cutoff."""
    train_iters: int = Field(default=1, ge=1)
    seed: int = Field(default=42, ge=0, lt=2**32)
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of parameters and activations; the optimizer keeps fp32 masters."""
    optimizer: Literal["adam"] = "adam"
    lr: float = Field(gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    lr_decay_iters: int | None = Field(default=None, ge=1)
    """None: train_iters."""
    lr_warmup_iters: int = Field(default=0, ge=0)
    lr_warmup_init: float = Field(default=0.0, ge=0)
    """Rate that a warm-up starts from."""
    lr_warmup_fraction: float | None = Field(default=None, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""
    loss_type: Literal["raw", "default", "per_sample_loss", "per_token_loss"] = "default"
    """raw: the model's own, which a Hugging Face model brings; the others: see ``tangram.losses.modes``."""
    log_interval: int = Field(default=1, ge=1)
    log_tps: bool = False
    """Write tokens per sample to the log line."""
    eval_interval: int | None = Field(default=None, ge=1)
    eval_iters: int | None = Field(default=0, ge=0)
    """Global batches of an evaluation; None: all of the validation data."""
    exit_interval: int | None = Field(default=None, ge=1)
    """Save and stop at the first step that is a multiple of this."""
    save: LocalPath | None = None
    """Folder of checkpoints; None: nothing is saved."""
    save_interval: int | None = Field(default=None, ge=1)
    save_format: Literal["dcp", "hf"] = "dcp"
    """hf: Hugging Face directories in ``hf`` of ``save`` in place of training checkpoints; no run can be resumed from them."""
    save_async: bool = False
    """Write checkpoints while training goes on, from a copy in host memory: once more the bytes of a rank's weights and optimizer state."""
    save_total_limit: int | None = Field(default=None, ge=1)
    """Checkpoints of this run that are kept, the newest; None: all."""
    save_hf_interval: int | None = Field(default=None, ge=1)
    """Steps after which, and at the end, the weights are also written as a Hugging Face directory, in ``hf`` of ``save``."""
    no_save_optim: bool = False
    no_save_rng: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False
    manual_gc_interval: int = Field(default=0, ge=0)
    """Steps after which all ranks collect garbage together; 0: Python does when it likes."""
    num_workers: int = Field(default=0, ge=0)
    metrics_file: LocalPath | None = None
    """JSON-lines file that gets one record per step. None: metrics.jsonl in ``save``."""
    deterministic: bool = False
    """Choose algorithms that give the same bits each time; see ``tangram.platform.determinism``."""

    @model_validator(mode="after")
    def _choices_fit(self) -> TrainingConfig:
        if self.lr_warmup_fraction is not None and self.lr_warmup_iters:
            raise ValueError(f"lr_warmup_fraction {self.lr_warmup_fraction} and lr_warmup_iters {self.lr_warmup_iters}: give one of them")
        if self.global_batch_size is not None and self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} and gradient_accumulation_steps {self.gradient_accumulation_steps}: give one of them"
            )
        if self.lr_warmup_init > self.lr:
            raise ValueError(f"lr_warmup_init {self.lr_warmup_init} is larger than lr {self.lr}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is larger than lr {self.lr}")
        if (self.eval_interval is None) != (self.eval_iters == 0):
            raise ValueError(
                f"eval_interval {self.eval_interval} and eval_iters {self.eval_iters} belong together: give both to evaluate, neither to leave it out"
            )
        for key in ("save_interval", "save_total_limit", "save_hf_interval"):
            if getattr(self, key) is not None and self.save is None:
                raise ValueError(f"{key} {getattr(self, key)} needs save, the folder to write to")
        if self.save_async and self.save is None:
            raise ValueError("save_async needs save, the folder to write to")
        if self.save_format == "hf":
            self._only_directories()
        return self

    def _only_directories(self) -> None:
        for key, why in (
            ("save_async", "Hugging Face directories are written while training waits"),
            ("save_total_limit", "it counts training checkpoints, and none is written"),
            ("save_hf_interval", "save_interval says when they are written"),
        ):
            if getattr(self, key):
                raise ValueError(f"save_format hf and {key} {getattr(self, key)}: {why}; remove {key}, or write save_format dcp")


class RunConfig(Section):
    backend: Literal["megatron", "fsdp2"] = "megatron"
    parallel: ParallelConfig = ParallelConfig()
    model: ModelSource
    data: DataConfig
    features: FeaturesConfig = FeaturesConfig()
    training: TrainingConfig
    tools: ToolsConfig = ToolsConfig()
    fsdp2: Fsdp2Config | None = None
    """The run file of the fsdp2 backend, which all else here was made from."""

    @model_validator(mode="after")
    def _datasets_of_plugins(self) -> RunConfig:
        kind = self.data.dataset_param.dataset_type
        if self.data.dataset_param.of_plugin and self.backend != "fsdp2":
            raise ValueError(
                f"data.dataset_param.dataset_type {kind!r}: datasets of plug-ins are of the fsdp2 backend; write huggingface, or give an entry "
                "script of your own (docs/bring-a-model.md)"
            )
        return self

    @property
    def described(self) -> ModelConfig:
        """The model's description.

        Raises:
            ConfigError: the model is of no family.
        """
        if self.model.config is None:
            raise ConfigError(f"{self.model.hf_dir}: the model is of no registered family; register one, or give data that a plug-in makes")
        return self.model.config

    @property
    def padded_vocab(self) -> int:
        """Rows of the word embedding over all tensor-parallel ranks."""
        return padded_vocabulary(
            self.described.text_decoder.vocab_size, self.parallel.tensor_model_parallel_size, self.parallel.make_vocab_size_divisible_by
        )

    def topology(self) -> Topology:
        """The split that ``parallel`` and the model's ``pipeline_num_layers`` describe.

        Raises:
            ConfigError: as ``ParallelConfig.topology``.
        """
        return self.parallel.topology(self.described)

    def _experts(self, model: ModelConfig) -> dict[str, object]:
        """What ``parallel`` sets of the text decoder's experts."""
        given = {key: getattr(self.parallel, key) for key in ("moe_token_dispatcher_type", "moe_grouped_gemm")}
        given = {key: value for key, value in given.items() if value is not None}
        if given and not isinstance(model.text_decoder, ExpertKeys):
            listed = ", ".join(f"parallel.{key} {value}" for key, value in given.items())
            raise ConfigError(f"{listed}: the model {model.model_id} has no experts; leave it out")
        return given

    def assembled_model(self) -> ModelConfig:
        """The model config with what ``features`` sets put into its components, and ``parallel`` into its experts.

        Raises:
            ConfigError: ``features`` freezes a component that the model has not, or ``parallel`` sets how experts run that it has
                not.
        """
        features, model = self.features, self.described
        layers = {key: getattr(features, key) for key in RecomputeKeys.model_fields} if features.recompute_granularity else {}
        if features.attention_backend is not None:
            layers["attention_backend"] = features.attention_backend
        if features.enable_activation_offload is not None:
            layers["activation_offload"] = features.enable_activation_offload

        def component(section: Section, freeze: bool | None, extra: dict[str, object]) -> Section:
            return section.model_copy(update=extra if freeze is None else {**extra, "freeze": freeze})

        loss: dict[str, object] = {}
        if features.enable_chunk_loss is not None:
            loss["loss_chunk_size"] = (features.chunk_size or 1024) if features.enable_chunk_loss else None
        extra = {**layers, **loss, **self._experts(model)}
        update: dict[str, object] = {"text_decoder": component(model.text_decoder, features.freeze_text_decoder, extra)}
        if model.image_encoder is not None:
            parts = {
                "vision_encoder": component(model.image_encoder.vision_encoder, features.freeze_vision_encoder, layers),
                "vision_projector": component(model.image_encoder.vision_projector, features.freeze_vision_projector, {}),
            }
            update["image_encoder"] = model.image_encoder.model_copy(update=parts)
        elif features.freeze_vision_encoder or features.freeze_vision_projector:
            raise ConfigError("features freezes the vision encoder or projector, but the model has no image_encoder; remove the setting")
        return model.model_copy(update=update)


def _agree(first: str, mine: LayerList | None, second: str, theirs: LayerList | None) -> None:
    if mine is not None and theirs is not None and layer_grid(mine, first) != layer_grid(theirs, second):
        raise ConfigError(f"parallel.{first} {mine} and {second} {theirs} of the model differ; correct one, or give only one of them")


def _check_lengths(what: str, grid: LayerGrid, layers: LayerList, pipeline: int, virtual: int) -> None:
    if len(grid[0]) != pipeline:
        raise ConfigError(
            f"{what} {layers} has {len(grid[0])} numbers per row, but pipeline_model_parallel_size is {pipeline}; give one number per pipeline stage"
        )
    if len(grid) != virtual:
        raise ConfigError(
            f"{what} {layers} has {len(grid)} rows, but virtual_pipeline_model_parallel_size is {virtual}; give one row per virtual stage"
        )
