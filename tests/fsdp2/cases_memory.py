"""What ranks do in the tests of memory features."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.fsdp2.kit import engine_of, read, real_batch, write_run
from tests.fsdp2.memory_kit import counted_calls


def against_none(hf: Path, folder: Path, variants: Mapping[str, Mapping[str, Any]], base: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each variant of a run: whether losses and gradients are those of ``base`` to the last bit, and how often a text layer ran in a
    training step of two micro-batches and in a validation of one."""
    parts = real_batch(hf)[1][:2]  # the same on every rank: those without pictures would miss the tower's collectives
    found: dict[str, dict[str, Any]] = {}
    expected: dict[str, Any] = {}
    for name, changes in {"none": base, **variants}.items():
        engine = engine_of(read(write_run(folder / f"{name}_{os.environ['RANK']}", hf, changes)))
        with counted_calls(engine.module, "layers.1") as calls:
            loss = engine.forward_backward(parts).loss
        gradients = {tensor.name: tensor.local.clone() for tensor in engine.canonical_gradients()}
        engine.optimizer.zero_grad()
        with counted_calls(engine.module, "layers.1.mlp") as once:
            validation = engine.evaluate(parts[:1]).loss
        seen = {"loss": torch.tensor(loss), "validation": torch.tensor(validation), **gradients}
        expected = expected or seen
        found[name] = {
            "different": [key for key in expected if not torch.equal(seen[key], expected[key])],
            "names": sorted(gradients),
            "layer": sum(calls.values()) / len(parts),
            "validation": sum(once.values()),
        }
    return found
