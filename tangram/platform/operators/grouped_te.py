"""Linears of many groups of rows at once by TransformerEngine, which takes each group's weight where it lies.

Not run on such a device: none was at hand. Tested with a stand-in for TransformerEngine that computes plainly and records what it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from transformer_engine.pytorch import GroupedLinear

from tangram.platform.operators import plain


def grouped_linear(tokens: Tensor, weights: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """As ``plain.grouped_linear``."""
    if not sum(counts):
        return plain.grouped_linear(tokens, weights, counts)
    module = _module(len(weights), *weights[0].shape, tokens.dtype, tokens.device)
    made: Tensor = torch.func.functional_call(module, {f"weight{i}": weight for i, weight in enumerate(weights)}, (tokens, list(counts)))
    return made


@cache
def _module(groups: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A module without weights of its own."""
    module: nn.Module = GroupedLinear(groups, in_features, out_features, bias=False, params_dtype=dtype, device="meta")
    for i in range(groups):
        # In the place of biases it hands empty tensors to its kernel, which cannot be on another device.
        setattr(module, f"bias{i}", torch.empty(0, dtype=dtype, device=device))
    return module
