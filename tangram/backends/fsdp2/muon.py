"""Muon for the matrices of hidden layers, AdamW for all else (Jordan et al. 2024; scaled to AdamW's step size as Liu et al. 2025 do)."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tangram.backends.fsdp2.placement import local_start

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALL = 1e-7


def is_matrix_of_a_hidden_layer(model: nn.Module) -> set[str]:
    """Names of the parameters that Muon updates: matrices that are no embedding, no position table and no output head.

    Of those a token moves its own row alone, so their rows, not their singular directions, are what is learnt.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left_out = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters(recurse=False)}
    left_out |= {id(p) for p in (head.parameters(recurse=False) if head is not None else ())}
    return {name for name, p in model.named_parameters() if p.dim() == 2 and id(p) not in left_out}


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """About ``U V^T`` of the singular value decomposition ``U S V^T``, by ``steps`` quintic Newton-Schulz iterations in bf16."""
    a, b, c = COEFFICIENTS
    wide = matrix.bfloat16()
    wide = wide.T if matrix.shape[0] > matrix.shape[1] else wide
    wide = wide / wide.norm().clamp(min=SMALL)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class MuonAdamW(torch.optim.Optimizer):
    """Groups with ``muon`` true are updated by Muon, the others by torch's AdamW.

    Momentum is sharded like the parameter. An update is gathered, orthogonalised whole on every rank that has a part of it, and each keeps
    its rows; so the result does not depend on the number of ranks.

    Args:
        groups: with ``params`` (this rank's shards), ``lr``, ``weight_decay`` and ``muon``.
        layouts: shard -> the model's parameter.
        momentum: Nesterov momentum.
        rms: an update of a matrix has about this root mean square, times the learning rate: that of AdamW.
        adam: options of AdamW.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        layouts: Mapping[nn.Parameter, nn.Parameter],
        momentum: float,
        rms: float,
        ns_steps: int,
        adam: Mapping[str, Any],
    ) -> None:
        super().__init__(groups, {})
        self._layouts, self._momentum, self._rms, self._ns_steps = layouts, momentum, rms, ns_steps
        others = [group for group in self.param_groups if not group["muon"]]
        self._adam = torch.optim.AdamW(others, **adam) if others else None
        if self._adam is not None:
            # One state for both, so that checkpoints see one optimizer.
            self._adam.state = self.state
            for mine, theirs in zip(others, self._adam.param_groups, strict=True):
                mine.update(theirs)
            self._adam.param_groups = others

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            if group["muon"]:
                for shard in group["params"]:
                    if shard.grad is not None:
                        self._update(shard, group)
        if self._adam is not None:
            self._adam.step()

    def _update(self, shard: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[shard]
        if not state:
            state["step"], state["momentum"] = torch.tensor(0.0), torch.zeros_like(shard)
        state["step"] += 1
        assert shard.grad is not None
        momentum = state["momentum"].lerp_(shard.grad, 1 - self._momentum)
        update = shard.grad.lerp(momentum, self._momentum)
        parameter = self._layouts[shard]
        scale = self._rms * sqrt(max(parameter.shape))
        shard.mul_(1 - group["lr"] * group["weight_decay"])
        shard.sub_(self._own_rows(update, parameter, shard), alpha=group["lr"] * scale)

    def _own_rows(self, update: Tensor, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return orthogonalised(update, self._ns_steps).to(update.dtype)
        spread = DTensor.from_local(
            update, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        whole = orthogonalised(spread.full_tensor(), self._ns_steps).to(update.dtype)
        return whole[tuple(slice(start, start + size) for start, size in zip(local_start(parameter), shard.shape, strict=True))]
