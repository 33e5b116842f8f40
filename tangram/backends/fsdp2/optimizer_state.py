"""torch's optimizers over shards, as checkpoints see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tangram.backends.fsdp2.placement import local_value

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class ShardState:
    """``ParameterState`` of one sharded parameter.

    Args:
        name: of the parameter.
        parameter: the model's, a DTensor.
        optimizer: that updates it.
    """

    name: str
    parameter: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    chunk: int = 0
    start: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments that exist."""
        state = self.optimizer.state.get(self.parameter, {})
        return {kind: local_value(state[kind]) for kind in MOMENTS if kind in state}

    @property
    def step(self) -> int | None:
        state = self.optimizer.state.get(self.parameter)
        return int(state["step"]) if state else None

    def create(self) -> None:
        fresh = {kind: torch.zeros_like(self.parameter, dtype=torch.float32).detach() for kind in MOMENTS}
        self.optimizer.state[self.parameter] = {"step": torch.tensor(0.0), **fresh}

    def set_step(self, step: int) -> None:
        self.optimizer.state[self.parameter]["step"] = torch.tensor(float(step), dtype=torch.float32)

    def forget(self) -> None:
        self.optimizer.state.pop(self.parameter, None)

    def renew_master(self) -> None:
        """The sharded parameter is the fp32 one."""


class ShardOptimizerState:
    """``OptimizerState`` of an optimizer over shards.

    Args:
        parameters: trained ones, of which this rank holds something.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters

    def parameters(self) -> Sequence[ShardState]:
        return [ShardState(name, parameter, self._optimizer) for name, parameter in self._parameters.items()]

    def synchronize(self) -> None:
        """Updates are never late here."""

    def scaler_state(self) -> dict[str, float]:
        return {}

    def load_scaler_state(self, state: Mapping[str, float]) -> None:
        """There is no loss scaler."""
