"""Cross-entropy over logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _TokenLosses(torch.autograd.Function):
    """The three reductions of Megatron's vocab-parallel cross-entropy (Shoeybi et al. 2019), with padding entries left out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> Tensor:
        size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        width = logits.shape[-1]
        first = rank * width
        # A copy, since it is turned into the softmax in place.
        scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
        if first + width > vocab_size:
            scores[:, max(vocab_size - first, 0) :] = -torch.inf
        largest = scores.amax(dim=-1) if width else scores.new_full(scores.shape[:1], -torch.inf)
        if size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scores -= largest[:, None]
        inside = (targets >= first) & (targets < first + width)
        places = torch.where(inside, targets - first, 0)
        picked = torch.where(inside, scores.gather(1, places[:, None])[:, 0], 0.0)
        scores.exp_()
        sums = torch.stack([picked, scores.sum(dim=-1)])
        if size > 1:
            dist.all_reduce(sums, group=group)
        scores /= sums[1][:, None]
        ctx.save_for_backward(scores, inside, places)
        ctx.dtype = logits.dtype
        return sums[1].log() - sums[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, inside, places = ctx.saved_tensors
        gradient = softmax * grad[:, None]
        gradient.scatter_add_(1, places[:, None], -(grad * inside)[:, None])
        return gradient.to(ctx.dtype), None, None, None


def vocab_parallel_token_losses(logits: Tensor, targets: Tensor, vocab_size: int, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Cross-entropy of each token, fp32 [n].

    Args:
        logits: [n, padded_vocab / TP], this rank's consecutive part of the vocabulary.
        targets: [n], global ids below ``vocab_size``.
        vocab_size: entries past it are padding and get no probability.
        tp_group: ranks that share the vocabulary; None: one rank holds it whole.
    """
    return _TokenLosses.apply(logits, targets, vocab_size, tp_group)
