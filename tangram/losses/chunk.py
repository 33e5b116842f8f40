"""Cross-entropy of a language model's head, a chunk of tokens at a time: neither logits nor their gradients of all tokens ever exist.

Gradients are computed in the forward pass, while a chunk's logits are there, so that the backward pass needs neither the weight nor a second
matrix product. Sources: Wijmans et al. 2024 (Cut Your Losses) and Liger-Kernel's fused linear cross-entropy, for the idea; what a sum over chunks
adds up is added up in fp32 here, and each token has a weight of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tangram.errors import ConfigError


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weights: Tensor,
    chunk_size: int,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``sum_t token_weights[t] * cross_entropy(weight @ hidden[t] + bias, targets[t])``, a scalar in fp32 (fp64 for fp64 inputs).

    Logits have the type of ``hidden``; softmax, loss and the gradient of the weight are summed in fp32. It holds ``chunk_size`` rows of logits and,
    from forward to backward, the gradients. Where gradients are off none are computed. Without tokens it is 0, and gradients are zeros.

    Args:
        hidden: [n, h], of the supervised tokens alone.
        weight: [padded_vocab / TP, h], this rank's consecutive part of the vocabulary, of the same type.
        targets: [n], global ids below ``vocab_size``.
        token_weights: [n], fp32, without gradient.
        chunk_size: tokens at a time.
        bias: [padded_vocab / TP].
        vocab_size: entries past it are padding, get no probability and a zero gradient; None: all rows of ``weight`` on all ranks.
        tp_group: ranks that share the vocabulary; None: one rank holds it whole. Each gets the part of the gradient of ``hidden`` that comes from
            its own part of the vocabulary: who calls must add them up, as Megatron's column-parallel layers do.

    Raises:
        ConfigError: sizes or types that do not fit, a target outside the vocabulary, or a weight of which this rank holds a shard only.
    """
    split = _Split.of(weight, chunk_size, vocab_size, tp_group)
    _check(hidden, weight, targets, token_weights, bias, split)
    return _ChunkedLoss.apply(hidden, weight, bias, targets, token_weights, split, torch.is_grad_enabled())


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, bias: Tensor | None, split: _Split) -> None:
    if isinstance(weight, DTensor) or isinstance(bias, DTensor):
        raise ConfigError("the head's weight is a shard outside of the head's forward; call the head module, so that FSDP gathers it")
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ConfigError(f"hidden states {list(hidden.shape)} do not fit the head's weight {list(weight.shape)}; both are [*, hidden_size]")
    if targets.shape != hidden.shape[:1] or token_weights.shape != hidden.shape[:1]:
        raise ConfigError(
            f"{hidden.shape[0]} hidden states, targets {list(targets.shape)} and weights {list(token_weights.shape)} differ in length; "
            "give one target and one weight for each"
        )
    if hidden.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise ConfigError(f"hidden states are {hidden.dtype}, the head is {weight.dtype}; cast one to the other's type")
    if split.chunk_size < 1:
        raise ConfigError(f"chunk size {split.chunk_size} is not positive; give the number of tokens at a time")
    if targets.numel():
        # Of ranks that share a vocabulary none would hold such a target, and its loss would be finite and wrong.
        low, high = (int(bound) for bound in targets.aminmax())
        if low < 0 or high >= split.vocab_size:
            raise ConfigError(f"targets reach from {low} to {high}, the vocabulary has {split.vocab_size} entries; leave ignored positions out")


def chunked_token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_size: int,
    *,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Cross-entropy of each token, [n], as ``vocab_parallel_token_losses`` of the whole logits, for loss functions that want them one by one.

    The gradients of their sum are computed with them, which serves every loss function that weighs all tokens alike. Where the backward
    pass finds other weights it computes them once more, which costs another forward pass of the head.

    Args and Raises: as ``chunked_loss``.
    """
    split = _Split.of(weight, chunk_size, vocab_size, tp_group)
    ones = torch.ones_like(targets, dtype=torch.promote_types(hidden.dtype, torch.float32))
    _check(hidden, weight, targets, ones, None, split)
    return _TokenLosses.apply(hidden, weight, targets, ones, split, torch.is_grad_enabled())


class _Split(NamedTuple):
    """How tokens and vocabulary are cut; ``first`` is the id of the weight's first row."""

    chunk_size: int
    first: int
    vocab_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, weight: Tensor, chunk_size: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> _Split:
        """Of a head's weight; see ``chunked_loss``."""
        size, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        return cls(chunk_size, rank * weight.shape[0], weight.shape[0] * size if vocab_size is None else vocab_size, group)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, token_weights: Tensor, split: _Split, learning: bool
    ) -> Tensor:
        needed = [learning and wanted for wanted in ctx.needs_input_grad[:3]]
        losses, ctx.gradients = _run(hidden, weight, bias, targets, token_weights, split, needed)
        return (losses * token_weights).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_take(ctx).finished(grad), *[None] * 4)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ones: Tensor, split: _Split, learning: bool) -> Tensor:
        ctx.needed = [*(learning and wanted for wanted in ctx.needs_input_grad[:2]), False]
        losses, ctx.gradients = _run(hidden, weight, None, targets, ones, split, ctx.needed)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.split = split
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        gradients, factor = _take(ctx), grad[:1].sum()
        if not torch.equal(grad, factor.expand_as(grad)):
            del gradients
            _, gradients = _run(hidden, weight, None, targets, grad, ctx.split, ctx.needed)
            factor = torch.ones_like(factor)
        return (*gradients.finished(factor), None, None, None)


