"""What a run of this backend says of itself before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor

from tangram.backends.fsdp2.meshes import Meshes
from tangram.backends.fsdp2.placement import local_value
from tangram.backends.fsdp2.units import ROOT, UnitPlan, owner_of
from tangram.config.fsdp2 import Fsdp2Config

WHOLE = "(whole on every rank)"
GIB = 2**30


@dataclass
class _Row:
    units: set[tuple[str, ...]] = field(default_factory=set)
    parameters: int = 0
    trained: int = 0


def unit_sizes(parameters: Mapping[str, nn.Parameter], plan: UnitPlan) -> dict[str, _Row]:
    """Units by pattern, in order of entry, then the root, then what is not sharded; each parameter counted once."""
    rows: dict[str, _Row] = {unit.pattern: _Row() for unit in plan.units} | {ROOT: _Row(), WHOLE: _Row()}
    for unit in plan.units:
        rows[unit.pattern].units.add(unit.paths)
    for name, parameter in parameters.items():
        owner = owner_of(name.rpartition(".")[0], plan.units)
        row = rows[WHOLE if not isinstance(parameter, DTensor) else ROOT if owner is None else owner.pattern]
        row.parameters += parameter.numel()
        row.trained += parameter.numel() if parameter.requires_grad else 0
    return {pattern: row for pattern, row in rows.items() if row.parameters or row.units}


def summary_table(parameters: Mapping[str, nn.Parameter], plan: UnitPlan, settings: Fsdp2Config, meshes: Meshes, batch: int) -> str:
    """Units of sharding, what this rank holds, and the batch.

    Args:
        batch: samples of a step.
    """
    sizes = unit_sizes(parameters, plan)
    dtype = settings.parallel.fsdp_plan.param_dtype or "fp32"
    table = Table(title="units of sharding, in order of entry", title_justify="left")
    for column in ("apply_modules", "units", "parameters", "frozen", "computed in"):
        table.add_column(column, justify="right" if column in ("units", "parameters") else "left")
    for pattern, row in sizes.items():
        frozen = "no" if row.trained == row.parameters else "yes" if row.trained == 0 else f"{row.parameters - row.trained:,}"
        table.add_row(pattern, str(len(row.units) or 1), f"{row.parameters:,}", frozen, "fp32" if pattern == WHOLE else dtype)
    total, trained = (sum(getattr(row, name) for row in sizes.values()) for name in ("parameters", "trained"))
    table.add_row("all", "", f"{total:,}", f"{total - trained:,}" if trained < total else "no", "")
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(table)
    micro = settings.training.micro_batch_size
    held = sum(local_value(parameter).nbytes for parameter in parameters.values())
    learnt = sum(local_value(parameter).nbytes for parameter in parameters.values() if parameter.requires_grad)
    return "\n".join(
        [
            capture.get().rstrip(),
            f"ranks: {meshes.copies} copies x {meshes.sharding.size() // meshes.copies} shards",
            f"this rank holds {held / GIB:.2f} GiB of weights and {learnt / GIB:.2f} GiB of gradients in fp32, before the optimizer's moments",
            f"batch: {batch} samples a step = {micro} a micro-batch x {batch // (micro * meshes.data_parallel_size)} micro-batches "
            f"x {meshes.data_parallel_size} data-parallel ranks",
        ]
    )
