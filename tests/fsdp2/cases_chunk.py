"""What ranks do in the tests of chunk loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fsdp2.kit import PLAN, engine_of, read, write_run
from tests.fsdp2.media import Rows
from tests.largest import largest

LAYERS = PLAN["apply_modules"]
NORM = "model.language_model.norm"
RECOMPUTED = {"recompute": True, "recompute_plan": {"apply_modules": ["model.language_model.layers.{*}"]}}
VARIANTS: dict[str, dict[str, Any]] = {
    "root owns the head": {},
    "head is a unit": {"parallel": {"fsdp_plan": {"apply_modules": [*LAYERS, "lm_head"]}}},
    "norm and head are units, recomputed layers": {
        "parallel": {"fsdp_plan": {"apply_modules": [*LAYERS, NORM, "lm_head"]}},
        "features": RECOMPUTED,
    },
}


class Gathers(TorchDispatchMode):
    """How often something is gathered over ranks."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in func.name()
        return func(*args, **(kwargs or {}))


def run_variants(hf: Path, folder: Path, names: list[str], loss_type: str) -> dict[str, Any]:
    """For every variant losses and gathers, in chunks and with whole logits, and how far this rank's gradients are apart."""
    found = {}
    for name in names:
        changes = {**VARIANTS[name], "features": {**VARIANTS[name].get("features", {}), "loss_cfg": {"loss_type": loss_type}}}
        whole = _run(hf, folder, changes, {})
        for switch, chunk in (("enable_chunk_loss", 1), ("enable_dynamic_chunk_loss", 1000)):
            mine = _run(hf, folder, changes, {switch: True, "chunkloss_plan": {"chunk_size": chunk, "total_chunk_size": chunk}})
            found[f"{name}, {switch} {chunk}"] = {
                **{kind: (mine[kind], whole[kind]) for kind in ("losses", "evaluated", "gathers")},
                "error": _error(mine["gradients"], whole["gradients"]),
            }
    return found


def bf16_errors(hf: Path, folder: Path) -> tuple[float, float]:
    """How far the gradient of this rank's part of the head in bf16 is from that in fp32, in chunks and with whole logits."""
    low = {"parallel": {"fsdp_plan": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}}
    chunks = {"enable_chunk_loss": True, "chunkloss_plan": {"chunk_size": 1}}
    exact, mine, whole = (_run(hf, folder, *one)["gradients"]["lm_head.weight"] for one in (({}, {}), (low, chunks), (low, {})))
    return float((mine - exact).norm() / exact.norm()), float((whole - exact).norm() / exact.norm())


def _run(hf: Path, folder: Path, changes: Mapping[str, Any], chunked: Mapping[str, Any]) -> dict[str, Any]:
    content = {**changes, "features": {**changes.get("features", {}), **chunked}}
    engine = engine_of(read(write_run(folder / f"rank_{dist.get_rank() if dist.is_initialized() else 0}", hf, content)))
    rows = Rows(hf)
    parts = [rows.batch(row) for row in (("image", 2, 7), ("text", 3, 4), ("both", 2, 5), ("text", 4, 3))]
    mine = parts[engine.data_parallel_rank :: engine.data_parallel_size]
    if dist.get_rank() == 1:
        mine[0]["labels"] = torch.full_like(mine[0]["labels"], -100)
    with Gathers() as gathers:
        result = engine.forward_backward(mine)
    gradients = {tensor.name: tensor.local.clone() for tensor in engine.canonical_gradients()}
    return {"losses": result.loss, "gradients": gradients, "gathers": gathers.count, "evaluated": engine.evaluate(mine).loss}


def _error(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Norm-wise; gradients that are zero but for rounding are measured by those of all parameters together."""
    assert set(found) == set(wanted)
    least = 1e-3 * float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm())
    return largest(float((found[name] - wanted[name]).norm() / wanted[name].norm().clamp_min(least)) for name in wanted)
