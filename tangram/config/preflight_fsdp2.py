"""Checks of a run on the ``fsdp2`` backend. The pieces that both backends share are those of the other files of this room."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from tangram.checkpoints.kinds import kind_of_weights
from tangram.config.fsdp2 import Fsdp2Config
from tangram.config.fsdp2_plans import check_switches
from tangram.config.fsdp2_run import training_of
from tangram.config.fsdp2_sizes import expert_sizes, least_processes, sizes
from tangram.config.model import ModelConfig
from tangram.config.preflight_files import check_shards, check_training_checkpoint, reference, samples, save_folder, tokenizer
from tangram.config.preflight_rules import Rule, Subject, determinism, rates, tools, vocabulary
from tangram.config.sources import read_hf_config
from tangram.errors import CheckpointError, ConfigError
from tangram.families import get_family


class Fsdp2Subject(Subject):
    """A run of this backend."""

    @property
    def settings(self) -> Fsdp2Config:
        assert self.run.fsdp2 is not None
        return self.run.fsdp2

    @property
    def family_model(self) -> ModelConfig | None:
        """The model's description; None: it is of no family."""
        return self.run.model.config

    @cached_property
    def data_parallel(self) -> int | None:
        if self.world_size is None:
            return None
        try:
            replicate, shard, _ = sizes(self.settings.parallel, self.world_size)
        except ConfigError:
            return None
        return replicate * shard


def backend(subject: Subject) -> str:
    model = _of(subject).family_model
    if model is None:
        return "fsdp2; a model of no family, as transformers or a plug-in has it"
    get_family(model.model_id).check_backend("fsdp2")
    return f"fsdp2, family {model.model_id}"


def processes(subject: Subject) -> str:
    parallel = _of(subject).settings.parallel
    needed = least_processes(parallel)
    if subject.world_size is None:
        return f"a multiple of {needed} processes is needed" if needed > 1 else "any number of processes"
    replicate, shard, ulysses = sizes(parallel, subject.world_size)
    expert_sizes(parallel, subject.world_size)
    return f"{subject.world_size} processes = {replicate} copies x {shard * ulysses} shards, data-parallel size {replicate * shard}"


def heads(subject: Subject) -> str:
    """Ranks that share a sample's tokens share out the heads while they attend."""
    ulysses, model = _of(subject).settings.parallel.ulysses_parallel_size, _of(subject).family_model
    if ulysses == 1 or model is None:
        return "every rank attends to whole samples" if ulysses == 1 else f"shared by {ulysses} ranks"
    count = model.text_decoder.num_attention_heads
    if count % ulysses:
        fits = [str(n) for n in range(1, ulysses) if count % n == 0]
        raise ConfigError(f"parallel.ulysses_parallel_size {ulysses} does not divide the model's {count} attention heads; use {' or '.join(fits)}")
    return f"{count} heads on {ulysses} ranks"


def experts(subject: Subject) -> str:
    """Experts are shared out whole."""
    ranks, model = _of(subject).settings.parallel.expert_parallel_size, _of(subject).family_model
    coefficient = _of(subject).settings.features.loss_cfg.router_aux_loss_coef
    if model is None:
        return "not checked: the model is of no family"
    count = getattr(model.text_decoder, "num_moe_experts", None)
    if count is None:
        wanted = {f"parallel.expert_parallel_size {ranks}": ranks > 1, f"features.loss_cfg.router_aux_loss_coef {coefficient:g}": coefficient > 0}
        for key, given in wanted.items():
            if given:
                raise ConfigError(f"{key}: family {model.model_id} has no experts; remove it")
        return "the model has none"
    if count % ranks:
        fits = [str(n) for n in range(1, ranks) if count % n == 0]
        raise ConfigError(f"parallel.expert_parallel_size {ranks} does not divide the model's {count} experts; use {' or '.join(fits)}")
    return f"{count} experts, {count // ranks} on each rank" if ranks > 1 else f"{count} experts on every rank"


def batch(subject: Subject) -> str:
    training = subject.run.training
    micro, steps = training.micro_batch_size, training.gradient_accumulation_steps
    budget = subject.run.data.dataloader_param.token_budget
    if budget is not None:
        return f"micro-batches of up to {budget} tokens"
    shown = f"{micro} x DP {subject.data_parallel or '(not known yet)'} x {steps} micro-batches"
    return shown if subject.global_batch is None else f"{subject.global_batch} samples = {shown}"


