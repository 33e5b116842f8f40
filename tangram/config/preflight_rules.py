"""Checks of a run that need nothing but the run itself: split, sizes, batch, schedule, freezing.

Each rule takes a ``Subject``, returns what it found in a few words, and raises a TangramError with the numbers and the mend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from math import gcd

from tangram.config.attention import check_attention
from tangram.config.context import check_context
from tangram.config.experts import runs_grouped
from tangram.config.model import ExpertKeys, ModelConfig, TextDecoderConfig, VisionEncoderConfig
from tangram.config.offload import check_offload
from tangram.config.patterns import Pattern
from tangram.config.run import RunConfig
from tangram.errors import ConfigError
from tangram.families import get_family
from tangram.placement.topology import Topology
from tangram.platform import current
from tangram.platform.determinism import check_environment


@dataclass(frozen=True)
class Subject:
    """A run and the number of its processes, None where that is not known yet."""

    run: RunConfig
    world_size: int | None

    @cached_property
    def topology(self) -> Topology:
        return self.run.topology()

    @cached_property
    def model(self) -> ModelConfig:
        return self.run.assembled_model()

    @property
    def text(self) -> TextDecoderConfig:
        return self.model.text_decoder

    @property
    def vision(self) -> VisionEncoderConfig | None:
        return self.model.image_encoder.vision_encoder if self.model.image_encoder else None

    @property
    def tensor(self) -> int:
        return self.run.parallel.tensor_model_parallel_size

    @property
    def expert(self) -> int:
        return self.run.parallel.expert_model_parallel_size

    @property
    def ranks_of_a_batch(self) -> int:
        """Processes that work on the same micro-batch."""
        parallel = self.run.parallel
        return self.tensor * parallel.context_parallel_size * parallel.pipeline_model_parallel_size

    @cached_property
    def data_parallel(self) -> int | None:
        """Data-parallel size; None where the number of processes is not known or does not divide."""
        if self.world_size is None:
            return None
        return None if self.world_size % self.process_unit else self.world_size // self.ranks_of_a_batch

    @property
    def process_unit(self) -> int:
        """What the number of processes is a multiple of: experts are divided over context- and data-parallel ranks."""
        return self.ranks_of_a_batch * self.expert // gcd(self.run.parallel.context_parallel_size, self.expert)

    @cached_property
    def global_batch(self) -> int | None:
        training = self.run.training
        if training.global_batch_size is not None:
            return training.global_batch_size
        return None if self.data_parallel is None else training.micro_batch_size * self.data_parallel * training.gradient_accumulation_steps


Rule = Callable[[Subject], str]


def backend(subject: Subject) -> str:
    get_family(subject.model.model_id).check_backend(subject.run.backend)
    return subject.run.backend


def layers_per_stage(subject: Subject) -> str:
    topology = subject.topology
    parts = [f"{topology.vision_layers} vision layers"] if topology.vision_layers else []
    return ", ".join([*parts, f"{topology.text_layers} text layers"]) + f" on {topology.pipeline} x {topology.virtual} stages"


def tensor_parallel(subject: Subject) -> str:
    """Every size that is split must be a multiple of the tensor-parallel size, of the vision encoder's where it has one of its own.

    Raises:
        ConfigError: naming each size that is not.
    """
    text, encoder = subject.text, subject.model.image_encoder
    size, own = subject.tensor, subject.topology.tensor_of("vision")
    sizes = [
        ("text_decoder.num_query_groups (key/value heads)", text.num_query_groups),
        ("text_decoder.num_attention_heads", text.num_attention_heads),
        ("text_decoder.moe_intermediate_size", text.moe_intermediate_size)
        if isinstance(text, ExpertKeys)
        else ("text_decoder.ffn_hidden_size", text.ffn_hidden_size),
    ]
    of_vision = []
    if encoder is not None:
        of_vision = [
            ("vision_encoder.num_attention_heads", encoder.vision_encoder.num_attention_heads),
            ("vision_encoder.ffn_hidden_size", encoder.vision_encoder.ffn_hidden_size),
            ("vision_projector.ffn_hidden_size", encoder.vision_projector.ffn_hidden_size),
        ]
    alone = [str(n) for n in range(1, size) if size % n == 0 and all(value % n == 0 for _, value in of_vision)]
    if own != size:
        wrong = [f"{name} {value}" for name, value in of_vision if value % own]
        if wrong:
            raise ConfigError(f"vision_tensor_model_parallel_size {own} does not divide {', '.join(wrong)}; use {' or '.join(alone)}")
        of_vision = []
    wrong = [f"{name} {value}" for name, value in [*sizes, *of_vision] if value % size]
    if wrong:
        fits = [str(n) for n in range(1, size) if all(value % n == 0 for _, value in [*sizes, *of_vision])]
        others = ""
        if of_vision and all(value % size == 0 for _, value in sizes):
            others = f", or vision_tensor_model_parallel_size {' or '.join(alone)} for the vision encoder alone"
        raise ConfigError(f"tensor_model_parallel_size {size} does not divide {', '.join(wrong)}; use {' or '.join(fits)}{others}")
    divided = ", activations divided along the sequence" if subject.run.parallel.sequence_parallel else ""
    copies = f", {size // own} copies of the vision encoder by {own}" if own != size else ""
    return f"{len(sizes) + len(of_vision)} sizes divide by {size}{divided}{copies}"


def context_parallel(subject: Subject) -> str:
    return check_context(subject.text, subject.run.parallel)


def attention(subject: Subject) -> str:
    return check_attention(subject.model, subject.run)


def activation_offload(subject: Subject) -> str:
    return check_offload(subject.model, subject.topology)


def vocabulary(subject: Subject) -> str:
    rows, padded = subject.text.vocab_size, subject.run.padded_vocab
    model = subject.model
    keys = ("img_context_token_id", "video_token_id", "vision_start_token_id")
    tokens = {key: getattr(model, key) for key in keys if getattr(model, key) is not None}
    outside = [f"{name} {value}" for name, value in tokens.items() if value >= rows]
    if outside:
        raise ConfigError(f"text_decoder.vocab_size is {rows}, so the model has no embedding for {', '.join(outside)}; correct the ids or vocab_size")
    if len(set(tokens.values())) != len(tokens):
        listed = ", ".join(f"{name} {value}" for name, value in tokens.items())
        raise ConfigError(f"special token ids must differ, got {listed}; correct them in model.json")
    return f"{rows} rows" if rows == padded else f"{rows} rows padded to {padded}"


def world_size(subject: Subject) -> str:
    tensor, context, pipeline = subject.tensor, subject.run.parallel.context_parallel_size, subject.run.parallel.pipeline_model_parallel_size
    unit = subject.process_unit
    if subject.world_size is None:
        return f"a multiple of {unit} processes is needed" if unit > 1 else "any number of processes"
    experts = f", and their context- and data-parallel ranks by expert-parallel {subject.expert}" if subject.expert > 1 else ""
    if subject.data_parallel is None:
        shared = f" x context-parallel {context}" if context > 1 else ""
        raise ConfigError(
            f"{subject.world_size} processes cannot be split into tensor-parallel {tensor}{shared} x pipeline-parallel {pipeline} = "
            f"{subject.ranks_of_a_batch}{experts}; start a multiple of {unit} processes, or lower one of the sizes"
        )
    shared = f" x CP {context}" if context > 1 else ""
    divided = f", of which {subject.expert} share the experts" if subject.expert > 1 else ""
    return f"{subject.world_size} processes = TP {tensor}{shared} x PP {pipeline} x DP {subject.data_parallel}{divided}"


_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def experts(subject: Subject) -> str:
    """``check_experts`` has passed, or there would be no split.

    Raises:
        ConfigError: as ``runs_grouped``.
    """
    text = subject.text
    if not isinstance(text, ExpertKeys):
        return "none"
    training = subject.run.training
    grouped = runs_grouped(text, tensor=subject.tensor, itemsize=_BYTES[training.dtype], deterministic=training.deterministic)
    how = "in one product" if grouped else "one after the other"
    share = f", {text.num_moe_experts // subject.expert} on each of {subject.expert} ranks by {text.moe_token_dispatcher_type}"
    return f"{text.moe_router_topk} of {text.num_moe_experts} for a token, {how}{share if subject.expert > 1 else ''}"


def determinism(subject: Subject) -> str:
    """Raises ConfigError where the environment contradicts."""
    if not subject.run.training.deterministic:
        return "off"
    check_environment(current().name)
    return "on"


def batch(subject: Subject) -> str:
    micro, total, replicas = subject.run.training.micro_batch_size, subject.global_batch, subject.data_parallel
    if total is None:
        return f"micro_batch_size {micro}"
    unit = micro * (replicas or 1)
    if total % unit:
        shown = f"micro_batch_size {micro} x data-parallel size {replicas} = {unit}" if replicas else f"micro_batch_size {micro}"
        below = total - total % unit
        near = f"{below} or {below + unit}" if below else f"{unit}"
        raise ConfigError(f"global_batch_size {total} is not a multiple of {shown}; use {near}")
    data = subject.run.data
    budget, packing = data.dataloader_param.token_budget, data.dataset_param.basic_parameters.packing
    if budget is not None:
        return f"{total} samples, in micro-batches of up to {budget} tokens"
    what = f"{total} {'packed rows' if packing else 'samples'}"
    return what if replicas is None else f"{what} = {micro} x DP {replicas} x {total // unit} micro-batches"


def interleaving(subject: Subject) -> str:
    parallel = subject.run.parallel
    virtual, pipeline = parallel.virtual_pipeline_model_parallel_size, parallel.pipeline_model_parallel_size
    if virtual is None:
        return "off"
    if virtual == 1:
        raise ConfigError("virtual_pipeline_model_parallel_size 1 is no interleaving; use 2 or more, or leave it out")
    if pipeline == 1:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size {virtual} needs pipeline_model_parallel_size of at least 2, got 1; raise it, or leave out "
            "virtual stages"
        )
    # A token budget makes micro-batches of its own, and empty ones until their number fits.
    budget = subject.run.data.dataloader_param.token_budget
    if budget is None and subject.global_batch is not None and subject.data_parallel is not None:
        micro, total, replicas = subject.run.training.micro_batch_size, subject.global_batch, subject.data_parallel
        micro_batches = total // (micro * replicas)
        if micro_batches % pipeline:
            raise ConfigError(
                f"virtual stages need a number of micro-batches per step that is a multiple of pipeline_model_parallel_size {pipeline}, got "
                f"{micro_batches} (global_batch_size {total} / (micro_batch_size {micro} x data-parallel size {replicas})); change global_batch_size"
            )
    return f"{virtual} stages per rank"


def sequence(subject: Subject) -> str:
    length, longest = subject.run.training.seq_length, subject.text.max_position_embeddings
    if length > longest:
        raise ConfigError(f"seq_length {length} is longer than max_position_embeddings {longest} of the text decoder; lower seq_length")
    return f"up to {length} of {longest} tokens"


def schedule(subject: Subject) -> str:
    training = subject.run.training
    steps = training.lr_decay_iters or training.train_iters
    if training.lr_warmup_iters >= steps:
        raise ConfigError(
            f"lr_warmup_iters {training.lr_warmup_iters} must be smaller than the {steps} steps of the schedule (lr_decay_iters, or train_iters); "
            "lower it"
        )
    return f"{training.train_iters} steps, {rates(training.lr_decay_style, training.lr, training.min_lr)}"


def rates(style: str, largest: float, smallest: float) -> str:
    """The learning rate in words. A constant one does not fall, whatever the least rate is."""
    if style == "constant":
        return f"{style}, lr {largest:g}" + (f"; the least rate {smallest:g} has no effect" if smallest else "")
    return f"{style}, lr {largest:g} to {smallest:g}"


def freezing(subject: Subject) -> str:
    features = subject.run.features
    for name in ("freeze_vision_encoder", "freeze_vision_projector"):
        if getattr(features, name) is not None and subject.model.image_encoder is None:
            raise ConfigError(f"features.{name} has no effect: the model has no image_encoder; remove it")
    parts = {"text_decoder": subject.text.freeze}
    if subject.model.image_encoder is not None:
        parts["vision_encoder"] = subject.model.image_encoder.vision_encoder.freeze
        parts["vision_projector"] = subject.model.image_encoder.vision_projector.freeze
    if all(parts.values()):
        raise ConfigError(f"{', '.join(parts)}: all are frozen, so nothing would be trained; set freeze false in one of them")
    return "trained: " + ", ".join(name for name, frozen in parts.items() if not frozen)


def evaluation(subject: Subject) -> str:
    training, data = subject.run.training, subject.run.data.dataset_param.basic_parameters
    if training.eval_iters and data.val_dataset is None and data.val_rate is None:
        raise ConfigError(
            f"eval_iters {training.eval_iters} needs basic_parameters.val_dataset or val_rate of the data config; give one, or leave out "
            "eval_iters and eval_interval"
        )
    if data.val_dataset is not None and not training.eval_iters:
        raise ConfigError(f"val_dataset {data.val_dataset} would never be read; set eval_interval and eval_iters, or remove val_dataset")
    if data.val_rate is not None and not training.eval_iters:
        raise ConfigError(f"the samples that val_rate {data.val_rate} sets aside would never be read; set eval_interval and eval_iters, or remove it")
    return f"{training.eval_iters} steps every {training.eval_interval}" if training.eval_iters else "off"


def tools(subject: Subject) -> str:
    """Packages that writers need, and a place for their files."""
    chosen, training = subject.run.tools, subject.run.training
    writers = {"tensorboard": chosen.tensorboard.enable, "wandb": chosen.wandb.enable}
    for name, wanted in writers.items():
        if wanted and find_spec(name) is None:
            raise ConfigError(f"tools.{name}.enable needs the package {name}: pip install {name}; or set it to false")
    if chosen.tensorboard.enable and chosen.tensorboard.log_dir is None and training.save is None:
        raise ConfigError("tools.tensorboard.enable needs log_dir, or training.save, the folder of checkpoints; give one")
    if chosen.trace.step is not None and chosen.trace.step > training.train_iters:
        raise ConfigError(f"tools.trace.step {chosen.trace.step} lies after the last iteration, train_iters {training.train_iters}; choose another")
    for pattern in chosen.trace.only:
        Pattern(pattern)
    recorders = {"trace": chosen.trace.step is not None, "profiler": chosen.profile.enable}
    recorders |= {"memory": chosen.memory_profile.enable or chosen.memory_profile.mem_info}
    on = [name for name, enabled in (recorders | writers).items() if enabled]
    return ", ".join(on) or "nothing is switched on"


GATES: tuple[tuple[str, Rule], ...] = (("backend", backend), ("layers per stage", layers_per_stage))
"""Rules without which the others have nothing to check."""
RULES: tuple[tuple[str, Rule], ...] = (
    ("tensor parallel", tensor_parallel),
    ("context parallel", context_parallel),
    ("attention", attention),
    ("activation offload", activation_offload),
    ("vocabulary", vocabulary),
    ("processes", world_size),
    ("experts", experts),
    ("global batch", batch),
    ("interleaving", interleaving),
    ("sequence length", sequence),
    ("schedule", schedule),
    ("freezing", freezing),
    ("deterministic mode", determinism),
    ("evaluation", evaluation),
    ("tools", tools),
)


def notes(subject: Subject) -> list[str]:
    """What is allowed but worth knowing."""
    run, topology, found = subject.run, subject.topology, []
    if not subject.text.untie_embeddings_and_output_weights and topology.text_first_chunk.pp_rank != topology.text_last_chunk.pp_rank:
        found.append(
            f"tied embeddings over a pipeline: stages {topology.text_first_chunk.pp_rank} and {topology.text_last_chunk.pp_rank} each hold a copy, "
            "and their gradients are summed in every step"
        )
    if run.parallel.use_distributed_optimizer and subject.data_parallel == 1 == run.parallel.context_parallel_size:
        found.append("use_distributed_optimizer saves nothing with data-parallel size 1")
    if run.parallel.encoder_dp_balance and subject.data_parallel == 1 == run.parallel.context_parallel_size:
        found.append("encoder_dp_balance has nothing to deal out with data-parallel size 1")
    if run.parallel.context_parallel_size == 1 and run.parallel.context_parallel_algo != "ulysses_cp_algo":
        found.append(f"context_parallel_algo {run.parallel.context_parallel_algo} has no effect with context_parallel_size 1")
    for pp_rank in range(topology.pipeline):
        if not _trains(subject, pp_rank):
            found.append(f"pipeline stage {pp_rank} holds only frozen weights: its optimizer has nothing to do")
    return found


def _trains(subject: Subject, pp_rank: int) -> bool:
    encoder = subject.model.image_encoder
    chunks = [chunk for chunk in subject.topology.order if chunk.pp_rank == pp_rank]
    text = any(chunk.has_text for chunk in chunks) and not subject.text.freeze
    vision = encoder is not None and any(chunk.has_vision for chunk in chunks) and not encoder.vision_encoder.freeze
    projector = encoder is not None and any(chunk.vision_last for chunk in chunks) and not encoder.vision_projector.freeze
    return text or vision or projector


def split_lines(topology: Topology) -> list[str]:
    """The split as text, one line per stage in order of execution."""

    def span(layers: range, what: str, before: str | None, after: str | None) -> str | None:
        if not layers:
            return None
        middle = f"{what} layer {layers[0]}" if len(layers) == 1 else f"{what} layers {layers[0]}-{layers[-1]}"
        return " > ".join(part for part in (before, middle, after) if part)

    lines = []
    for chunk in topology.order:
        vision = span(chunk.vision, "vision", "patch embedding" if chunk.vision_first else None, "projector" if chunk.vision_last else None)
        text = span(chunk.text, "text", "embedding" if chunk.text_first else None, "norm, head, loss" if chunk.text_last else None)
        name = f"stage {chunk.pp_rank}" + (f", virtual {chunk.vp_rank}" if topology.virtual > 1 else "")
        lines.append(f"{name}: {' | '.join(part for part in (vision, text) if part)}")
    return lines
