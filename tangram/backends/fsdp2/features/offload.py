"""Offload of what a module of transformers saves for its backward pass; see ``tangram.platform.offload.chain``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from tangram.backends.fsdp2.features.wrapped import Wrapped
from tangram.platform.offload.chain import Chain


class Offloaded(Wrapped):
    """A forward whose saved tensors wait in host memory; without gradients it is the forward as it was."""

    def __init__(self, path: str, module: nn.Module, chain: Chain) -> None:
        super().__init__(path, module)
        self.chain = chain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.chain.saving(self.module, tree_leaves((args, kwargs)), gathered=True):
            return self.inner(*args, **kwargs)