def sequence(subject: Subject) -> str:
    length, longest = subject.run.training.seq_length, _longest(_of(subject))
    if longest is not None and length > longest:
        raise ConfigError(
            f"training.seq_length {length} (or cutoff_len) is longer than max_position_embeddings {longest} of the model's config.json; lower it"
        )
    return f"up to {length} tokens" if longest is None else f"up to {length} of {longest} tokens"


def _longest(subject: Fsdp2Subject) -> int | None:
    if subject.family_model is not None:
        return subject.family_model.text_decoder.max_position_embeddings
    hf = read_hf_config(subject.settings.model.model_name_or_path)
    text = hf.get("text_config") if isinstance(hf.get("text_config"), dict) else hf
    value = text.get("max_position_embeddings") if isinstance(text, dict) else None
    return value if isinstance(value, int) else None


def schedule(subject: Subject) -> str:
    own = _of(subject).settings.training
    iterations = own.train_iters
    if own.train_epochs is not None:
        from tangram.data.epochs import check_epochs, steps_of_epochs

        check_epochs(subject.run)
        if subject.data_parallel is None:
            return f"{own.train_epochs} epochs, {rates(own.lr_decay_style, own.lr, own.lr_min)}"
        iterations = steps_of_epochs(subject.run, own.train_epochs, subject.data_parallel)
    training = training_of(_of(subject).settings, iterations=iterations)
    if training.lr_warmup_iters and training.lr_warmup_iters >= (training.lr_decay_iters or training.train_iters):
        raise ConfigError(
            f"training.lr_warmup_ratio {own.lr_warmup_ratio:g} of {training.train_iters} steps is {training.lr_warmup_iters}, but the rate has "
            f"reached its end after lr_decay_ratio {own.lr_decay_ratio:g}, {training.lr_decay_iters} steps; lower the first or raise the second"
        )
    if own.lr_start and not training.lr_warmup_iters:
        raise ConfigError(
            f"training.lr_start {own.lr_start:g} does nothing without a warm-up: lr_warmup_ratio {own.lr_warmup_ratio:g} of {training.train_iters} "
            "steps is none; raise it, or remove lr_start"
        )
    passes = "" if own.train_epochs is None else f"{own.train_epochs} epochs = "
    return f"{passes}{training.train_iters} steps, {rates(own.lr_decay_style, own.lr, own.lr_min)}"


def loss(subject: Subject) -> str:
    features = _of(subject).settings.features
    kind = features.loss_cfg.loss_type
    chunked = [name for name in ("enable_chunk_loss", "enable_dynamic_chunk_loss") if getattr(features, name)]
    if len(chunked) == 2:
        raise ConfigError("features.enable_chunk_loss and enable_dynamic_chunk_loss are two ways to cut the same loss; switch one off")
    if chunked and kind == "raw":
        raise ConfigError(
            f"features.{chunked[0]} is on, but loss_cfg.loss_type raw is the model's own loss over whole logits; choose default, per_sample_loss or "
            "per_token_loss"
        )
    if features.loss_cfg.router_aux_loss_coef and kind == "raw":
        raise ConfigError(
            "features.loss_cfg.router_aux_loss_coef does nothing with loss_type raw, which is what the model itself computes; choose another, "
            "or set it to 0"
        )
    return f"{kind}, in chunks" if chunked else kind


def memory(subject: Subject) -> str:
    settings, model = _of(subject).settings, _of(subject).family_model
    check_switches(settings)
    features = settings.features
    if features.enable_chunk_mbs and model is not None and model.text_decoder.position_embedding_type == "mrope":
        raise ConfigError(
            f"features.enable_chunk_mbs cuts tensors along their batch dimension, and the positions of family {model.model_id} ([3, batch, length]) "
            "have theirs elsewhere; switch it off and lower micro_batch_size"
        )
    parts = {"recompute": features.recompute, "activation offload": features.enable_activation_offload, "chunk_mbs": features.enable_chunk_mbs}
    parts["weights in host memory"] = settings.parallel.fsdp_plan.cpu_offload
    return ", ".join(name for name, on in parts.items() if on) or "nothing is switched on"


def evaluation(subject: Subject) -> str:
    own, data = _of(subject).settings.training, subject.run.data.dataset_param.basic_parameters
    if subject.run.data.dataset_param.of_plugin:
        return f"every {own.val_interval} steps, if the plug-in gives validation data" if own.val_interval else "off"
    if own.val_interval and data.val_dataset is None and data.val_rate is None:
        raise ConfigError(
            f"training.val_interval {own.val_interval} needs basic_parameters.val_dataset or val_rate; give one, or set val_interval to 0"
        )
    for key, value in (("val_dataset", data.val_dataset), ("val_rate", data.val_rate)):
        if value is not None and not own.val_interval:
            raise ConfigError(f"the samples of basic_parameters.{key} {value} would never be read; set training.val_interval, or remove it")
    if not own.val_interval:
        return "off"
    return f"{'all validation data' if own.val_iters is None else f'{own.val_iters} global batches'} every {own.val_interval} steps"


