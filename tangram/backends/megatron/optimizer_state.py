"""megatron-core's optimizers as checkpoints see them: whose state lives where.

Read from megatron-core 0.16.1, ``megatron/core/optimizer``: ``FP32Optimizer`` updates the parameters themselves;
``Float16OptimizerWithFloat16Params`` updates an fp32 master of each; ``DistributedOptimizer`` updates flat stretches of them
(``_get_model_param_range_map``), views of the parameter where that is fp32, masters of their own where it is not; ``ChainedOptimizer``
holds several of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class MegatronParameterState:
    """``ParameterState`` of one local parameter, or of the flat stretch that this data-parallel rank updates.

    Args:
        chunk: index into the rank's model chunks.
        name: local parameter name.
        start: first element of the flattened parameter that is held.
        parameter: the model's parameter.
        updated: what the inner optimizer updates: the parameter, a flat view of it, or a master.
        inner: the torch (or fused) Adam.
    """

    chunk: int
    name: str
    start: int
    parameter: Parameter
    updated: torch.Tensor
    inner: Any

    @property
    def _has_master(self) -> bool:
        return self.updated.dtype != self.parameter.dtype

    def _group(self) -> dict[str, Any]:
        return next(group for group in self.inner.param_groups if any(held is self.updated for held in group["params"]))

    @property
    def moments(self) -> tuple[str, ...]:
        return MOMENTS

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments that exist, and the master where there is one."""
        state = self.inner.state.get(self.updated, {})
        held = {kind: state[kind] for kind in MOMENTS if kind in state}
        return {**held, "master": self.updated} if self._has_master else held

    @property
    def step(self) -> int | None:
        """torch counts per parameter, the fused optimizers of apex and TransformerEngine per group."""
        state = self.inner.state.get(self.updated)
        if not state:
            return None
        step = state["step"] if "step" in state else self._group().get("step")
        return None if step is None else int(step)

    def create(self) -> None:
        self.inner.state[self.updated] = {kind: torch.zeros_like(self.updated, dtype=torch.float32).detach() for kind in MOMENTS}
        self.set_step(0)

    def set_step(self, step: int) -> None:
        if isinstance(self.inner, torch.optim.Adam):  # AdamW is a subclass
            self.inner.state[self.updated]["step"] = torch.tensor(float(step), dtype=torch.float32)
        else:
            self._group()["step"] = step

    def forget(self) -> None:
        self.inner.state.pop(self.updated, None)

    @torch.no_grad()
    def renew_master(self) -> None:
        if self._has_master:
            flat = self.parameter.detach().view(-1)
            self.updated.view(-1).copy_(flat[self.start : self.start + self.updated.numel()])


class MegatronOptimizerState:
    """``OptimizerState`` of a megatron-core optimizer.

    Args:
        optimizer: what ``get_megatron_optimizer`` returned.
        parameters: of every model chunk, by local name.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Mapping[str, Parameter]]) -> None:
        self._parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self._names = {parameter: (chunk, name) for chunk, named in enumerate(parameters) for name, parameter in named.items()}

    def parameters(self, *, loading: bool = False) -> list[MegatronParameterState]:
        """Everything that this rank's optimizer updates. The same masters are saved and loaded."""
        return [
            MegatronParameterState(*self._names[parameter], start, parameter, updated, part.optimizer)
            for part in self._parts
            if not part.is_stub_optimizer  # nothing trainable on this rank
            for parameter, start, updated in _updates(part)
        ]

    def synchronize(self) -> None:
        """Gather updated parameters that ``overlap_param_gather`` would gather in the next forward pass."""
        chunks = {id(chunk): chunk for part in self._parts for chunk in getattr(part, "model_chunks", ())}
        for chunk in chunks.values():
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def scaler_state(self) -> dict[str, float]:
        """State of the fp16 loss scaler, the same in every part and on every rank; empty where the scale is constant or absent."""
        for scaler in self._scalers():
            return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in scaler.state_dict().items()}
        return {}

    def load_scaler_state(self, state: Mapping[str, float]) -> None:
        if not state:
            return
        for scaler in self._scalers():
            scaler.load_state_dict({**state, "scale": torch.tensor([state["scale"]], dtype=torch.float32)})

    def _scalers(self) -> Iterator[Any]:
        for part in self._parts:
            if getattr(part, "grad_scaler", None) is not None:
                yield part.grad_scaler


def _updates(part: Any) -> Iterator[tuple[Parameter, int, torch.Tensor]]:
    """Model parameter, first element, and what the inner optimizer updates in its place."""
    if hasattr(part, "shard_fp32_from_float16_groups"):
        pairs = _pairs(part.model_float16_groups, part.shard_fp32_from_float16_groups), _pairs(part.model_fp32_groups, part.shard_fp32_groups)
        for parameter, updated in (pair for each in pairs for pair in each):
            yield parameter, part._get_model_param_range_map(parameter)["param"].start, updated
    elif hasattr(part, "fp32_from_float16_groups"):
        pairs = _pairs(part.float16_groups, part.fp32_from_float16_groups), _pairs(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups)
        for parameter, updated in (pair for each in pairs for pair in each):
            yield parameter, 0, updated
    else:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, 0, parameter


def _pairs(models: Sequence[Sequence[Parameter]], updated: Sequence[Sequence[torch.Tensor]]) -> Iterator[tuple[Parameter, torch.Tensor]]:
    for model_group, updated_group in zip(models, updated, strict=True):
        yield from zip(model_group, updated_group, strict=True)
