"""What ranks do in the tests of context and expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tangram.align.batch import blank_like, micro_batches
from tangram.align.reference import load_reference, observe
from tangram.backends.engine import CanonicalTensor
from tests.fsdp2.kit import engine_of, read, real_batch, write_run


def against_transformers(hf: Path, folder: Path, cases: Sequence[tuple[str, Mapping[str, Any], int, int]]) -> dict[str, dict[str, float]]:
    """Loss and all gradients in each case, held against transformers' own in one process.

    Args:
        cases: name, changes of the run file, rows of ``real_batch`` that are taken (photographs, text alone, a video last), and rows of a
            micro-batch.

    Returns:
        Per case: relative error of the loss, of the loss of ``evaluate``, of the gradient norm, and of the worst gradient, norm-wise.
    """
    model = load_reference(hf)
    return {name: _case(hf, folder / name, changes, take, rows, model) for name, changes, take, rows in cases}


def _case(hf: Path, folder: Path, changes: Mapping[str, Any], take: int, rows: int, model: torch.nn.Module) -> dict[str, float]:
    engine = engine_of(read(write_run(folder / f"rank_{dist.get_rank() if dist.is_initialized() else 0}", hf, changes)))
    batch = real_batch(hf, take)[1][0]
    expected = observe(model, batch)
    model.zero_grad()
    parts = micro_batches(batch, engine.run.described, rows)
    parts += [blank_like(parts[0])] * (-len(parts) % engine.data_parallel_size)
    mine = parts[engine.data_parallel_rank :: engine.data_parallel_size]
    evaluated, result = engine.evaluate(mine), engine.forward_backward(mine)
    errors = [
        float((tensor.local - part).norm() / whole.norm().clamp(min=1e-6))
        for tensor in engine.canonical_gradients()
        for whole in [_canonical(expected.gradients[tensor.name], tensor)]
        for part in [whole[tuple(slice(a, a + n) for a, n in zip(tensor.start, tensor.local.shape, strict=True))]]
    ]
    norm = float(torch.stack([gradient.double().norm() for gradient in expected.gradients.values()]).norm())
    return {
        "loss": abs(result.loss - expected.loss) / expected.loss,
        "evaluated": abs(evaluated.loss - expected.loss) / expected.loss,
        "tokens": result.tokens - int((batch["labels"][:, 1:] != -100).sum()),
        "gradients": max(errors),
        "norm": abs(engine.step(0.0).grad_norm - norm) / norm,
    }


def _canonical(gradient: torch.Tensor, tensor: CanonicalTensor) -> torch.Tensor:
    """transformers 5 holds experts as ``[experts, out, in]``; no stack of the tiny model has in = out."""
    return gradient.mT if gradient.dim() == 3 and tuple(gradient.shape) != tensor.full_shape else gradient
