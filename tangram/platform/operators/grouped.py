"""Linears of many groups of rows at once by torch's own kernel, ``torch.nn.functional.grouped_mm``.

It is there for fp32, bf16 and fp16 on the cpu, where it is a loop itself, and on cuda. It takes the weights as one stack: they are stacked in the
forward and again in the backward pass, so that no second copy of them waits in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tangram.platform.operators import plain

ROW_BYTES = 16
"""What the length of the kernel's rows is a multiple of."""


def fits(*widths: int, itemsize: int) -> bool:
    """Whether the kernel takes linears between such widths.

    Args:
        itemsize: bytes of one number.
    """
    return all(width * itemsize % ROW_BYTES == 0 for width in widths)


def grouped_linear(tokens: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """As ``plain.grouped_linear``, which computes what the kernel does not take."""
    if not sum(counts) or not fits(*weights[0].shape, itemsize=tokens.element_size()):
        return plain.grouped_linear(tokens, weights, counts)
    ends = torch.tensor(counts, device=tokens.device).cumsum(0, dtype=torch.int32)
    made: Tensor = _GroupedLinear.apply(tokens, ends, *weights)
    return made


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        return functional.grouped_mm(tokens, torch.stack(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        of_tokens, _, *of_weights = ctx.needs_input_grad
        gradient = gradients[0].contiguous()  # of a sum it has strides of 0, which the kernel refuses
        first = functional.grouped_mm(gradient, torch.stack(weights), offs=ends) if of_tokens else None
        second = functional.grouped_mm(gradient.mT, tokens, offs=ends).unbind() if any(of_weights) else [None] * len(weights)
        return first, None, *second