def weights(subject: Subject) -> str:
    own, source = _of(subject).settings.training, subject.run.model
    if source.load is None:
        if not own.random_init:
            raise ConfigError(
                f"model.model_name_or_path {source.hf_dir} holds no *.safetensors, and training.load names no weights; give some, or set "
                "training.random_init to true to start from random ones"
            )
        return "random, from the seed"
    kind = kind_of_weights(source.load, "training.load")
    expected = {"hf": "Hugging Face directory", "dcp": "training checkpoint"}.get(own.load_format, kind)
    if kind != expected:
        raise CheckpointError(f"training.load {source.load}: a {kind}, but load_format {own.load_format} asks for a {expected}; set it to auto")
    if kind == "Hugging Face directory":
        check_shards(Path(source.load))
    elif kind == "training checkpoint":
        if _of(subject).family_model is not None:
            check_training_checkpoint(subject, Path(source.load))
    else:
        how = "merge it into its base first (mm-convert ... lora_merge)" if kind == "LoRA adapter" else "convert it first (mm-convert ... mm_to_hf)"
        raise CheckpointError(f"training.load {source.load}: a {kind}, which this backend does not read; {how}")
    return f"{kind} {source.load}"


def _if_described(rule: Rule) -> Rule:
    """Rules that need a family's description."""

    def applied(subject: Subject) -> str:
        return rule(subject) if _of(subject).family_model is not None else "not checked: the model is of no family"

    return applied


def _built_in(rule: Rule) -> Rule:
    """Rules about what the built-in data read."""

    def applied(subject: Subject) -> str:
        return "left to the plug-in" if subject.run.data.dataset_param.of_plugin else rule(subject)

    return applied


def dataset(subject: Subject) -> str:
    if subject.run.data.dataset_param.of_plugin:
        from tangram.data.own import check_own

        return check_own(subject.run)
    if _of(subject).family_model is None:
        raise ConfigError(
            f"{subject.run.model.hf_dir}: the model is of no registered family, so the built-in data know neither its template nor its pictures; "
            "give data of your own (data.dataset_param.dataset_type, docs/bring-a-hf-model.md), or register a family (docs/bring-a-model.md)"
        )
    return "built-in"


def _of(subject: Subject) -> Fsdp2Subject:
    assert isinstance(subject, Fsdp2Subject)
    return subject


GATES: tuple[tuple[str, Rule], ...] = (("backend", backend),)
RULES: tuple[tuple[str, Rule], ...] = (
    ("processes", processes),
    ("attention heads", heads),
    ("experts", experts),
    ("vocabulary", _if_described(vocabulary)),
    ("global batch", batch),
    ("sequence length", sequence),
    ("schedule", schedule),
    ("loss", loss),
    ("memory", memory),
    ("deterministic mode", determinism),
    ("evaluation", evaluation),
    ("weights", weights),
    ("Hugging Face config", _if_described(reference)),
    ("dataset", dataset),
    ("tokenizer", _built_in(tokenizer)),
    ("samples", _built_in(_if_described(samples))),
    ("save folder", save_folder),
    ("tools", tools),
)


def notes(subject: Subject) -> list[str]:
    """What is allowed but worth knowing."""
    settings, found = _of(subject).settings, []
    if not settings.parallel.fsdp_plan.apply_modules:
        found.append("parallel.fsdp_plan.apply_modules is empty: the whole model is one unit, gathered at once")
    if settings.training.save is None:
        found.append("training.save is not given: nothing of the run is kept")
    return found


def split_lines(subject: Subject) -> list[str]:
    """How the processes share the model, as text."""
    parallel = _of(subject).settings.parallel
    if subject.data_parallel is None or subject.world_size is None:
        return []
    replicate, shard, ulysses = sizes(parallel, subject.world_size)
    lines = [f"weights: {replicate} {'copy' if replicate == 1 else 'copies'}, each shared by {shard * ulysses} ranks"]
    if ulysses > 1:
        lines.append(f"samples: {ulysses} ranks share the tokens of each")
    if parallel.expert_parallel_size > 1:
        lines.append(f"experts: over {parallel.expert_parallel_size} ranks")
    return lines
