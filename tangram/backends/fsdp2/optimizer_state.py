"""torch's optimizers over shards, as checkpoints see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from tangram.backends.fsdp2.placement import local_value
from tangram.checkpoints.dcp_state import ADAM, MASTER, MUON


@dataclass(eq=False)
class ShardState:
    """``ParameterState`` of one sharded parameter.

    Args:
        name: of the parameter.
        parameter: what the optimizer updates: a DTensor, or this rank's shard.
        optimizer: that updates it.
        has_master: the parameter is saved, or loaded, as its own fp32 master.
    """

    name: str
    parameter: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    has_master: bool = False
    chunk: int = 0
    start: int = 0

    @property
    def moments(self) -> tuple[str, ...]:
        """Groups that Muon updates say so."""
        group = next(group for group in self.optimizer.param_groups if any(held is self.parameter for held in group["params"]))
        return MUON if group.get("muon") else ADAM

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments that exist, and the parameter itself where it counts as a master."""
        state = self.optimizer.state.get(self.parameter, {})
        held = {kind: local_value(state[kind]) for kind in self.moments if kind in state}
        return {**held, MASTER: local_value(self.parameter)} if self.has_master else held

    @property
    def step(self) -> int | None:
        state = self.optimizer.state.get(self.parameter)
        return int(state["step"]) if state else None

    def create(self) -> None:
        fresh = {kind: torch.zeros_like(self.parameter, dtype=torch.float32).detach() for kind in self.moments}
        self.optimizer.state[self.parameter] = {"step": self._count(0), **fresh}

    def set_step(self, step: int) -> None:
        self.optimizer.state[self.parameter]["step"] = self._count(step)

    def _count(self, step: int) -> torch.Tensor:
        """Fused updates on a device count there."""
        fused = self.optimizer.defaults.get("fused") or any(group.get("fused") for group in self.optimizer.param_groups)
        return torch.tensor(float(step), dtype=torch.float32, device=self.parameter.device if fused else None)

    def forget(self) -> None:
        self.optimizer.state.pop(self.parameter, None)

    def renew_master(self) -> None:
        """The parameter, filled from what ``model.`` entries hold, is the master."""


class ShardOptimizerState:
    """``OptimizerState`` of an optimizer over shards.

    Args:
        parameters: trained ones, of which this rank holds something.
        masters: names of those that checkpoints store in a smaller type, and so their fp32 values besides.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], masters: Collection[str] = ()) -> None:
        self._optimizer, self._parameters, self._masters = optimizer, parameters, masters

    def parameters(self, *, loading: bool = False) -> Sequence[ShardState]:
        """Loading takes every fp32 master that a checkpoint has: the sharded parameters are fp32."""
        return [
            ShardState(name, parameter, self._optimizer, has_master=loading or name in self._masters) for name, parameter in self._parameters.items()
        ]

    def synchronize(self) -> None:
        """Updates are never late here."""

    def scaler_state(self) -> dict[str, float]:
        return {}

    def load_scaler_state(self, state: Mapping[str, float]) -> None:
        """There is no loss scaler."""
