"""One process of the split model: ``main([TASKS.json])`` on each rank, which ``tangram.align.launch`` starts."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tangram.align.assemble import write_pieces
from tangram.align.batch import micro_batches, read_batch
from tangram.align.pack import pack_rows
from tangram.align.task import RESULT_FILE, Task, TaskList, TraceTo, fault_file, gradient_file, logits_file
from tangram.align.trace.run_trace import RunTrace
from tangram.backends.engine import Batch, CanonicalTensor, RunnableEngine
from tangram.checkpoints.dcp_reader import DCPReader
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.kinds import kind_of_weights
from tangram.checkpoints.load_hf import fill_all, load_hf
from tangram.config.run import RunConfig
from tangram.errors import TangramError
from tangram.families.plugins import load_plugins
from tangram.placement.blocks import check_names
from tangram.platform import current

MOST_SKIPPED_STEPS = 40


class Runner(Protocol):
    """A backend as a comparison runs it."""

    @property
    def engine(self) -> RunnableEngine: ...

    def load_split(self, directory: str) -> None:
        """Take the weights of an ``mp_rank`` directory.

        Raises:
            TangramError: the backend reads none, or it is of another model or split.
        """

    def share(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """This data-parallel rank's micro-batches, filled up with unsupervised ones where the schedule needs more."""

    def logits(self, mine: Sequence[Batch], shape: tuple[int, int]) -> Iterator[CanonicalTensor]:
        """Logits as rectangles of ``[*shape, V]``, without padding of the vocabulary; zeros past a micro-batch's length."""

    def trace(self, to: TraceTo, rank: int) -> RunTrace:
        """A recorder of the next ``forward_backward``."""

    def frozen(self) -> list[str]:
        """Canonical names of parameters that are not trained, on any rank. Every rank must call it."""

    def close(self) -> None:
        """Leave the process group."""


def main(arguments: Sequence[str]) -> int:
    """Work off the tasks of a file; the exit status is 1 after a fault, which a file in the task's folder describes."""
    tasks = TaskList.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8")).tasks
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank = int(os.environ["RANK"])
    for task in tasks:
        if rank >= task.split.processes:
            continue
        try:
            run_task(task, rank)
            # The engine refers to itself, and holds groups with several threads each; after a dozen tasks these would be hundreds.
            gc.collect()
        except Exception as error:
            traceback.print_exc()
            fault = {"mendable": isinstance(error, TangramError), "kind": type(error).__name__, "message": " ".join(str(error).split())}
            fault_file(task.folder, rank).write_text(json.dumps(fault), encoding="utf-8")
            sys.stderr.flush()
            # An orderly exit would wait for collectives that the other ranks never join.
            os._exit(1)
    return 0


def run_task(task: Task, rank: int) -> None:
    """Build the model at the task's split, run the batch, write what this rank found, and leave the process group."""
    load_plugins(task.plugins)
    run = task.run_config()
    os.environ["WORLD_SIZE"] = str(task.split.processes)
    # Tasks of one launch have process groups of different sizes, so they do not meet at one address.
    dist.init_process_group(
        run.parallel.distributed_backend or current().communication_backend,
        init_method=f"file://{task.folder.resolve()}/rendezvous",
        rank=rank,
        world_size=task.split.processes,
        timeout=timedelta(minutes=run.parallel.distributed_timeout_minutes),
    )
    runner = _runner(task, run)
    _load(runner, task)
    batch = read_batch(Path(task.batch), task.model)
    parts = micro_batches(batch, task.model, task.micro_batch_size)
    mine = runner.share([*parts, pack_rows(batch)] if task.pack else parts)
    if task.curve is not None:
        _train(runner.engine, mine, task, rank)
    else:
        _observe(runner, mine, batch, task, rank)
    runner.close()


def _runner(task: Task, run: RunConfig) -> Runner:
    if task.split.backend == "fsdp2":
        from tangram.align.on_fsdp2 import OnFsdp2

        return OnFsdp2(task, run)
    from tangram.align.on_megatron import OnMegatron

    return OnMegatron(task, run)


def _load(runner: Runner, task: Task) -> None:
    engine = runner.engine
    placements, parameters = [placement for _, placement, _ in engine.chunks], [held for _, _, held in engine.chunks]
    if task.seed is not None:
        engine.random_weights(task.seed)
    elif task.checkpoint is None:
        load_hf(HFDirectory(task.hf_dir), placements, parameters, cast=True, shapes=engine.canonical_shapes)
    elif kind_of_weights(task.checkpoint) == "mp_rank directory":
        runner.load_split(task.checkpoint)
    else:
        trained = DCPReader(task.checkpoint)
        check_names(list(trained.names()), list(engine.canonical_shapes), str(trained.folder))
        fill_all(placements, parameters, trained, str(trained.folder), cast=True)
    engine.weights_changed()


def _observe(runner: Runner, mine: list[dict[str, Any]], batch: dict[str, torch.Tensor], task: Task, rank: int) -> None:
    engine, (rows, columns) = runner.engine, batch["input_ids"].shape
    write_pieces(runner.logits(mine, (2 * rows if task.pack else rows, columns)), logits_file(task.folder, rank))
    if task.dtype == "fp16":
        _settle_loss_scale(engine, mine)
    trace = runner.trace(task.trace, rank) if task.trace is not None else None
    if trace is not None:
        trace.begin(mine)
    result = engine.forward_backward(mine)
    if trace is not None:
        trace.finish(result)
    write_pieces(engine.canonical_gradients(), gradient_file(task.folder, rank))
    frozen = runner.frozen()
    if rank == 0:
        _write_result(task, {"loss": result.loss, "tokens": result.tokens, "frozen": frozen})


def _settle_loss_scale(engine: RunnableEngine, mine: list[dict[str, Any]]) -> None:
    """Lower the loss scale as training does, by skipped steps, until gradients are finite. The learning rate is 0: weights stay."""
    for _ in range(MOST_SKIPPED_STEPS):
        engine.forward_backward(mine)
        if not engine.step(0.0).skipped:
            return
    raise TangramError(f"fp16 gradients are not finite after {MOST_SKIPPED_STEPS} steps that each lower the loss scale; use bf16 or fp32")


def _train(engine: RunnableEngine, mine: list[dict[str, Any]], task: Task, rank: int) -> None:
    assert task.curve is not None
    losses, norms = [], []
    for _ in range(task.curve.steps):
        losses.append(engine.forward_backward(mine).loss)
        norms.append(engine.step(task.curve.lr).grad_norm)
    if rank == 0:
        _write_result(task, {"losses": losses, "grad_norms": norms})


def _write_result(task: Task, result: dict[str, Any]) -> None:
    (task.folder / RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")
