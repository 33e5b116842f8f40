"""What ranks do in the tests of how a model comes to be."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch

from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.platform import current
from tests.fsdp2.kit import UNITS, read, write_run
from tests.fsdp2.media import Rows

MIB = 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(hf: Path, folder: Path) -> dict[str, Any]:
    """Build and write weights: how far memory grew at most, and the size of the whole model, MiB; and where this rank's dropout begins."""
    plan = {"parallel": {"fsdp_plan": {"apply_modules": UNITS}}, "training": {"random_init": True}}
    run = read(write_run(folder / f"rank_{os.environ['RANK']}", hf, plan))
    gc.collect()
    before = _resident()
    engine = Fsdp2Engine(run)
    built, seed = current().peak_memory() - before, torch.initial_seed() - run.training.seed
    for shard in engine.chunks[0][2].values():
        shard.fill_(0.01)
    filled = current().peak_memory() - before
    whole = sum(parameter.numel() for parameter in engine.parameters.values()) * 4
    return {"whole": whole / MIB, "built": built / MIB, "filled": filled / MIB, "summary": engine.summary(6), "seed": seed}


def buffers(hf: Path, folder: Path) -> None:
    """Buffers, which no file holds, are those of transformers although parameters were built without memory; and so is the loss."""
    from transformers import AutoModelForImageTextToText

    expected = dict(AutoModelForImageTextToText.from_pretrained(hf).named_buffers())
    assert any(name.endswith("inv_freq") for name in expected)
    losses = []
    for meta in (True, False):
        engine = Fsdp2Engine(read(write_run(folder / f"{meta}_{os.environ['RANK']}", hf, {"training": {"init_model_with_meta_device": meta}})))
        found = dict(engine.module.named_buffers())
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())
        engine.random_weights(1)
        losses.append(engine.evaluate([Rows(hf, 5).batch("both")]).loss)
    assert losses[0] == losses[1]
