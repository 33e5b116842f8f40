"""One run from its configuration to its last checkpoint; what ``tangram train`` and entry scripts share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from tangram.backends.dtypes import DTYPES
from tangram.backends.engine import Batch, RunnableEngine
from tangram.checkpoints.dcp_manifest import RunFacts
from tangram.checkpoints.hf_saves import HFSaves
from tangram.checkpoints.manager import CheckpointManager
from tangram.config.fsdp2_run import training_of
from tangram.config.fsdp2_sizes import sizes
from tangram.config.hf_compare import description
from tangram.config.preflight import check_run
from tangram.config.run import RunConfig, TrainingConfig
from tangram.config.sources import read_hf_config
from tangram.config.yaml_config import dump
from tangram.data.build import bad_sample_report, build_loader, forget_caches, global_batch_size
from tangram.data.choice import has_validation
from tangram.data.content import outline
from tangram.data.epochs import steps_of_epochs
from tangram.data.loader import StepLoader
from tangram.data.own import own_datasets, own_loader
from tangram.data.preload import Preloaded
from tangram.errors import ConfigError
from tangram.families import Family, get_family
from tangram.families.unknown import unknown_family
from tangram.platform import current
from tangram.platform.determinism import make_deterministic
from tangram.training.context import Context, get_context, set_context
from tangram.training.fingerprint import dataset_fingerprint, tokenizer_hash
from tangram.training.logs import LOGGER, set_up_logging
from tangram.training.loop import Loop, Outputs, Progress, Steps, steps_of
from tangram.training.profiling import StepProfiler, check_tools
from tangram.training.rank_records import RanksFile, ranks_path
from tangram.training.records import MetricsFile, StepRecord
from tangram.training.run_facts import facts_of
from tangram.training.schedule import LearningRate
from tangram.training.seeds import seed_process
from tangram.training.shared import from_first_rank, same_everywhere
from tangram.training.speed import model_flops, peak_of
from tangram.training.tracing import StepTracer
from tangram.training.weights import put_weights
from tangram.training.writers import open_writers

if TYPE_CHECKING:
    from tangram.backends.megatron.engine import ChunkBuilder
    from tangram.backends.megatron.forward import ForwardStep

Data = Iterable[Batch | Sequence[Batch]]
"""This rank's micro-batches, one by one as Megatron's entries give them, or as lists of those of one step."""
DatasetsProvider = Callable[[Sequence[int]], tuple[Data, Data | Callable[[], Data] | None, Any]]
"""``provider([train, valid, test] samples) -> (train data, validation data, unused)``. Validation data is None, something that gives a fresh
pass when called, or something that is gone on with at each validation."""


@dataclass(frozen=True)
class Callbacks:
    """What an entry script replaces; None: the built-in."""

    build_chunk: ChunkBuilder | None = None
    """megatron backend only."""
    forward_step: ForwardStep | None = None
    """megatron backend only."""
    datasets: DatasetsProvider | None = None

    @property
    def given(self) -> list[str]:
        """Names of those that the script replaces."""
        return [entry.name for entry in fields(self) if getattr(self, entry.name) is not None]


def train(run: RunConfig, callbacks: Callbacks | None = None, args: argparse.Namespace | None = None) -> Progress:
    """Train in this process, one of ``WORLD_SIZE`` (torchrun) or the only one. To be called within a ``SharedFailure``.

    Raises:
        TangramError: whatever ``tangram check`` would find, and faults of weights or data found later.
    """
    callbacks = callbacks or Callbacks()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    set_up_logging(rank)
    check_run(run, world_size).raise_errors()
    check_tools(run.tools, current().name)
    run = _with_counted_epochs(run, world_size)
    if run.training.deterministic:
        make_deterministic(current().name)
    context = Context(run, args or argparse.Namespace(), current().device(int(os.environ.get("LOCAL_RANK", "0"))), DTYPES[run.training.dtype])
    set_context(context)
    try:
        engine = build_engine(run, callbacks)
        progress = _train(run, engine, context, callbacks)
        engine.close()
        return progress
    except Exception:
        # Leaving the process group can wait for ranks that never come.
        if world_size == 1 and dist.is_initialized():
            dist.destroy_process_group()
        raise
    finally:
        set_context(None)


def _with_counted_epochs(run: RunConfig, world_size: int) -> RunConfig:
    """The run with the number of its steps, where the run file gives epochs."""
    epochs = run.fsdp2.training.train_epochs if run.fsdp2 is not None else None
    if run.fsdp2 is None or epochs is None:
        return run
    replicate, shard, _ = sizes(run.fsdp2.parallel, world_size)
    iterations = steps_of_epochs(run, epochs, replicate * shard)
    LOGGER.info("%d epochs are %d steps", epochs, iterations)
    return run.model_copy(update={"training": training_of(run.fsdp2, iterations=iterations)})


def build_engine(run: RunConfig, callbacks: Callbacks | None = None) -> RunnableEngine:
    """This rank's part of the model, on the run's backend, with weights still to be put in. Joins the process group.

    Raises:
        ConfigError: as the engines.
    """
    callbacks = callbacks or Callbacks()
    if run.backend == "fsdp2":
        from tangram.backends.fsdp2.engine import Fsdp2Engine

        return Fsdp2Engine(run)
    from tangram.backends.megatron.engine import MegatronEngine

    return MegatronEngine(run, build_chunk=callbacks.build_chunk, forward_step=callbacks.forward_step)


def _train(run: RunConfig, engine: RunnableEngine, context: Context, callbacks: Callbacks) -> Progress:
    training, copies = run.training, engine.data_parallel_size
    batch = global_batch_size(run, copies)
    LOGGER.info("%s", engine.summary(batch))
    manager = _manager(engine, run, batch)
    seed_process(training.seed, engine.data_parallel_rank)
    progress = put_weights(engine, manager)
    context.consumed_samples, context.data_rank, context.data_size = progress.consumed_samples, engine.data_parallel_rank, copies
    context.needs_pixels, context.reports_data = engine.needs_pixels, engine.reports_data
    _clear_the_way(run, progress)
    datasets = callbacks.datasets or default_datasets
    train_data, valid_data = datasets([training.train_iters * batch, (training.eval_iters or 0) * batch, 0])[:2]
    count = batch // (training.micro_batch_size * copies)
    valid = None if valid_data is None else lambda: steps_of(valid_data() if callable(valid_data) else valid_data, count)
    facts = facts_of(run, manager.facts, batch, callbacks.given)
    return _loop(engine, manager, run, batch, steps_of(train_data, count), valid, progress, facts)


def _clear_the_way(run: RunConfig, progress: Progress) -> None:
    """Remove what earlier runs left that this one makes anew, before any rank looks for it."""
    if dist.get_rank() == 0:
        if not run.data.dataset_param.of_plugin:
            forget_caches(run, _family(run))
        if progress.consumed_samples == 0:
            bad_sample_report(run).start_anew()
    if dist.get_world_size() > 1:
        dist.barrier()


def _loop(
    engine: RunnableEngine,
    manager: CheckpointManager,
    run: RunConfig,
    batch: int,
    steps: Steps,
    valid: Callable[[], Steps] | None,
    progress: Progress,
    facts: dict[str, Any],
) -> Progress:
    training, rank = run.training, dist.get_rank()
    folder = Path(training.save) if training.save else None
    known = {"model": description(run.model.config)} if run.model.config is not None else {}
    export = _hf_saves(engine, manager, run) if folder is not None and (training.save_hf_interval or training.save_format == "hf") else None
    if folder is not None and rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(dump(run), encoding="utf-8")

    def save(at: Progress) -> None:
        assert folder is not None
        if training.save_format == "hf" and export is not None:
            export.save(folder, at.step)
        else:
            manager.save(folder, at.step, at.consumed_samples, {**_counts(at), **known})

    with StepProfiler(run.tools, rank, completed=progress.step) as profiler:
        reporter = _Reporter(run, progress.step, facts) if rank == dist.get_world_size() - 1 else None
        loop = Loop(
            engine=engine,
            training=training,
            global_batch_size=batch,
            steps=steps,
            save=save if folder is not None else None,
            valid_steps=valid,
            outputs=reporter.outputs if reporter else Outputs(),
            progress=progress,
            profiler=profiler,
            tracer=StepTracer(engine, run.tools.trace) if run.tools.trace.step is not None else None,
            after_first_step=(lambda step: _report_memory(rank, step)) if engine.data_parallel_rank == 0 else None,
            background=manager,
            export=(lambda at: export.save(folder, at.step)) if export is not None and folder is not None else None,
            flops=model_flops(run),
            peak_tflops=peak_of(run),
            compares_copies=_metrics_path(training) is not None and dist.get_world_size() > 1,
            skips_samples=run.data.dataset_param.basic_parameters.bad_samples == "skip",
        )
        try:
            return loop.run()
        except Exception:
            if dist.get_world_size() == 1:
                # Others' failures end with their connections; alone, what is being written is let finish before the group goes.
                manager.settle()
            raise
        finally:
            if reporter is not None:
                reporter.close()


def _hf_saves(engine: RunnableEngine, manager: CheckpointManager, run: RunConfig) -> HFSaves:
    """Raises ConfigError where no Hugging Face config is known, before anything is trained."""
    source = _hf_folder(run)
    if source is None:
        raise ConfigError("writing Hugging Face directories (save_hf_interval, save_format hf) needs the model's config.json; give model.hf_dir")
    if run.training.save_format == "hf":
        LOGGER.warning("save_format hf: weights alone are saved, without optimizer state or data position; this run cannot be resumed")
    return HFSaves(engine.chunks, engine.canonical_shapes, engine.stored_as, _family(run), manager.facts.hf_config, source)


def _hf_folder(run: RunConfig) -> Path | None:
    """The directory whose config.json describes the model."""
    source = run.model.hf_dir or run.model.load
    return Path(source) if source is not None and Path(source, "config.json").is_file() else None


def _counts(progress: Progress) -> dict[str, int]:
    """What a checkpoint keeps of the loop besides its position."""
    return {"skipped": progress.skipped, "skipped_samples": progress.skipped_samples}


def _metrics_path(training: TrainingConfig) -> Path | None:
    if training.metrics_file:
        return Path(training.metrics_file)
    return Path(training.save, "metrics.jsonl") if training.save else None


class _Reporter:
    """Log lines, metrics.jsonl, writers and, on a terminal, a progress bar."""

    def __init__(self, run: RunConfig, resumed_step: int, facts: dict[str, Any]) -> None:
        training = run.training
        path = _metrics_path(training)
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: ProgressBar | None = None
        if self._console.is_terminal:
            loss = TextColumn("loss {task.fields[loss]}")
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), loss)
            self._bar = ProgressBar(*columns, console=self._console)
            self._task = self._bar.add_task("training", total=training.train_iters, completed=resumed_step, loss="-")
            self._bar.start()
        metrics = MetricsFile(path, resumed_step) if path is not None else None
        ranks = RanksFile(ranks_path(path), facts, dump(run), resumed_step) if path is not None else None
        writers = open_writers(run, resumed_step)
        self.outputs = Outputs(lines=self._print, metrics=metrics, ranks=ranks, advance=self._advance if self._bar else None, writers=writers)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._console.print(line, markup=False)
        else:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _advance(self, record: StepRecord) -> None:
        assert self._bar is not None
        self._bar.update(self._task, completed=record.step, loss=f"{record.loss:.4f}")

    def close(self) -> None:
        for writer in self.outputs.writers:
            writer.close()
        if self._bar is not None:
            self._bar.stop()


def _report_memory(rank: int, step: int) -> None:
    """Megatron's line of memory; a CPU knows only what the process has held."""
    if current().name == "cpu":
        text = f"peak resident: {current().peak_memory() / 2**20:.2f}"
    else:
        device = getattr(torch, current().name)
        names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        figures = {name.replace("memory_", "").replace("_", " "): getattr(device, name)() for name in names}
        text = " | ".join(f"{name}: {value / 2**20:.2f}" for name, value in figures.items())
    sys.stdout.write(f"[Rank {rank}] (after {step} iterations) memory (MB) | {text}\n")
    sys.stdout.flush()


