"""Fused operators for a model of transformers, one module at a time.

Instances change and classes do not: each forward that is replaced falls back to the one it replaces where its tensor is elsewhere, so on
other devices a model computes what it always did. Names of parameters stay. 3-D rotary embeddings of text stay as transformers has them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from functools import update_wrapper
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tangram.platform.operators import OPERATORS, Operator

log = logging.getLogger(__name__)

VISION_ROPE = "apply_rotary_pos_emb_vision"


class FusedForward(ABC):
    """Stands in place of a module's forward.

    Args:
        operator: that it computes where the tensor's device has it fused.
    """

    def __init__(self, module: nn.Module, operator: Operator) -> None:
        update_wrapper(self, module.forward, updated=())
        self.module: Any = module
        self.operator, self.original = operator, module.forward

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class FusedRMSNorm(FusedForward):
    """Of a norm with ``weight`` and ``variance_epsilon``."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        fused = self.operator.fused_for(hidden_states)
        return self.original(hidden_states) if fused is None else fused(hidden_states, self.module.weight, self.module.variance_epsilon)


class FusedMLP(FusedForward):
    """Of an MLP with ``gate_proj``, ``up_proj`` and ``down_proj``."""

    def __call__(self, x: Tensor) -> Tensor:
        fused, mlp = self.operator.fused_for(x), self.module
        return self.original(x) if fused is None else mlp.down_proj(fused(mlp.gate_proj(x), mlp.up_proj(x)))


class FusedVisionAttention(FusedForward):
    """Of attention that rotates by the function ``VISION_ROPE`` of its file: the same code, in which that name means another function.

    So this instance rotates by the fused operator, and neither its class nor its file changes.
    """

    def __init__(self, module: nn.Module, operator: Operator) -> None:
        super().__init__(module, operator)
        method: Any = type(module).forward
        names = {**method.__globals__, VISION_ROPE: self.rotate}
        again = FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
        again.__kwdefaults__ = method.__kwdefaults__
        self.rotate_plainly = method.__globals__[VISION_ROPE]
        self.call = MethodType(again, module)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return (self.operator.fused_for(query) or self.rotate_plainly)(query, key, cos, sin)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _gated_by_silu(module: Any) -> bool:
    act = module.act_fn
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation" or act is torch.nn.functional.silu


def _rotates_by_name(module: Any) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and VISION_ROPE in code.co_names


_RMS_NORMS = (
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "Qwen2RMSNorm",
    "Qwen2VLRMSNorm",
    "Qwen2_5_VLRMSNorm",
    "Qwen3VLTextRMSNorm",
    "Qwen3VLMoeTextRMSNorm",
)
_MLPS = ("LlamaMLP", "Qwen2MLP", "Qwen3VLTextMLP", "Qwen3VLMoeTextMLP")
_VISION_ATTENTIONS = ("VisionAttention", "Qwen2_5_VLVisionAttention", "Qwen3VLVisionAttention", "Qwen3VLMoeVisionAttention")

Rule = tuple[str, type[FusedForward], Callable[[Any], bool]]
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_RMS_NORMS, ("rms_norm", FusedRMSNorm, lambda module: True)),
    **dict.fromkeys(_MLPS, ("swiglu", FusedMLP, _gated_by_silu)),
    **dict.fromkeys(_VISION_ATTENTIONS, ("vision_rope", FusedVisionAttention, _rotates_by_name)),
}
"""By class of transformers: the operator, what replaces the forward, and whether this module is fit for it."""


def fuse(model: nn.Module, device_type: str) -> dict[str, int]:
    """Let modules that transformers computes in several kernels use operators that ``device_type`` has fused.

    Call it before the model is sharded, which gives modules other classes. A second call changes nothing.

    Returns:
        Modules by operator, those of earlier calls included.
    """
    found: Counter[str] = Counter()
    for module in model.modules():
        kind = type(module)
        rule = RULES.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None
        if rule is None or OPERATORS[rule[0]].fused_on(device_type) is None or not rule[2](module):
            continue
        name, replacement, _ = rule
        if not _is_fused(module):
            module.forward = replacement(module, OPERATORS[name])
        found[name] += 1
    if found:
        log.info("fused on %s: %s", device_type, ", ".join(f"{name} in {count} modules" for name, count in sorted(found.items())))
    return dict(found)


def _is_fused(module: nn.Module) -> bool:
    """Also below what other features put around it."""
    forward = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, FusedForward):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None
