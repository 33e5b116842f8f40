"""What ranks do in the tests of checkpoints."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.backends.fsdp2.registry import model_register
from tangram.checkpoints.dcp_manifest import RunFacts
from tangram.checkpoints.hf_saves import HFSaves
from tangram.checkpoints.manager import CheckpointManager
from tangram.config.sources import read_hf_config
from tangram.errors import CheckpointError
from tangram.families import get_family
from tests.fsdp2.kit import engine_of, read, real_batch, write_run

STEPS = 2


class Marked(Qwen2_5_VLForConditionalGeneration):
    """With a parameter of one row, which most ranks hold nothing of, and one that never gets a gradient."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.spare = torch.nn.Parameter(torch.ones(3))

    @wraps(Qwen2_5_VLForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.loss = out.loss * (1 + self.scale[0])
        return out


model_register.register("marked", Marked)
FROZEN = "model.visual.blocks.0."


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Run:
    """An engine, its manager, and the first micro-batches of the common batch over and over."""

    def __init__(self, hf: Path, scratch: Path, changes: Mapping[str, Any], seed: int, **options: Any) -> None:
        self.engine = Fsdp2Engine(read(write_run(scratch / f"rank_{rank()}", hf, changes)))
        self.engine.random_weights(seed)
        facts = RunFacts(
            "qwen2_5_vl", self.engine.topology, self.engine.data_parallel_size, read_hf_config(hf), "tok", "data", 1, {"lr": 1}, self.engine.axes
        )
        training = self.engine.run.training
        self.manager = CheckpointManager(
            facts,
            self.engine.chunks,
            self.engine.canonical_shapes,
            self.engine.optimizer_state(),
            stored_as=self.engine.stored_as,
            no_load_optim=training.no_load_optim,
            no_save_optim=training.no_save_optim,
            **options,
        )
        torch.manual_seed(seed + rank())
        np.random.seed(seed)
        random.seed(seed)
        self.parts = real_batch(hf)[1][:4]

    def train(self, first: int, count: int = STEPS) -> list[float]:
        losses = []
        for step in range(first, first + count):
            losses.append(self.engine.forward_backward(self.parts[self.engine.data_parallel_rank :: self.engine.data_parallel_size]).loss)
            self.engine.step(1e-3 * (1 + step))
        return losses

    def frozen(self) -> dict[str, torch.Tensor]:
        _, _, held = self.engine.chunks[0]
        return {name: value.clone() for name, value in held.items() if name.startswith(FROZEN)}


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def save(hf: Path, folder: Path, name: str, changes: Mapping[str, Any], seed: int = 5) -> dict[str, Any]:
    """Steps, a checkpoint in ``folder/name``, and as many more."""
    run = Run(hf, folder / f"of_{name}", changes, seed)
    frozen = run.frozen()
    losses = run.train(0)
    run.manager.save(folder / name, STEPS, 8 * STEPS, {"skipped": 1})
    drawn = draws()
    losses += run.train(STEPS)
    still = all(torch.equal(frozen[key], value) for key, value in run.frozen().items())
    return {"losses": losses, "draws": drawn, "frozen": len(frozen), "still": still}


def resume(hf: Path, folder: Path, name: str, again: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Load ``folder/name`` over other weights, save at once as ``folder/again``, and go on."""
    run = Run(hf, folder / f"of_{again}", changes, seed=77)
    resumed = run.manager.load(folder / name)
    drawn = draws()
    run.manager.save(folder / again, resumed.step, resumed.consumed_samples, resumed.extra)
    empty = sorted(set(run.engine.parameters) - set(run.engine.chunks[0][2]))
    position = resumed.step, resumed.consumed_samples, dict(resumed.extra)
    return {"losses": run.train(STEPS), "draws": drawn, "position": position, "empty": empty}


def scenario(hf: Path, folder: Path, saves: Mapping[str, Mapping[str, Any]], loads: Sequence[tuple[str, str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Several of both in one launch."""
    found: dict[str, Any] = {name: save(hf, folder, name, changes) for name, changes in saves.items()}
    return found | {again: resume(hf, folder, name, again, changes) for name, again, changes in loads}


def refusal(hf: Path, folder: Path, name: str, changes: Mapping[str, Any]) -> str:
    """What loading says."""
    try:
        Run(hf, folder / "refused", changes, seed=77).manager.load(folder / name)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def save_in_background(hf: Path, folder: Path) -> dict[str, Any]:
    """One that goes well while training goes on, then one that fails on the last rank alone."""
    run = Run(hf, folder / "background", {}, seed=5, save_async=True, save_total_limit=1)
    run.train(0)
    run.manager.save(folder / "ckpt", 3, 24)
    run.train(3)
    run.manager.save(folder / "ckpt", 6, 48)
    run.manager.wait()
    kept = sorted(path.name for path in (folder / "ckpt").glob("iter_*"))
    run.manager.save(folder / "now", 6, 48)
    run.manager.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank() == dist.get_world_size() - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    run.manager.save(folder / "ckpt", 7, 56)
    run.manager.settle()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    failed = run.manager.failed()
    try:
        run.manager.save(folder / "ckpt", 8, 64)
        message = "nothing"
    except CheckpointError as error:
        message = str(error)
    dist.barrier()  # rank 0 clears away what was written
    left = sorted(path.name for path in (folder / "ckpt").iterdir())
    other = Run(hf, folder / "other", {}, seed=77)
    return {"kept": kept, "failed": failed, "message": message, "left": left, "step": other.manager.load(folder / "ckpt").step}


def export(hf: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    """Hugging Face directories of the same weights, twice under one step."""
    engine = engine_of(read(write_run(folder / f"rank_{rank()}", hf, changes)))
    saves = HFSaves(engine.chunks, engine.canonical_shapes, engine.stored_as, get_family("qwen2_5_vl"), read_hf_config(hf), hf)
    saves.save(folder / "out", 7)
    saves.save(folder / "out", 7)
