"""What the tests of memory features share: features, models of transformers, and counts of what autograd keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tangram.config.fsdp2 import Fsdp2Features

LAYERS = ["model.language_model.layers.{*}"]
BLOCKS = ["model.visual.blocks.{*}"]


def features(**changes: Any) -> Fsdp2Features:
    return Fsdp2Features.model_validate(changes)


def recompute(*patterns: str, **plan: Any) -> dict[str, Any]:
    return {"recompute": True, "recompute_plan": {"apply_modules": list(patterns), **plan}}


def offload(*patterns: str) -> dict[str, Any]:
    return {"enable_activation_offload": True, "activation_offload_plan": {"apply_modules": list(patterns)}}


def chunks(*patterns: str, **plan: Any) -> dict[str, Any]:
    return {"enable_chunk_mbs": True, "chunkmbs_plan": {"apply_modules": list(patterns), **plan}}


@contextmanager
def counted_calls(model: nn.Module, part: str) -> Iterator[Counter[str]]:
    """How often each module whose path ends in ``part`` begins to run."""
    calls: Counter[str] = Counter()
    hooks = [
        module.register_forward_pre_hook(lambda _, __, path=path: calls.update([path]))
        for path, module in model.named_modules()
        if path.endswith(part)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


class Kept:
    """Bytes that autograd keeps while the block runs, each storage once, parameters and ``given`` left out. What hooks of inner blocks keep is
    theirs and does not count."""

    def __init__(self, model: nn.Module, given: Mapping[str, Tensor]) -> None:
        self._left_out = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *given.values())}
        self._held: dict[int, Tensor] = {}

    def __enter__(self) -> Kept:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._left_out:
            self._held[storage.data_ptr()] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._held.values())
