"""All-to-all with a gradient, for parts of any sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(
    tensor: Tensor, group: dist.ProcessGroup, split_axis: int, split_sizes: Sequence[int], join_axis: int, join_sizes: Sequence[int]
) -> Tensor:
    """Give every rank of ``group`` its part of ``tensor`` and join the parts that it gives us.

    Args:
        split_sizes: along ``split_axis``, what rank i of the group gets.
        join_sizes: along ``join_axis``, what rank i holds and sends. Where the axes differ, ours is ``tensor.shape[join_axis]``.

    Returns:
        Of our size in ``split_sizes`` along ``split_axis``, and of the sum of ``join_sizes`` along ``join_axis``. The gradient travels back the
        same way. Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """
    result: Tensor = _Exchange.apply(tensor, group, split_axis, tuple(split_sizes), join_axis, tuple(join_sizes))
    return result


def gather(tensor: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """The rows of all ranks of ``group`` in order; gradients of all copies are summed.

    Args:
        sizes: rows of each rank.
    """
    count = len(sizes)
    copies = tensor.expand(count, *tensor.shape).flatten(0, 1)
    return exchange(copies, group, 0, [tensor.shape[0]] * count, 0, sizes)


def gather_alike(tensor: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """As ``gather``, where what follows is the same on all ranks, its gradient too: each takes that of its own rows, and nothing is sent back."""
    result: Tensor = _GatherAlike.apply(tensor, group, tuple(sizes))
    return result


def sum_parts(tensor: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """Our rows of the sum over all ranks of ``tensor``, which holds the rows of all; the reverse of ``gather``."""
    count, own = len(sizes), sizes[dist.get_rank(group)]
    return exchange(tensor, group, 0, sizes, 0, [own] * count).view(count, own, *tensor.shape[1:]).sum(0)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: dist.ProcessGroup,
        split_axis: int,
        split_sizes: tuple[int, ...],
        join_axis: int,
        join_sizes: tuple[int, ...],
    ) -> Tensor:
        ctx.way = group, join_axis, join_sizes, split_axis, split_sizes
        return _move(tensor, group, split_axis, split_sizes, join_axis, join_sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _move(gradient, *ctx.way), None, None, None, None, None


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, sizes: tuple[int, ...]) -> Tensor:
        ctx.own = sum(sizes[: group.rank()]), len(tensor)
        count = len(sizes)
        return _move(tensor.expand(count, *tensor.shape).flatten(0, 1), group, 0, (len(tensor),) * count, 0, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.narrow(0, *ctx.own), None, None


def _move(
    tensor: Tensor, group: dist.ProcessGroup, split_axis: int, split_sizes: tuple[int, ...], join_axis: int, join_sizes: tuple[int, ...]
) -> Tensor:
    sent = [part.reshape(-1) for part in tensor.split(split_sizes, split_axis)]
    shape = list(tensor.shape)
    shape[split_axis] = split_sizes[dist.get_rank(group)]
    shapes = [[*shape[:join_axis], size, *shape[join_axis + 1 :]] for size in join_sizes]
    counts = [prod(one) for one in shapes]
    received = tensor.new_empty(sum(counts))
    dist.all_to_all_single(received, torch.cat(sent), counts, [part.numel() for part in sent], group=group)
    return torch.cat([part.view(one) for part, one in zip(received.split(counts), shapes, strict=True)], join_axis)
