"""One process of transformers, in a loop written by hand: what any number of ranks of the engine must equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tangram.align.reference import forward_arguments, load_reference
from tangram.backends.fsdp2.engine import Fsdp2Engine

Gradients = dict[str, torch.Tensor]


def truth(
    hf: Path, batches: Sequence[dict[str, Any]], loss_type: str = "per_token_loss", frozen: str | None = None, attention: str = "sdpa", aux: float = 0.0
) -> tuple[float, Gradients]:
    """Loss and gradients of a global batch of micro-batches without packing.

    Args:
        frozen: beginning of the names of what is not trained.
        aux: coefficient of the auxiliary loss of routers.
    """
    model = load_reference(hf, attention=attention)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or not name.startswith(frozen))
    total, count, extra = torch.zeros((), dtype=torch.float64), 0, torch.zeros(())
    for batch in batches:
        arguments = forward_arguments(model, batch)
        if loss_type == "raw":
            if bool((batch["labels"][:, 1:] != -100).any()):
                total, count = total + model(**arguments, labels=batch["labels"]).loss, count + 1
            continue
        output = model(**arguments, **({"output_router_logits": True} if aux else {}))
        if aux:
            extra = extra + output.aux_loss
        numerator, denominator = _terms(output.logits, batch["labels"], loss_type)
        total, count = total + numerator, count + denominator
    loss = total / max(count, 1) + aux * extra / len(batches)
    if loss.requires_grad:
        loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _terms(logits: torch.Tensor, labels: torch.Tensor, loss_type: str) -> tuple[Any, int]:
    rows = [torch.nn.functional.cross_entropy(a[:-1][b[1:] != -100], b[1:][b[1:] != -100], reduction="none") for a, b in zip(logits, labels, strict=True)]
    rows = [row.double() for row in rows if len(row)]
    if not rows:
        return 0.0, 0
    if loss_type == "per_sample_loss":
        return sum(row.mean() for row in rows), len(rows)
    tokens = torch.cat(rows)
    return (tokens.mean(), 1) if loss_type == "default" else (tokens.sum(), len(tokens))


def whole_gradients(engine: Fsdp2Engine) -> Gradients:
    """The gradients of the whole model, put together from all ranks; the same on each."""
    mine = [(tensor.name, tensor.start, tensor.full_shape, tensor.local.cpu()) for tensor in engine.canonical_gradients()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    whole: Gradients = {}
    for parts in every:
        for name, start, shape, local in parts:
            target = whole.setdefault(name, torch.full(shape, float("nan")))
            target[tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True))] = local
    return whole


def check_gradients(found: Gradients, expected: Gradients, tolerance: float = 2e-5, what: str = "") -> None:
    """Every trained parameter has the expected gradient, norm-wise; zeros where transformers has none."""
    assert set(expected) <= set(found), f"{what}: no gradient of {sorted(set(expected) - set(found))[:3]}"
    scale = max(float(gradient.norm()) for gradient in expected.values()) if expected else 0.0
    for name, gradient in found.items():
        wanted = expected.get(name, torch.zeros_like(gradient))
        # A gradient that is zero but for rounding, as that of a key's bias, has no digits of its own.
        bound = tolerance * max(float(wanted.norm()), 1e-4 * scale)
        assert float((gradient - wanted).norm()) <= bound, f"{what}: {name} differs by {float((gradient - wanted).norm()):.3g} of {float(wanted.norm()):.3g}"