def _take(ctx: Any) -> _Gradients:
    if ctx.gradients is None:
        raise RuntimeError("the gradients of this chunked loss were handed out already; run the forward pass again")
    gradients, ctx.gradients = ctx.gradients, None
    return gradients


def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, token_weights: Tensor, split: _Split, needed: list[bool]
) -> tuple[Tensor, _Gradients]:
    """The loss of each token, and the gradients of the weighted sum as far as they are ``needed`` (of hidden, weight, bias)."""
    sums = torch.promote_types(hidden.dtype, torch.float32)
    count, real = hidden.shape[0], min(max(split.vocab_size - split.first, 0), weight.shape[0])
    token_weights, unit = _split_off_unit(token_weights.to(sums))
    held = weight[:real]
    gradients = _Gradients(hidden, weight, held, needed, sums, unit)
    logits = hidden.new_empty(min(split.chunk_size, count), real)
    # For fp32 logits one buffer is both.
    scores = logits if logits.dtype == sums else torch.empty_like(logits, dtype=sums)
    losses = torch.empty(count, dtype=sums, device=hidden.device)
    for start in range(0, count, split.chunk_size):
        part = slice(start, min(start + split.chunk_size, count))
        rows = part.stop - part.start
        _project(hidden[part], held, None if bias is None else bias[:real], out=logits[:rows])
        if scores is not logits:
            scores[:rows].copy_(logits[:rows])
        losses[part], totals, places, inside = _exponentials(scores[:rows], targets[part], split.first, split.group)
        if any(needed):
            # What is left in the buffer, times weight / total, is the gradient of the logits. That factor goes to the narrow side of the products
            # below, which saves passes over the buffer; in 16 bits only the weight does, for exponentials and totals may lie far apart.
            if real:
                scores[:rows].scatter_add_(1, places[:, None], -(totals * inside)[:, None])
            factor = token_weights[part]
            if scores is logits:
                factor = factor / totals
            else:
                logits[:rows].copy_(scores[:rows].div_(totals[:, None]))
            gradients.add(part, logits[:rows], scores[:rows], factor)
    return losses, gradients


class _Gradients:
    """Of the hidden states, and of the head summed over chunks.

    Args:
        held: rows of the weight that are no padding.
        needed: which of hidden, weight and bias have a gradient.
        sums: type of what is summed.
        unit: what the factors of ``add`` were divided by.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, held: Tensor, needed: list[bool], sums: torch.dtype, unit: Tensor) -> None:
        self._states, self._held, self._unit = hidden, held, unit
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=sums) if needed[1] else None
        self.bias = torch.zeros_like(weight[:, 0], dtype=sums) if needed[2] else None

    def add(self, part: slice, left: Tensor, left_sums: Tensor, factor: Tensor) -> None:
        """A chunk, of which the gradient of the logits is ``factor[:, None] * left``; ``left_sums`` is ``left`` before it was rounded."""
        real, states = self._held.shape[0], self._states[part]
        if self.hidden is not None:
            torch.mm(left, self._held, out=self.hidden[part]).mul_(factor[:, None])
        if self.bias is not None:
            self.bias[:real].addmv_(left_sums.t(), factor)
        if self.weight is None:
            return
        total, right = self.weight[:real], states * factor[:, None]
        if left.dtype != total.dtype and left.is_cuda:
            torch.addmm(total, left.t(), right.to(left.dtype), out_dtype=total.dtype, out=total)
        else:
            total.addmm_(left_sums.t(), right)

    def finished(self, factor: Tensor) -> tuple[Tensor | None, ...]:
        """All of them times ``factor``, in the inputs' type."""
        factor, dtype = factor * self._unit, self._states.dtype
        return tuple(None if found is None else found.to(factor.dtype).mul_(factor).to(dtype) for found in (self.hidden, self.weight, self.bias))


def _split_off_unit(token_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of about 1, and the power of two that they were divided by: it comes back in the backward pass, exactly.

    Weights are about 1 / tokens of the global batch; gradients in fp16 would be lost before a loss scale reaches them.
    """
    if not token_weights.numel():
        return token_weights, token_weights.new_ones(())
    exponent = token_weights.abs().amax().frexp().exponent
    unit = torch.ldexp(token_weights.new_ones(()), exponent)
    return token_weights / unit, unit


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def _exponentials(scores: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn logits [c, v] in place into exponentials of their distance from the row's largest.

    Returns:
        [c] each: loss, sum of the exponentials over the whole vocabulary, place of the target (0 where another rank has it) and whether it is here.
        Source of the reductions: Megatron's vocab-parallel cross-entropy (Shoeybi et al. 2019).
    """
    width = scores.shape[1]
    largest = scores.amax(dim=-1) if width else scores.new_full(scores.shape[:1], -torch.inf)
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scores.sub_(largest[:, None])
    inside = (targets >= first) & (targets < first + width)
    places = torch.where(inside, targets - first, 0)
    picked = torch.where(inside, scores.gather(1, places[:, None])[:, 0], 0.0) if width else torch.zeros_like(largest)
    both = torch.stack([picked, scores.exp_().sum(dim=-1)])
    if group is not None and group.size() > 1:
        dist.all_reduce(both, group=group)
    return both[1].log() - both[0], both[1], places, inside
