"""What ranks do in the tests of ``fsdp_plan``: whatever it says, numbers are those of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.backends.fsdp2.placement import local_value
from tests.fsdp2.cases_media import compare
from tests.fsdp2.kit import UNITS, engine_of, read, write_run
from tests.fsdp2.media import Rows, dealt
from tests.fsdp2.truth import truth, whole_gradients
from tests.largest import largest

FEW = ("text", "both", "image", "text")


def options(hf: Path, folder: Path) -> None:
    """Keys of the plan one after another, or together where they meet."""
    layers, blocks = "model.language_model.layers.{*}", "model.visual.blocks.{*}"
    nested = [f"{layers}.mlp", layers, f"{layers}.self_attn", blocks]
    plans: dict[str, dict[str, Any]] = {
        "hooks": {"apply_modules": nested, "hook_modules": [layers, "model.visual"]},
        "prefetch": {"apply_modules": UNITS, "num_to_forward_prefetch": 2, "num_to_backward_prefetch": 2, "hook_modules": ["model.visual"]},
        "pregather": {"apply_modules": UNITS, "pregather": True, "reshard_after_forward": False},
        "host": {"apply_modules": nested, "cpu_offload": True},
        "whole": {"apply_modules": [layers], "ignored_modules": ["model.visual.merger", f"{layers}.self_attn", "model.language_model.norm"]},
    }
    for name, plan in plans.items():
        compare(hf, folder / name, {"parallel": {"fsdp_plan": plan}}, FEW)


def outputs(hf: Path, folder: Path) -> None:
    """``output_dtype`` where the root is the only unit: its loss, which is summed over micro-batches, is rounded by nobody."""
    compare(hf, folder, {"parallel": {"fsdp_plan": {"apply_modules": [], "output_dtype": "bf16"}}}, FEW[:1])


def tied(hf: Path, folder: Path) -> None:
    """A tied head, with units that name both it and the embedding, or neither, built on the meta device or not."""
    whole = ["model.language_model.embed_tokens", "lm_head"]
    for number, (modules, ignored, meta) in enumerate([(UNITS, [], True), (UNITS[:2], [], True), (UNITS, [], False), (UNITS[:2], whole, True)]):
        plan = {"apply_modules": modules, "ignored_modules": ignored}
        changes = {"parallel": {"fsdp_plan": plan}, "training": {"init_model_with_meta_device": meta}}
        engine = compare(hf, folder / str(number), changes, FEW)
        assert "lm_head.weight" not in engine.parameters
        module: Any = engine.module
        assert module.lm_head.weight is module.model.language_model.embed_tokens.weight


def uneven(hf: Path, folder: Path) -> None:
    """Matrices with an odd number of rows: what the optimizer updates is what the next forward pass gathers."""
    engine = compare(hf, folder, {"training": {"init_model_with_meta_device": True}}, FEW)
    held = engine.chunks[0][2]
    for name, parameter in engine.module.named_parameters():
        assert name not in held or held[name].data_ptr() == local_value(parameter).data_ptr(), name
    before = engine.evaluate([Rows(hf).batch("both")]).loss
    engine.forward_backward([Rows(hf).batch("both")])
    engine.step(1e-2)
    assert abs(engine.evaluate([Rows(hf).batch("both")]).loss - before) > 1e-2


def bf16(hf: Path, folder: Path) -> dict[str, Any]:
    """Types of weights and gradients, and the distance from one process in fp32."""
    units = [unit for unit in UNITS if "merger" not in unit]
    plan = {"apply_modules": units, "ignored_modules": ["model.visual.merger"], "param_dtype": "bf16", "reduce_dtype": "fp32"}
    engine = engine_of(read(write_run(folder / f"rank_{os.environ['RANK']}", hf, {"parallel": {"fsdp_plan": plan}})))
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    for name, module in engine.module.named_modules():
        # The head is a unit itself, so its weight is freed before the hook sees it.
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_hook(lambda module, args, output: seen.add((module.weight.dtype, output.dtype)))
    batches = [Rows(hf, seed).batch(kind) for seed, kind in enumerate(FEW)]
    found = engine.forward_backward(dealt(batches, dist.get_rank(), 2))
    loss, expected = truth(hf, batches)
    gradients = whole_gradients(engine)
    apart = [float((gradients[name] - gradient).norm() / gradient.norm()) for name, gradient in expected.items() if gradient.norm() > 1e-3]
    return {
        "loss": abs(found.loss - loss) / loss,
        "gradients": largest(apart),
        "computed": sorted(str(one) for one in seen),
        "held": {str(parameter.dtype) for parameter in engine.parameters.values()},
    }


def copies(hf: Path, folder: Path) -> None:
    """Two copies of two shards; the last micro-batch of all ranks is text alone."""
    kinds = ("image", "text", "video", "both", "text", "text", "text", "text")
    for name, plan in {
        "sharded": {"apply_modules": UNITS},
        "whole": {"apply_modules": UNITS[:1], "ignored_modules": ["model.visual.merger"]},
    }.items():
        compare(hf, folder / name, {"parallel": {"fully_shard_parallel_size": 2, "fsdp_plan": plan}}, kinds)


def not_finite(hf: Path, folder: Path) -> list[bool]:
    """A number that is none on one rank: no rank may step."""
    engine: Fsdp2Engine = engine_of(read(write_run(folder / f"rank_{os.environ['RANK']}", hf)))
    before = {name: local_value(parameter).clone() for name, parameter in engine.parameters.items()}
    batch = Rows(hf, dist.get_rank()).batch("image")
    if dist.get_rank() == 1:
        batch["pixel_values"][0, 0] = float("nan")
    engine.forward_backward([batch])
    skipped = engine.step(1e-2).skipped
    same = all(torch.equal(before[name], local_value(parameter)) for name, parameter in engine.parameters.items())
    good = engine.forward_backward([Rows(hf, dist.get_rank()).batch("image")])
    return [skipped, same, engine.step(1e-2).skipped, good.loss == good.loss]