def default_datasets(samples: Sequence[int]) -> tuple[Steps, Callable[[], Steps] | None, None]:
    """The data that the run's data.json names; it never ends, so the sample counts are not needed."""
    context = get_context()
    if context.run.data.dataset_param.of_plugin:
        return _own_datasets(context)
    family = _family(context.run)

    def loader(split: str, consumed: int) -> Steps:
        # Ranks that read other samples would wait for tensors that never come, or train on them unseen.
        same_everywhere(f"files of the {split} data", outline(context.run.data.dataset_param, split))
        place = (context.data_rank, context.data_size, consumed, context.needs_pixels)
        steps = _alike(build_loader(context.run, family, *place, split, reports=context.reports_data, share=from_first_rank), split)
        return Preloaded(steps) if context.run.data.dataloader_param.enable_preload and split == "train" else steps

    return loader("train", context.consumed_samples), (lambda: loader("valid", 0)) if has_validation(context.run) else None, None


def _own_datasets(context: Context) -> tuple[Steps, Callable[[], Steps] | None, None]:
    run, place = context.run, (context.data_rank, context.data_size)
    _, valid = own_datasets(run)
    fresh = (lambda: _alike(own_loader(run, *place, split="valid"), "valid")) if valid is not None and run.training.eval_interval else None
    return _alike(own_loader(run, *place, context.consumed_samples), "train"), fresh, None


