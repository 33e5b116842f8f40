"""What ranks do in the tests of public reports."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.backends.fsdp2.placement import local_value
from tests.fsdp2.kit import engine_of, read, write_run
from tests.fsdp2.media import Rows
from tests.fsdp2.memory_kit import BLOCKS, LAYERS, recompute

TOWER_BUT_MERGER = ["model.visual.patch_embed", *BLOCKS]


def build(hf: Path, folder: Path, changes: Mapping[str, Any] | None = None) -> Fsdp2Engine:
    return engine_of(read(write_run(folder / f"rank_{os.environ['RANK']}", hf, changes)))


class Saved:
    """A tensor that autograd holds on to, as long as this lives."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedBy:
    """Tensors that autograd keeps of a module's run, and whether its output has a graph."""

    def __init__(self, module: nn.Module) -> None:
        self.kept: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.graph = False
        self._hooks: Any = None
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._hooks.__enter__()

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        self._hooks.__exit__(None, None, None)
        self.graph |= any(one.grad_fn is not None for one in tree_leaves(output) if isinstance(one, Tensor))

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        self.kept.add(saved)
        return saved


def frozen_tower(hf: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """A recomputed tower that is frozen, whole or up to its merger, or trained: which outputs have a graph, and how many tensors autograd keeps of
    the blocks and of what else there is in the tower."""
    found: dict[str, dict[str, Any]] = {}
    for name, freeze in {"whole": ["model.visual"], "up to the merger": TOWER_BUT_MERGER, "nothing": []}.items():
        engine = build(hf, folder, {"model": {"freeze": freeze}, "features": recompute(*LAYERS, *BLOCKS)})
        blocks = [SavedBy(engine.module.get_submodule(f"model.visual.blocks.{number}")) for number in range(2)]
        tower = SavedBy(engine.module.get_submodule("model.visual"))

        def look(*_: Any, name: str = name, blocks: list[SavedBy] = blocks, tower: SavedBy = tower) -> None:
            kept = sum(len(one.kept) for one in blocks)
            found[name] = {"output": tower.graph, "blocks": any(one.graph for one in blocks), "kept of blocks": kept, "kept": len(tower.kept)}

        engine.module.get_submodule("model.visual").register_forward_hook(look)
        engine.forward_backward([Rows(hf).batch("image")])
    return found


def frozen_text(hf: Path, folder: Path) -> list[str]:
    """Names that are trained after a step with the text model frozen and recomputed."""
    engine = build(hf, folder, {"model": {"freeze": ["model.language_model", "lm_head"]}, "features": recompute(*LAYERS, *BLOCKS)})
    engine.forward_backward([Rows(hf).batch("image")])
    engine.step(1e-3)
    return sorted(name for name, parameter in engine.module.named_parameters() if parameter.requires_grad)


def dummy(hf: Path, folder: Path) -> dict[str, Any]:
    """A micro-batch of text, without and with a pass of the tower for others' sake: loss, gradients of the tower, and the others."""
    engine = build(hf, folder)
    results = []
    for lacking in (0, 1):
        engine._lacking_passes = lambda _, lacking=lacking: [lacking]  # type: ignore[method-assign, misc]
        loss = engine.forward_backward([Rows(hf).batch("text")]).loss
        results.append((loss, {tensor.name: tensor.local.clone() for tensor in engine.canonical_gradients()}))
        reached = any(p.grad is not None for name, p in engine.parameters.items() if name.startswith("model.visual."))
        assert reached == bool(lacking)
    (one, without), (other, with_it) = results
    return {
        "losses": (one, other),
        "tower": max(float(value.abs().max()) for name, value in with_it.items() if name.startswith("model.visual.")),
        "others equal": all(torch.equal(without[name], value) for name, value in with_it.items() if not name.startswith("model.visual.")),
    }


def logits_after_steps(hf: Path, folder: Path) -> tuple[int, int, list[int]]:
    """Logits that were made and that are alive after their step, and tensors that are alive after each of three steps."""
    engine = build(hf, folder)
    made: list[weakref.ref[Tensor]] = []
    engine.module.get_output_embeddings().register_forward_hook(lambda _, __, output: made.append(weakref.ref(output)))  # type: ignore[operator]
    alive = []
    for _ in range(4):
        engine.forward_backward([Rows(hf).batch("image")])
        engine.step(1e-3)
        gc.collect()
        alive.append(sum(issubclass(type(one), Tensor) for one in gc.get_objects()))
    return len(made), sum(one() is not None for one in made), alive[1:]


class Sums(TorchDispatchMode):
    """Types that are summed over ranks in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce_scatter" in func.name():
            self.types |= {str(one.dtype) for one in tree_leaves(args) if isinstance(one, Tensor)}
        return func(*args, **(kwargs or {}))


def precisions(hf: Path, folder: Path) -> dict[str, dict[str, set[str]]]:
    """With weights computed in bf16, gradients summed in either type: types of sums, masters and moments."""
    found = {}
    for reduce_dtype in ("fp32", "bf16"):
        engine = build(hf, folder, {"parallel": {"fsdp_plan": {"param_dtype": "bf16", "reduce_dtype": reduce_dtype}}})
        with Sums() as sums:
            engine.forward_backward([Rows(hf, dist.get_rank()).batch("image")])
        engine.step(1e-3)
        state = engine.optimizer.torch.state.values()
        found[reduce_dtype] = {
            "sums": sums.types,
            "masters": {str(local_value(parameter).dtype) for parameter in engine.parameters.values()},
            "moments": {str(value.dtype) for one in state for kind, value in one.items() if kind != "step"},
        }
    return found


def accumulated(hf: Path, folder: Path) -> tuple[float, float]:
    """Loss and gradient norm of a step of rank-local micro-batches in which pictures and text come in opposite orders, after one of text alone."""
    engine = build(hf, folder)
    kinds = ("image", "text") if dist.get_rank() == 0 else ("text", "image")
    engine.forward_backward([Rows(hf, 10 + dist.get_rank()).batch("text")])
    engine.optimizer.zero_grad()
    loss = engine.forward_backward([Rows(hf, 2 * dist.get_rank() + at).batch(kind) for at, kind in enumerate(kinds)]).loss
    return loss, engine.step(1e-9).grad_norm
