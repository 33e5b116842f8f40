"""One process of the split model: ``torchrun -m tangram.align.worker TASKS.json``."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tangram.align.assemble import write_pieces
from tangram.align.batch import blank_like, micro_batches, read_batch
from tangram.align.task import RESULT_FILE, Task, TaskList, fault_file, gradient_file, logits_file
from tangram.backends.dtypes import DTYPES
from tangram.backends.engine import Batch, CanonicalTensor
from tangram.backends.megatron.engine import MegatronEngine
from tangram.backends.megatron.forward import get_batch, report_loss
from tangram.backends.megatron.parallel import shutdown
from tangram.checkpoints.dcp_reader import DCPReader
from tangram.checkpoints.fresh import initialize
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.kinds import kind_of_weights
from tangram.checkpoints.load_hf import fill_all, load_hf
from tangram.checkpoints.mp_rank import MMDirectory, load_mm
from tangram.errors import TangramError
from tangram.families.plugins import load_plugins
from tangram.losses.modes import reduce_token_losses
from tangram.placement.blocks import check_names
from tangram.platform import current

MOST_SKIPPED_STEPS = 40


class ObservingStep:
    """Forward step that computes the per-token loss, or, while ``logits`` is a list, collects logits instead.

    Each entry of ``logits`` is (row numbers of the batch, this tensor-parallel rank's logits ``[b, s, V / TP]``).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.device = current().use(int(os.environ.get("LOCAL_RANK", "0")))
        self.logits: list[tuple[list[int], torch.Tensor]] | None = None

    def __call__(self, iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, Any]:
        batch = next(iterator)
        inputs = get_batch(iter([batch]), self.device, self.dtype)
        if self.logits is None:
            return model(**inputs), self._loss
        del inputs["labels"]
        return model(**inputs), lambda output: self._keep(batch["sample_ids"], output["logits"])

    @staticmethod
    def _loss(output: Any) -> Any:
        losses = output["loss_dict"]
        terms = reduce_token_losses(losses["token_losses"], losses["samples"], "per_token_loss")
        return report_loss(terms.numerator, terms.denominator)

    def _keep(self, rows: list[int], logits: torch.Tensor) -> Any:
        assert self.logits is not None
        if rows:
            self.logits.append((rows, logits.detach().float().cpu()))
        return report_loss(logits.new_zeros(()), 0)


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
    # Tasks of one launch have process groups of different sizes, so they do not meet at torchrun's own store.
    dist.init_process_group(
        run.parallel.distributed_backend or current().communication_backend,
        init_method=f"file://{task.folder.resolve()}/rendezvous",
        rank=rank,
        world_size=task.split.processes,
        timeout=timedelta(minutes=run.parallel.distributed_timeout_minutes),
    )
    step = ObservingStep(DTYPES[task.dtype])
    engine = MegatronEngine(run, forward_step=step)
    _load(engine, task)
    batch = read_batch(Path(task.batch), task.model)
    mine = _own_share(engine, batch, task)
    if task.curve is not None:
        _train(engine, mine, task, rank)
    else:
        _observe(engine, step, mine, batch, task, rank)
    shutdown()


def _load(engine: MegatronEngine, task: Task) -> None:
    placements, parameters = [c.placement for c in engine.chunks], [c.parameters for c in engine.chunks]
    if task.checkpoint is not None and kind_of_weights(task.checkpoint) == "mp_rank directory":
        load_mm(MMDirectory(task.checkpoint), placements, parameters, engine.topology, engine.model, cast=True)
    elif task.checkpoint is not None:
        trained = DCPReader(task.checkpoint)
        check_names(list(trained.names()), list(engine.canonical_shapes), str(trained.folder))
        fill_all(placements, parameters, trained, str(trained.folder), cast=True)
    elif task.seed is None:
        load_hf(HFDirectory(task.hf_dir), placements, parameters, cast=True, shapes=engine.canonical_shapes)
    else:
        text, encoder = task.model.text_decoder, task.model.image_encoder
        std = {"text": text.init_method_std, "vision": encoder.vision_encoder.init_method_std if encoder else 0.0}
        initialize(placements, parameters, task.seed, std)  # type: ignore[arg-type]
    engine.weights_changed()


def _own_share(engine: MegatronEngine, batch: dict[str, torch.Tensor], task: Task) -> list[dict[str, Any]]:
    """This data-parallel rank's micro-batches, filled up with unsupervised ones where the schedule needs more."""
    parts = micro_batches(batch, task.model, task.micro_batch_size)
    unit = task.split.data * (task.split.pipeline if task.split.virtual > 1 else 1)
    parts += [blank_like(parts[-1])] * (-len(parts) % unit)
    return parts[engine.data_parallel_rank :: engine.data_parallel_size]


def _observe(engine: MegatronEngine, step: ObservingStep, mine: list[dict[str, Any]], batch: dict[str, torch.Tensor], task: Task, rank: int) -> None:
    step.logits = []
    engine.evaluate(mine)
    write_pieces(_logit_pieces(engine, step.logits, tuple(batch["input_ids"].shape), task), logits_file(task.folder, rank))
    step.logits = None
    if task.dtype == "fp16":
        _settle_loss_scale(engine, mine)
    result = engine.forward_backward(mine)
    write_pieces(engine.canonical_gradients(), gradient_file(task.folder, rank))
    if rank == 0:
        _write_result(task, {"loss": result.loss, "tokens": result.tokens})


def _settle_loss_scale(engine: MegatronEngine, mine: list[dict[str, Any]]) -> None:
    """Lower the loss scale as training does, by skipped steps, until gradients are finite. The learning rate is 0: weights stay."""
    for _ in range(MOST_SKIPPED_STEPS):
        engine.forward_backward(mine)
        if not engine.step(0.0).skipped:
            return
    raise TangramError(f"fp16 gradients are not finite after {MOST_SKIPPED_STEPS} steps that each lower the loss scale; use bf16 or fp32")


def _logit_pieces(
    engine: MegatronEngine, kept: list[tuple[list[int], torch.Tensor]], shape: tuple[int, ...], task: Task
) -> Iterator[CanonicalTensor]:
    """Logits as rectangles of ``[B, S, V]``, without padding of the vocabulary; zeros past a micro-batch's length."""
    vocabulary = task.model.text_decoder.vocab_size
    for rows, logits in kept:
        start = engine.ranks.tensor_parallel_rank * logits.shape[-1]
        real = min(logits.shape[-1], vocabulary - start)
        if real > 0:
            whole = torch.nn.functional.pad(logits[..., :real], (0, 0, 0, shape[1] - logits.shape[1]))
            yield CanonicalTensor("logits", (rows[0], 0, start), (*shape, vocabulary), whole)


def _train(engine: MegatronEngine, mine: list[dict[str, Any]], task: Task, rank: int) -> None:
    assert task.curve is not None
    losses, norms = [], []
    for _ in range(task.curve.steps):
        losses.append(engine.forward_backward(mine).loss)
        norms.append(engine.step(task.curve.lr).grad_norm)
    if rank == 0:
        _write_result(task, {"losses": losses, "grad_norms": norms})


def _write_result(task: Task, result: dict[str, Any]) -> None:
    (task.folder / RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
