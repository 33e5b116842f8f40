"""Gradients between the last backward pass and the optimizer: summed over copies, divided by the count, whole when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import nn


def make_finalizer(
    models: Sequence[DistributedDataParallel],
    first: nn.Parameter | None,
    last: nn.Parameter | None,
    copied: Sequence[nn.Parameter] = (),
    copies: dist.ProcessGroup | None = None,
) -> Callable[..., None]:
    """``finalize_model_grads_func`` for the schedules.

    megatron-core takes a rank's first chunk for the one with the word embedding; here it may be a later one, so that one is put first. Two
    copies on one rank have no group to be summed over and are summed here.

    Args:
        copied: parameters that the ranks of ``copies`` hold alike, each with the gradients of its own pictures.
    """
    ordered = sorted(models, key=lambda model: first is None or all(p is not first for p in model.parameters()))

    def finalize(model: object, num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
        finalize_model_grads(ordered, num_tokens, **kwargs)
        # In place: with the distributed optimizer all copies hold the same part of a sum over data-parallel ranks.
        for work in [dist.all_reduce(parameter.main_grad, group=copies, async_op=True) for parameter in copied]:  # type: ignore[attr-defined]
            work.wait()
        if first is not None and last is not None and first.requires_grad:
            first.main_grad += last.main_grad  # type: ignore[attr-defined]
            last.main_grad.copy_(first.main_grad)  # type: ignore[attr-defined]

    return finalize


def gather_gradients(models: Sequence[DistributedDataParallel]) -> None:
    """Make ``main_grad`` whole on every rank where the distributed optimizer left only this rank's part of each bucket. Collective."""
    for model in models:
        for group in [*model.bucket_groups, *model.expert_parallel_bucket_groups]:
            if not model.ddp_config.use_distributed_optimizer:
                continue
            members = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                part = bucket.grad_data.chunk(members.size())[members.rank()]
                dist.all_gather_into_tensor(bucket.grad_data, part.clone(), group=members)


def norms_of(groups: Sequence[Mapping[str, Any]]) -> tuple[float, float | None]:
    """2-norms of the gradients of an optimizer's parameters on this rank: of all, and of those that tensor-parallel ranks have copies of.

    Experts are left out of the second: the ranks that have copies of them are others.
    """
    gradients, copied = [], []
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                copied.append(not getattr(parameter, "tensor_model_parallel", False) and not group.get("is_expert_parallel", False))
    if not gradients:
        return 0.0, None
    squares = torch.stack(torch._foreach_norm(gradients)).float().square()
    chosen = torch.tensor(copied, device=squares.device)
    own, shared = torch.stack([squares.sum(), (squares * chosen).sum()]).sqrt().tolist()
    return own, shared if any(copied) else None


def clip(parameters: Sequence[torch.Tensor], norm: float, largest: float) -> None:
    """Scale gradients so that their global ``norm`` is at most ``largest``; 0 leaves them (Megatron's rule, with its 1e-6)."""
    coefficient = largest / (norm + 1e-6)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if largest > 0 and coefficient < 1 and gradients:
        torch._foreach_mul_(gradients, coefficient)
