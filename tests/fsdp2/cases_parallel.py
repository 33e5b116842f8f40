"""What ranks do in the tests of context and expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tangram.align.reference import forward_arguments, load_reference
from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.checkpoints.dcp_manifest import RunFacts
from tangram.checkpoints.manager import CheckpointManager
from tangram.platform.exchange import exchange, gather, sum_parts
from tests.fsdp2.kit import engine_of, read, write_run
from tests.fsdp2.media import Rows, dealt
from tests.fsdp2.truth import truth, whole_gradients

MIXED = ((("images", 3, 5), ("text", 8, 6)), (("both", 2, 3),), (("text", 4, 4),), (("image", 5, 2), ("video", 3, 7)))
"""Micro-batches of a global batch: padded rows, pictures and a video at once, no picture at all."""


@dataclass(frozen=True)
class Case:
    """Args:
    changes: of the run file.
    packing: the engine gets the rows of a micro-batch packed in one; the truth does not.
    """

    family: str
    changes: Mapping[str, Any]
    batches: Sequence[Sequence[tuple[str, int, int]]] = MIXED
    packing: bool = False
    loss_type: str = "per_token_loss"
    watch: Sequence[str] = field(default_factory=tuple)
    """Modules whose input rows are counted."""


def compare(models: Mapping[str, Path], folder: Path, cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """Each case held against transformers in one process, that of the first rank.

    Returns:
        Per case: relative error of the loss, of the loss of ``evaluate``, of the gradient norm and, on the first rank, which has them all, of the
        worst gradient, norm-wise.
    """
    return {name: _compare(models[case.family], folder / name, case) for name, case in cases.items()}


def check(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Hold what ``compare`` gave against what rounding allows."""
    for name, case in found.items():
        assert case["loss"] < 1e-6, name
        assert case["evaluated"] < 1e-6, name
        assert case["norm"] < 1e-6, name
        assert case["gradients"] < 1e-5, name


def _compare(hf: Path, folder: Path, case: Case) -> dict[str, Any]:
    engine = build(hf, folder, {**case.changes, "features": {**case.changes.get("features", {}), "loss_cfg": {"loss_type": case.loss_type}}})
    rows, same_rows = Rows(hf), Rows(hf)
    batches = [rows.batch(*batch, packing=case.packing) for batch in case.batches]
    mine = dealt(batches, engine.data_parallel_rank, engine.data_parallel_size)
    evaluated = engine.evaluate(mine).loss
    seen: dict[str, list[int]] = {path: [] for path in case.watch}
    for path in case.watch:
        engine.module.get_submodule(path).register_forward_pre_hook(partial(_count, seen[path]))
    found = engine.forward_backward(mine).loss
    whole = whole_gradients(engine)
    gradients, told = {}, [0.0, 0.0]
    if dist.get_rank() == 0:
        told[0], gradients = truth(hf, [same_rows.batch(*batch) for batch in case.batches], case.loss_type)
        told[1] = float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())
    dist.broadcast_object_list(told)
    loss, norm = told
    return {
        "loss": abs(found - loss) / loss,
        "evaluated": abs(evaluated - loss) / loss,
        "gradients": max((_error(whole[name], gradient, 1e-3 * norm) for name, gradient in gradients.items()), default=0.0),
        "norm": abs(engine.step(0.0).grad_norm - norm) / norm,
        "seen": seen,
    }


def build(hf: Path, folder: Path, changes: Mapping[str, Any]) -> Fsdp2Engine:
    return engine_of(read(write_run(folder / f"rank_{dist.get_rank() if dist.is_initialized() else 0}", hf, changes)))


def _error(found: torch.Tensor, expected: torch.Tensor, least: float) -> float:
    """Norm-wise. Some gradients are rounding alone (a key's bias shifts all scores of a softmax), so smaller norms than ``least`` count as that."""
    if found.dim() == 3 and found.shape != expected.shape:
        found = found.mT  # transformers 5 holds experts as [experts, out, in]; no stack of the tiny model has in = out
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm().clamp(min=least))


def _count(seen: list[int], _: Any, args: tuple[torch.Tensor, ...]) -> None:
    seen.append(args[0].shape[-2])


def refusals(cases: Sequence[tuple[Path, Path, Mapping[str, Any]]]) -> list[str]:
    """What the engine says to each run file."""
    said = []
    for hf, folder, changes in cases:
        try:
            build(hf, folder, changes)
            said.append("nothing")
        except Exception as error:  # the text is compared
            said.append(f"{type(error).__name__}: {error}")
    return said


def exchanges() -> dict[str, Any]:
    """All-to-all of two ranks, by hand: rank 0 holds rows 0 and 1 of a table of 3 x 4, rank 1 row 2; afterwards columns 0 to 2, and 3."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    table = torch.arange(12.0).view(3, 4)
    mine = table[[slice(0, 2), slice(2, 3)][rank]].clone().requires_grad_()
    columns = exchange(mine, group, 1, [3, 1], 0, [2, 1])
    (columns * (1 + rank)).sum().backward()
    by_exchange, mine.grad = mine.grad, None
    everything = gather(mine, group, [2, 1])
    (everything * (1 + rank)).sum().backward()
    by_gather, mine.grad = mine.grad, None
    summed = sum_parts(table.clone() * (1 + rank), group, [2, 1])
    return {name: value.tolist() for name, value in locals().items() if name in ("columns", "by_exchange", "everything", "by_gather", "summed")}


def steps(hf: Path, folder: Path, changes: Mapping[str, Any], load: bool) -> dict[str, Any]:
    """Train a step and save a training checkpoint, or load the one that another split saved; then train the second step."""
    engine = build(hf, folder / str(load), changes)
    facts = RunFacts("qwen3_vl_moe", engine.topology, engine.data_parallel_size, {}, "", "", 0, {}, engine.axes)
    manager = CheckpointManager(facts, engine.chunks, engine.canonical_shapes, engine.optimizer_state())
    rows = Rows(hf)
    first, second = ([rows.batch(*batch) for batch in MIXED] for _ in range(2))
    if load:
        engine.random_weights(1)
        manager.load(folder / "saved")
        engine.weights_changed()
    else:
        _train(engine, first)
        manager.save(folder / "saved", 1, len(first))
    loss, norm = _train(engine, second)
    after = engine.evaluate(dealt(first, engine.data_parallel_rank, engine.data_parallel_size)).loss
    return {"loss": loss, "norm": norm, "after": after, "axes": dict(engine.axes)}


def _train(engine: Fsdp2Engine, batches: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    loss = engine.forward_backward(dealt(list(batches), engine.data_parallel_rank, engine.data_parallel_size)).loss  # type: ignore[arg-type]
    return loss, engine.step(1e-3).grad_norm


def columns(hf: Path, folder: Path) -> float:
    """Largest error of the logits that ranks put together from their columns."""
    engine = build(hf, folder, {"parallel": {"ulysses_parallel_size": 2}})
    batch = Rows(hf).batch(("images", 3, 5), ("text", 8, 6))
    (found,) = engine.logits([batch])
    model = load_reference(hf)
    return float((found - model(**forward_arguments(model, batch)).logits).abs().max())
