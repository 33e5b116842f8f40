"""What ranks do in ``test_sequence_parallel``; ``opened`` serves other tests too."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tangram.align.batch import micro_batches, read_batch
from tangram.align.task import Task, TaskList
from tangram.backends.engine import Batch
from tangram.backends.megatron.engine import MegatronEngine
from tangram.checkpoints.hf_directory import HFDirectory
from tangram.checkpoints.load_hf import load_hf
from tangram.config.run import FeaturesConfig

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
FIRST = 100
"""Entries by which two masks are told apart."""


def drop(file: str) -> dict[str, Any]:
    """Dropout everywhere: gradients with and without recomputation, the masks drawn, and the loss's own slope along a gradient."""
    (task,) = tasks_of(file)
    found: dict[str, Any] = {}
    for name, features in {"plain": {}, "full": FULL, "selective": SELECTIVE}.items():
        with opened(task, **features) as (engine, batch):
            masks: list[tuple[tuple[int, ...], bytes]] = []

            def keep(tensor: torch.Tensor, masks: list[tuple[tuple[int, ...], bytes]] = masks) -> torch.Tensor:
                # A mask of dropout at 0.2 is 0 or 1 / 0.8.
                if tensor.is_floating_point() and bool(((tensor == 0) | (tensor == 1.25)).all()) and bool(tensor.any()):
                    masks.append((tuple(tensor.shape), (tensor != 0).flatten()[:FIRST].numpy().tobytes()))
                return tensor

            state = _generators(engine)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = engine.forward_backward(batch).loss
            gradients = {tensor.name: tensor.local.clone() for tensor in engine.canonical_gradients()}
            found[name] = {"loss": loss, "digest": _digest(*(gradients[key] for key in sorted(gradients)))}
            if name == "plain":
                found["masks"] = masks
                found["slope"] = _slope(engine, batch, state)
                found["again"] = engine.forward_backward(batch).loss
    return found


def _slope(engine: MegatronEngine, batch: list[Batch], state: dict[str, torch.Tensor], step: float = 1e-2) -> tuple[float, float]:
    """Norm of the word embedding's gradient, and how fast the loss falls when all ranks follow it, with the same random draws."""
    parameter = next(p for _, _, held in engine.chunks for n, p in held.items() if n.endswith("word_embeddings.weight"))
    gradient = parameter.main_grad.clone()  # type: ignore[attr-defined]
    squared = gradient.square().sum()
    dist.all_reduce(squared)
    norm = float(squared.sqrt())
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * step * gradient / norm
        _restore(engine, state)
        losses.append(engine.forward_backward(batch).loss)
        with torch.no_grad():
            parameter -= sign * step * gradient / norm
    return norm, (losses[0] - losses[1]) / (2 * step)


def _generators(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {"": torch.get_rng_state(), **engine.generators().get()}


def _restore(engine: MegatronEngine, state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state[""])
    engine.generators().set({name: value for name, value in state.items() if name})


def tasks_of(file: str) -> list[Task]:
    """Those that this rank takes part in."""
    rank = int(os.environ["RANK"])
    return [task for task in TaskList.model_validate_json(Path(file).read_text(encoding="utf-8")).tasks if rank < task.split.processes]


@contextmanager
def opened(task: Task, adam_eps: float = 1e-8, **features: Any) -> Iterator[tuple[MegatronEngine, list[Batch]]]:
    """The task's engine on its first ranks, with the weights of its directory, and this copy's micro-batches."""
    out = task.folder / ("-".join(map(str, features.values())) or "plain")
    out.mkdir(parents=True, exist_ok=True)
    os.environ["WORLD_SIZE"] = str(task.split.processes)
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=int(os.environ["RANK"]), world_size=task.split.processes)
    run = task.run_config()
    run = run.model_copy(update={"features": FeaturesConfig(**features), "training": run.training.model_copy(update={"adam_eps": adam_eps})})
    # Dropout that the task's model names; a comparison would switch it off.
    run = run.model_copy(update={"model": run.model.model_copy(update={"config": task.model})})
    engine = MegatronEngine(run)
    placements, parameters = [chunk.placement for chunk in engine.chunks], [chunk.parameters for chunk in engine.chunks]
    load_hf(HFDirectory(task.hf_dir), placements, parameters, cast=True, shapes=engine.canonical_shapes)
    engine.weights_changed()
    batch = micro_batches(read_batch(Path(task.batch), task.model), task.model, task.micro_batch_size)
    yield engine, batch[engine.data_parallel_rank :: engine.data_parallel_size]
    engine.close()
    # The engine refers to itself, and holds groups with several threads each.
    del engine
    gc.collect()


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
