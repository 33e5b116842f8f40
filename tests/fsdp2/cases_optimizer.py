"""What ranks do in the tests of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tangram.backends.fsdp2.meshes import join
from tangram.backends.fsdp2.optimizer import ShardedOptimizer
from tangram.config.fsdp2 import Fsdp2Parallel, Fsdp2Training
from tests.fsdp2.kit import engine_of, read, write_run
from tests.fsdp2.media import Rows


class Toy(nn.Module):
    """An embedding, matrices both ways round (one of a single row), a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.wide = nn.Linear(6, 4)
        self.tall = nn.Linear(4, 7, bias=False)
        self.one = nn.Linear(7, 1, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def toy() -> Toy:
    torch.manual_seed(1)
    return Toy()


def gradients(step: int) -> dict[str, Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in toy().named_parameters()}


def train_toy(settings: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Whole parameters after ``steps`` steps with given gradients, and the norms of these."""
    meshes = join(Fsdp2Parallel())
    model = toy()
    fully_shard(model.wide, mesh=meshes.sharding)
    fully_shard(model, mesh=meshes.sharding)
    optimizer = ShardedOptimizer(model, Fsdp2Training(train_iters=1, **settings))
    norms = []
    for step in range(steps):
        for name, gradient in gradients(step).items():
            parameter = optimizer.parameters[name]
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        norms.append(optimizer.norms(meshes.device)[0])
        optimizer.clip(norms[-1], settings.get("clip_grad", 1.0))
        optimizer.step(settings["lr"])
    whole = {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    groups = [(len(group["params"]), group["weight_decay"], group["scale"]) for group in optimizer.torch.param_groups]
    return {"parameters": whole, "norms": norms, "groups": groups}


def curve(hf: Path, folder: Path, steps: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Losses and gradient norms of ``steps`` steps, and the parameters that are trained."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    engine = engine_of(read(write_run(folder / f"rank_{rank}", hf, changes)))
    rows = Rows(hf)
    parts = [rows.batch("image") for _ in range(2)]
    before = {name: p.full_tensor().clone() for name, p in engine.parameters.items()}  # type: ignore[attr-defined]
    losses, norms = [], []
    for _ in range(steps):
        losses.append(engine.forward_backward(parts[engine.data_parallel_rank :: engine.data_parallel_size]).loss)
        norms.append(engine.step(engine.run.training.lr).grad_norm)
    same = sorted(name for name, p in engine.parameters.items() if torch.equal(p.full_tensor(), before[name]))  # type: ignore[attr-defined]
    moments = {str(value.dtype) for state in engine.optimizer.torch.state.values() for kind, value in state.items() if kind != "step"}
    return {"losses": losses, "norms": norms, "unchanged": same, "trained": sorted(engine.optimizer.parameters), "moments": sorted(moments)}


def poisoned(hf: Path, folder: Path) -> dict[str, Any]:
    """A NaN in one gradient shard of the last rank: does anything move on this rank, in this step and the next?"""
    engine = engine_of(read(write_run(folder / f"rank_{dist.get_rank() if dist.is_initialized() else 0}", hf)))
    part = Rows(hf).batch("image")

    def snapshot() -> list[Tensor]:
        state = engine.optimizer.torch.state
        return [p.detach().clone() for p in engine.optimizer.shards.values()] + [v.clone() for s in state.values() for v in s.values()]

    engine.forward_backward([part])
    engine.step(1e-3)
    before = snapshot()
    engine.forward_backward([part])
    if dist.get_rank() == dist.get_world_size() - 1:
        next(p for p in engine.parameters.values() if p.grad is not None).grad.to_local().view(-1)[0] = torch.nan  # type: ignore[union-attr]
    bad = engine.step(1e-3)
    kept = all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    engine.forward_backward([part])
    good = engine.step(1e-3)
    moved = not all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    return {"bad": bad.skipped, "kept": kept, "good": good.skipped, "moved": moved}


def norm_of_replicated_and_sharded() -> float:
    """One parameter that every rank holds whole, one in two parts."""
    meshes = join(Fsdp2Parallel())
    model = nn.Module()
    model.same, model.cut = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    model.cut = nn.Parameter(distribute_tensor(model.cut.data, meshes.sharding, [Shard(0)]))
    optimizer = ShardedOptimizer(model, Fsdp2Training(train_iters=1))
    optimizer.parameters["same"].grad = torch.tensor([3.0])
    optimizer.parameters["cut"].grad = distribute_tensor(torch.tensor([4.0, 0.0]), meshes.sharding, [Shard(0)])
    return optimizer.norms(meshes.device)[0]
