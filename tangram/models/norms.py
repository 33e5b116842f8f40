"""Norms for megatron-core's layer specs, in plain torch and fit for sequence parallelism.

megatron-core's own wrapper refuses sequence parallelism without TransformerEngine; all that it needs is a mark on the parameters,
whose gradients are then summed over tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from tangram.platform.operators import rms_norm


def _mark(module: nn.Module, config: TransformerConfig) -> None:
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=parameter_device(config))
        _mark(self, config)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=parameter_device(config))
        _mark(self, config)


def parameter_device(config: TransformerConfig) -> torch.device:
    """Where parameters are made: the CPU, or this rank's accelerator."""
    return torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


NORMS: dict[str, type[nn.Module]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