def _alike(steps: StepLoader, split: str) -> StepLoader:
    """``steps``, after a look at every rank's data: the order of samples follows from their number.

    Raises:
        DataError: on every rank, if ranks see different numbers of samples.
    """
    same_everywhere(f"samples of the {split} data", steps.source.known_length())
    return steps


def _family(run: RunConfig) -> Family:
    """The model's family, or one that knows no more than its name."""
    if run.model.config is None:
        assert run.model.hf_dir is not None
        return unknown_family(str(read_hf_config(run.model.hf_dir)["model_type"]))
    return get_family(run.model.config.model_id)


def _manager(engine: RunnableEngine, run: RunConfig, batch: int) -> CheckpointManager:
    source = _hf_folder(run)
    facts = RunFacts(
        family=_family(run).name,
        topology=engine.topology,
        data_parallel=engine.data_parallel_size,
        hf_config=read_hf_config(source) if source is not None else {},
        tokenizer_hash=tokenizer_hash(run),
        dataset_fingerprint=from_first_rank(lambda: dataset_fingerprint(run, batch)),
        seed=run.training.seed,
        schedule=LearningRate(run.training).facts(),
        axes=engine.axes,
    )
    training = run.training
    return CheckpointManager(
        facts,
        engine.chunks,
        engine.canonical_shapes,
        engine.optimizer_state(),
        engine.generators(),
        stored_as=engine.stored_as,
        no_save_optim=training.no_save_optim,
        no_save_rng=training.no_save_rng,
        no_load_optim=training.no_load_optim,
        no_load_rng=training.no_load_rng,
        save_async=training.save_async,
        save_total_limit=training.save_total_limit,
    )
