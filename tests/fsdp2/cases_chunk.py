"""What ranks do in the tests of chunk loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fsdp2.kit import PLAN, engine_of, read, real_batch, write_run

LAYERS = PLAN["apply_modules"]
NORM = "model.language_model.norm"
VARIANTS: dict[str, dict[str, Any]] = {
    "root owns the head": {},
    "head is a unit": {"parallel": {"fsdp_plan": {"apply_modules": [*LAYERS, "lm_head"]}}},
    "norm and head are units": {"parallel": {"fsdp_plan": {"apply_modules": [*LAYERS, NORM, "lm_head"]}}},
    "layers are recomputed": {"features": {"recompute": True, "recompute_plan": {"apply_modules": ["model.language_model.layers.{*}"]}}},
    "bf16": {"parallel": {"fsdp_plan": {"apply_modules": [*LAYERS, "lm_head"], "param_dtype": "bf16", "reduce_dtype": "fp32"}}},
}


class Gathers(TorchDispatchMode):
    """How often something is gathered over ranks."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in func.name()
        return func(*args, **(kwargs or {}))


def run_variants(hf: Path, folder: Path, names: list[str], losses: list[str]) -> dict[str, Any]:
    """For every variant the loss, this rank's gradients against those of the same run with whole logits, and the gathers of both."""
    found = {}
    for name in names:
        for loss_type in losses:
            changes = {**VARIANTS[name], "features": {**VARIANTS[name].get("features", {}), "loss_cfg": {"loss_type": loss_type}}}
            whole = _run(hf, folder, changes, {})
            for switch, chunk in (("enable_chunk_loss", 1), ("enable_dynamic_chunk_loss", 1000)):
                chunked = {switch: True, "chunkloss_plan": {"chunk_size": chunk, "total_chunk_size": chunk}}
                mine = _run(hf, folder, changes, chunked)
                found[f"{name}, {loss_type}, {switch} {chunk}"] = {
                    "losses": (mine["loss"], whole["loss"]),
                    "evaluated": (mine["evaluated"], whole["evaluated"]),
                    "gathers": (mine["gathers"], whole["gathers"]),
                    "error": _error(mine["gradients"], whole["gradients"]),
                }
    return found


def _run(hf: Path, folder: Path, changes: Mapping[str, Any], chunked: Mapping[str, Any]) -> dict[str, Any]:
    content = {**changes, "features": {**changes.get("features", {}), **chunked}}
    engine = engine_of(read(write_run(folder / f"rank_{dist.get_rank() if dist.is_initialized() else 0}", hf, content)))
    _, parts = real_batch(hf)
    mine = parts[engine.data_parallel_rank :: engine.data_parallel_size][:2]
    if dist.get_rank() == 1:
        mine[0]["labels"] = torch.full_like(mine[0]["labels"], -100)
    with Gathers() as gathers:
        result = engine.forward_backward(mine)
    gradients = {tensor.name: tensor.local.clone() for tensor in engine.canonical_gradients()}
    return {"loss": result.loss, "gradients": gradients, "gathers": gathers.count, "evaluated": engine.evaluate(mine).loss}


def _error(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    assert set(found) == set(wanted)
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-10)) for name in wanted)
