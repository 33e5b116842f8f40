"""What the processes of the split model are told to do, and the files they leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from tangram.align.sharded import Sharded, read_run_file
from tangram.config.data import BasicParameters, DataConfig, DatasetParam, PreprocessParameters
from tangram.config.model import LayerList, ModelConfig, TokenDispatcher
from tangram.config.parsing import Section, parse_section
from tangram.config.run import ModelSource, ParallelConfig, RunConfig, TrainingConfig
from tangram.errors import ConfigError
from tangram.families.base import get_family
from tangram.families.plugins import load_plugins
from tangram.placement.topology import Topology

Dtype = Literal["fp32", "bf16", "fp16"]
ALGORITHMS = {"ulysses": "ulysses_cp_algo", "ring": "megatron_cp_algo", "hybrid": "hybrid_cp_algo"}
"""As users of the command name them, and as a run does."""


class Split(Section):
    """How the model is divided over processes on the megatron backend."""

    tensor: int = Field(default=1, ge=1)
    vision_tensor: int | None = Field(default=None, ge=1)
    """Of the vision encoder. None: ``tensor``."""
    pipeline: int = Field(default=1, ge=1)
    virtual: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    """Tensor-parallel ranks divide activations along the sequence."""
    context: int = Field(default=1, ge=1)
    """Ranks that share the tokens of a micro-batch."""
    context_algo: Literal["ulysses", "ring", "hybrid"] = "ulysses"
    ulysses: int | None = Field(default=None, ge=1)
    """hybrid: ranks that share the heads."""
    data: int = Field(default=1, ge=1)
    """Copies of the model; each takes its share of the micro-batches."""
    expert: int = Field(default=1, ge=1)
    """Of the copies and of the ranks that share a micro-batch's tokens, those that divide a layer's experts."""
    dispatcher: TokenDispatcher | None = None
    """How tokens reach their experts. None: as the model's config says."""
    vit_pp_layers: LayerList | None = None
    """Vision layers per stage. None: all on the first."""
    llm_pp_layers: LayerList | None = None
    """Text layers per stage. None: evenly, the last stages getting what is left over."""
    distributed_optimizer: bool = False
    balance: bool = False
    """Copies deal out their pictures and videos among them."""

    @property
    def backend(self) -> Literal["megatron"]:
        return "megatron"

    @property
    def processes(self) -> int:
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def parallel(self) -> ParallelConfig:
        """The run's settings of the axes, but for layers per stage.

        Raises:
            ConfigError: context ranks that do not fit their algorithm.
        """
        return parse_section(
            ParallelConfig,
            {
                "tensor_model_parallel_size": self.tensor,
                "vision_tensor_model_parallel_size": self.vision_tensor,
                "sequence_parallel": self.sequence_parallel,
                "pipeline_model_parallel_size": self.pipeline,
                "virtual_pipeline_model_parallel_size": self.virtual if self.virtual > 1 else None,
                "context_parallel_size": self.context,
                "context_parallel_algo": ALGORITHMS[self.context_algo],
                "ulysses_degree_in_cp": self.ulysses,
                "expert_model_parallel_size": self.expert,
                "moe_token_dispatcher_type": self.dispatcher,
                "use_distributed_optimizer": self.distributed_optimizer,
                "encoder_dp_balance": self.balance,
            },
            "the split",
        )

    def parallel_of(self, model: ModelConfig) -> ParallelConfig:
        """The run's settings of the axes and the layers per stage.

        Raises:
            ConfigError: as ``parallel``, or fewer layers than stages.
        """
        layers = model.text_decoder.num_layers
        text = self.llm_pp_layers if self.llm_pp_layers is not None else even_layers(layers, self.virtual, self.pipeline)
        return self.parallel.model_copy(update={"vit_pp_layers": self.vit_pp_layers, "llm_pp_layers": text})

    def topology(self, model: ModelConfig) -> Topology:
        """The topology, checked against the model.

        Raises:
            ConfigError: as ``parallel_of`` and ``ParallelConfig.topology``, and where the copies cannot be divided by ``expert``.
        """
        topology = self.parallel_of(model).topology(model)
        if self.processes % topology.process_unit:
            shared = f" x --cp {self.context}" if self.context > 1 else ""
            raise ConfigError(f"--dp {self.data}{shared} ranks cannot be divided into expert-parallel groups of {self.expert}; change --dp or --ep")
        return topology

    def __str__(self) -> str:
        parts = [f"TP{self.tensor}{' SP' if self.sequence_parallel else ''}", f"PP{self.pipeline}"]
        parts += [f"vision TP{self.vision_tensor}"] if self.vision_tensor is not None else []
        parts += [f"VPP{self.virtual}"] if self.virtual > 1 else []
        parts += [f"CP{self.context} {self.context_algo}"] if self.context > 1 else []
        parts += [f"DP{self.data}"] if self.data > 1 else []
        parts += [f"EP{self.expert}"] if self.expert > 1 else []
        parts += ["balanced"] if self.balance else []
        parts += [self.dispatcher] if self.dispatcher is not None else []
        parts += [f"text {self.llm_pp_layers}"] if self.llm_pp_layers is not None else []
        parts += [f"vision {self.vit_pp_layers}"] if self.vit_pp_layers is not None else []
        return " ".join(parts)


