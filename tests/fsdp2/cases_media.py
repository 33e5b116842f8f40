"""What ranks do in the tests of micro-batches with different media."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tangram.backends.fsdp2.engine import Fsdp2Engine
from tests.fsdp2.kit import engine_of, read, write_run
from tests.fsdp2.media import Rows, dealt
from tests.fsdp2.truth import check_step, truth

PAIRS = ("text", "both", "image", "video", "images", "text")
"""Rows of micro-batches, dealt out to two ranks one by one."""


def compare(
    hf: Path,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    kinds: tuple[str, ...] = PAIRS,
    frozen: str | None = None,
) -> Fsdp2Engine:
    """A step and an evaluation of the engine against one process of transformers."""
    batches = [Rows(hf, seed).batch(kind) for seed, kind in enumerate(kinds)]
    engine = engine_of(read(write_run(folder / f"rank_{os.environ['RANK']}", hf, changes)))
    mine = dealt(batches, engine.data_parallel_rank, engine.data_parallel_size)
    what = f"{hf.parent.name} {changes} {kinds}"
    # What an evaluation leaves gathered must not harm the step that follows.
    evaluated = engine.evaluate(mine).loss
    norm = check_step(engine, mine, lambda: truth(hf, batches, frozen=frozen), what)
    found = engine.step(1e-9).grad_norm
    if dist.get_rank() == 0:
        assert abs(found - norm) < 1e-5 * norm, f"{what}: norm {found}, expected {norm}"
        loss = truth(hf, batches, frozen=frozen)[0]
        assert abs(evaluated - loss) < 2e-6 * loss, f"{what}: {evaluated} in an evaluation, expected {loss}"
    return engine


def families(folders: list[Path], folder: Path) -> None:
    """Every family with a plan of units that reaches into the tower."""
    for hf in folders:
        compare(hf, folder / hf.parent.name, {"parallel": {"fsdp_plan": {"apply_modules": _units(hf)}}})


def _units(hf: Path) -> list[str]:
    deepstack = ["model.visual.deepstack_merger_list.{*}"] if "qwen3" in (hf / "config.json").read_text() else []
    tower = ["model.visual.blocks.{*}", "model.visual.merger", *deepstack, "model.visual"]
    return [*tower, "model.language_model.embed_tokens", "model.language_model.layers.{*}", "model.language_model", "lm_head"]


def towers(hf: Path, folder: Path) -> None:
    """A tower that is frozen, recomputed, part of the root, or whole on every rank."""
    compare(hf, folder / "frozen", {"model": {"freeze": ["model.visual"]}}, frozen="model.visual")
    compare(hf, folder / "root", {"parallel": {"fsdp_plan": {"apply_modules": []}}})
    recomputed = ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]
    compare(hf, folder / "recomputed", {"features": {"recompute": True, "recompute_plan": {"apply_modules": recomputed}}})
    compare(hf, folder / "text", kinds=("text",) * 2)
    plan = {"apply_modules": ["model.language_model.layers.{*}"], "ignored_modules": ["model.visual"]}
    compare(hf, folder / "ignored", {"parallel": {"fsdp_plan": plan}})
