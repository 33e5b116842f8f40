"""What ranks of ``test_crossing.py`` do: load a checkpoint at a split, save it again without a step, and take one step more."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tangram.align.batch import blank_like, micro_batches, read_batch
from tangram.align.task import Task, TaskList
from tangram.backends.engine import CanonicalTensor, RunnableEngine
from tangram.checkpoints.dcp_manifest import RunFacts, iteration_folder, schedule_changes
from tangram.checkpoints.manager import CheckpointManager
from tangram.config.sources import read_hf_config
from tangram.training.entry import build_engine
from tangram.training.schedule import LearningRate

STEPS, SAMPLES = 2, 8
"""Steps before the checkpoint, and samples of each."""
SCHEDULE = {"lr_decay_style": "cosine", "lr_warmup_iters": 1, "train_iters": 6}
WRONG = 7.0
"""What every parameter holds before it is loaded."""
Tensors = dict[str, torch.Tensor]


class Run:
    """A task's engine on its first ranks, its checkpoints and its batch."""

    def __init__(self, task: Task) -> None:
        run = task.run_config()
        run = run.model_copy(update={"training": run.training.model_copy(update=SCHEDULE)})
        self.engine: RunnableEngine = build_engine(run)
        engine, self.rate = self.engine, LearningRate(run.training)
        self.facts = RunFacts(
            task.model.model_id, engine.topology, engine.data_parallel_size, read_hf_config(task.hf_dir), "", "", 1, self.rate.facts(), engine.axes
        )
        self.manager = CheckpointManager(
            self.facts, engine.chunks, engine.canonical_shapes, engine.optimizer_state(), engine.generators(), stored_as=engine.stored_as
        )
        parts = micro_batches(read_batch(Path(task.batch), task.model), task.model, task.micro_batch_size)
        unit = engine.data_parallel_size * (engine.topology.pipeline if engine.topology.virtual > 1 else 1)
        parts += [blank_like(parts[-1])] * (-len(parts) % unit)
        self.batch = parts[engine.data_parallel_rank :: engine.data_parallel_size]

    def spoil(self) -> None:
        """Leave no parameter with a value that could be right."""
        for _, placement, parameters in self.engine.chunks:
            for block in placement.blocks:
                if block.canonical is not None:
                    parameters[block.local].data[block.local_slices] = WRONG
        self.engine.weights_changed()

    def step(self, number: int) -> None:
        self.engine.forward_backward(self.batch)
        assert not self.engine.step(self.rate(number)).skipped

    def save(self, folder: Path) -> None:
        self.manager.save(folder, STEPS, STEPS * SAMPLES, {"skipped": 1})


@contextmanager
def running(task: Task) -> Iterator[Run]:
    os.environ["WORLD_SIZE"] = str(task.split.processes)
    task.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{task.folder}/rendezvous", rank=int(os.environ["RANK"]), world_size=task.split.processes)
    run = Run(task)
    yield run
    run.engine.close()
    del run
    gc.collect()


def cross(file: str, stepped: list[int]) -> list[dict[str, Any]]:
    """The first task trains and saves; each other one goes on with what the one before it saved.

    Args:
        stepped: numbers of the tasks that take another step, the first among them.

    Returns:
        For each task of this rank what it found: where it stood, what changed in the schedule, how its weights differ from the first task's after
        the step, and on the first rank how what it saved differs.
    """
    tasks = TaskList.model_validate_json(Path(file).read_text(encoding="utf-8")).tasks
    later, found, saved = tasks[0].folder / "later.pt", [], Tensors()
    for number, task in enumerate(tasks):
        if int(os.environ["RANK"]) >= task.split.processes:
            continue
        facts: dict[str, Any] = {}
        with running(task) as run:
            if number == 0:
                run.engine.random_weights(5)
                for step in range(STEPS):
                    run.step(step)
            else:
                run.spoil()
                resumed = run.manager.load(tasks[number - 1].folder)
                facts["position"] = (resumed.step, resumed.consumed_samples, resumed.extra["skipped"])
                facts["schedule"] = schedule_changes(resumed.manifest, run.facts)
            run.save(task.folder)
            if number in stepped:
                run.step(STEPS)
                if number == 0:
                    torch.save(whole(run.engine), later)
                else:
                    facts["later"] = apart(run.engine, torch.load(later))
        if int(os.environ["RANK"]) == 0:
            state = stored(task.folder)
            saved = saved or state
            facts["saved"] = differences(state, saved)
        found.append(facts)
    return found


def window(tensor: CanonicalTensor) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(tensor.start, tensor.local.shape, strict=True))


def whole(engine: RunnableEngine) -> Tensors:
    """The parameters of a model on one process."""
    found: Tensors = {}
    for tensor in engine.canonical_parameters():
        found.setdefault(tensor.name, torch.empty(tensor.full_shape))[window(tensor)] = tensor.local
    return found


def apart(engine: RunnableEngine, truth: Tensors) -> dict[str, float]:
    """By name, how far this rank's part of each parameter lies from ``truth``, norm-wise."""
    errors: dict[str, float] = {}
    for tensor in engine.canonical_parameters():
        # What takes no part stays as it was drawn, and biases are drawn as zeros.
        least = torch.finfo(torch.float32).tiny
        error = (tensor.local.double() - truth[tensor.name][window(tensor)].double()).norm() / truth[tensor.name].double().norm().clamp(min=least)
        # In this order what is no number stays.
        errors[tensor.name] = max(float(error), errors.get(tensor.name, 0.0))
    return errors


def stored(folder: Path) -> Tensors:
    """Every tensor of a checkpoint but random state, read by torch alone."""
    folder = folder / iteration_folder(STEPS)
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
        for key, entry in entries.items()
        if not key.startswith("rng.")
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def differences(mine: Tensors, theirs: Tensors) -> dict[str, int | str]:
    """Keys that are not the same to the bit, with how many elements differ; and how many there are of each kind."""
    counts: dict[str, int | str] = {}
    for kind in ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.", "optimizer.step."):
        counts[kind] = sum(key.startswith(kind) for key in mine)
    for key in mine.keys() | theirs.keys():
        if key not in mine or key not in theirs:
            counts[key] = "missing" if key not in mine else "left over"
        elif (mine[key].dtype, mine[key].shape) != (theirs[key].dtype, theirs[key].shape):
            counts[key] = f"{mine[key].dtype} {tuple(mine[key].shape)}"
        elif not torch.equal(mine[key], theirs[key]):
            counts[key] = int((mine[key] != theirs[key]).sum())
    return counts