def even_layers(layers: int, virtual: int, pipeline: int) -> list[list[int]]:
    """``layers`` over all stages, ``[virtual][pipeline]``; the last stages, which have no vision encoder, take the remainder.

    Raises:
        ConfigError: fewer layers than stages.
    """
    stages = virtual * pipeline
    if layers < stages:
        raise ConfigError(f"{layers} text layers cannot fill {stages} stages; use fewer, or give --llm-pp-layers and --vit-pp-layers")
    flat = [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
    return [flat[row * pipeline : (row + 1) * pipeline] for row in range(virtual)]


class Curve(Section):
    """Train on the batch for some steps instead of looking at one."""

    steps: int = Field(ge=1)
    lr: float = Field(gt=0)
    clip_grad: float = Field(default=1.0, ge=0)


class TraceTo(Section):
    """Where a trace goes, and which modules are in it."""

    folder: str
    only: list[str] = []
    """Patterns of names; none: all."""


class Task(Section):
    """One run of the split model on one batch."""

    name: str
    hf_dir: str
    plugins: list[str] = []
    """Python files or folders that register families and components."""
    model: SerializeAsAny[ModelConfig]
    split: Split | Sharded
    dtype: Dtype = "fp32"
    seed: int | None = None
    """None: start from the weights of ``hf_dir``; a number: from random weights."""
    checkpoint: str | None = None
    """A training checkpoint, or an ``mp_rank`` directory of this split, whose weights stand in for those of ``hf_dir``."""
    batch: str
    """File of the batch."""
    micro_batch_size: int = Field(ge=1)
    pack: bool = False
    """Run all rows once more, packed into one."""
    curve: Curve | None = None
    trace: TraceTo | None = None
    """Record what modules compute."""
    out: str
    """Folder for what the ranks find."""

    @field_validator("model", mode="before")
    @classmethod
    def _of_its_family(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value
        load_plugins(info.data.get("plugins", []))
        return get_family(str(value.get("model_id"))).config_class.model_validate(value)

    @property
    def folder(self) -> Path:
        return Path(self.out)

    def run_config(self) -> RunConfig:
        """The run that the engine is built from. Dropout is off, as in the reference.

        On the fsdp2 backend it is the run file in ``out``; there models have no dropout but what their config.json says.
        """
        if isinstance(self.split, Sharded):
            return read_run_file(self.folder, self.split)
        return self._megatron_run(self.split)

    def _megatron_run(self, split: Split) -> RunConfig:
        split.topology(self.model)
        curve = self.curve or Curve(steps=1, lr=1e-3)
        return RunConfig(
            model=ModelSource(config=_without_dropout(self.model), hf_dir=self.hf_dir, load=None if self.seed is not None else self.hf_dir),
            data=DataConfig(
                dataset_param=DatasetParam(
                    preprocess_parameters=PreprocessParameters(model_name_or_path=self.hf_dir),
                    basic_parameters=BasicParameters(dataset=self.batch),
                )
            ),
            parallel=split.parallel_of(self.model),
            training=TrainingConfig(
                micro_batch_size=self.micro_batch_size,
                dtype=self.dtype,
                seed=self.seed or 0,
                lr=curve.lr,
                lr_decay_style="constant",
                weight_decay=0.0,
                clip_grad=curve.clip_grad,
                train_iters=curve.steps,
                loss_type="per_token_loss",
            ),
        )


def _without_dropout(model: ModelConfig) -> ModelConfig:
    off = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    update: dict[str, object] = {"text_decoder": model.text_decoder.model_copy(update=off)}
    if model.image_encoder is not None:
        encoder = model.image_encoder.vision_encoder.model_copy(update=off)
        update["image_encoder"] = model.image_encoder.model_copy(update={"vision_encoder": encoder})
    return model.model_copy(update=update)


class TaskList(Section):
    """Tasks that one launch of processes works off, each on its first ``split.processes`` ranks."""

    tasks: list[Task]

    @property
    def processes(self) -> int:
        return max(task.split.processes for task in self.tasks)


def gradient_file(folder: Path, rank: int) -> Path:
    return folder / f"gradients_{rank:05d}.safetensors"


def logits_file(folder: Path, rank: int) -> Path:
    return folder / f"logits_{rank:05d}.safetensors"


RESULT_FILE = "result.json"
"""Losses (and of a curve, gradient norms), written by rank 0."""


def fault_file(folder: Path, rank: int) -> Path:
    return folder / f"fault_{rank:05d}.json"
