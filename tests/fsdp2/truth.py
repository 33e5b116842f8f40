"""One process of transformers, in a loop written by hand: what any number of ranks of the engine must equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tangram.align.reference import forward_arguments, load_reference
from tangram.backends.fsdp2.engine import Fsdp2Engine

Gradients = dict[str, torch.Tensor]


@cache
def _reference(hf: Path, attention: str) -> torch.nn.Module:
    return load_reference(hf, attention=attention)


def truth(
    hf: Path,
    batches: Sequence[dict[str, Any]],
    loss_type: str = "per_token_loss",
    frozen: str | None = None,
    attention: str = "sdpa",
    aux: float = 0.0,
) -> tuple[float, Gradients]:
    """Loss and gradients of a global batch of micro-batches without packing.

    Args:
        frozen: beginning of the names of what is not trained.
        aux: coefficient of the auxiliary loss of routers.
    """
    model = _reference(hf, attention)
    model.zero_grad(set_to_none=True)
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
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(loss.detach()), {name: _canonical(name, gradient, hf) for name, gradient in gradients.items()}


def _canonical(name: str, gradient: torch.Tensor, hf: Path) -> torch.Tensor:
    """Stacked experts lie in files, and in canonical tensors, as ``[experts, in, out]``; in transformers 5 the other way round."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return gradient
    width = json.loads((hf / "config.json").read_text())["text_config"]["hidden_size"]
    inward = gradient.shape[1 if "gate_up" in name else 2] == width
    return gradient if inward else gradient.transpose(1, 2)


def check_step(engine: Fsdp2Engine, batches: Sequence[dict[str, Any]], expected: Callable[[], tuple[float, Gradients]], what: str) -> float:
    """Run a global batch, forward and backward, and compare on the first rank.

    Args:
        batches: this rank's.
        expected: as ``truth``.

    Returns:
        The norm of all gradients, on the first rank.
    """
    found = engine.forward_backward(batches)
    gradients = whole_gradients(engine)
    if dist.get_rank() != 0:
        return 0.0
    loss, wanted = expected()
    assert abs(found.loss - loss) <= 2e-6 * loss, f"{what}: loss {found.loss}, expected {loss}"
    check_gradients(gradients, wanted, what=what)
    return float(torch.stack([gradient.double().norm() for gradient in wanted.values()]).norm()) if wanted else 0.0


def _terms(logits: torch.Tensor, labels: torch.Tensor, loss_type: str) -> tuple[Any, int]:
    rows = []
    for scores, targets in zip(logits[:, :-1], labels[:, 1:], strict=True):
        learnt = targets != -100
        if bool(learnt.any()):
            rows.append(torch.nn.functional.cross_entropy(scores[learnt], targets[learnt], reduction="none").double())
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
        apart = float((gradient - wanted).norm())
        assert apart <= bound, f"{what}: {name} differs by {apart:.3g} of {float(wanted.norm()):.3g}"
