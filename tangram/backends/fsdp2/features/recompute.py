"""Recomputation: a module keeps its inputs alone and runs once more in the backward pass.

Gradients are bit-equal to those without, since torch's checkpoint restores the random state. It is put around the forward and not around the
module, so FSDP gathers and frees the weights of a unit outside of it, once for each pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from tangram.backends.fsdp2.features.wrapped import Wrapped
from tangram.errors import ConfigError

_CONTAINERS = (tuple, list, dict)


class Recomputed(Wrapped):
    """A forward that is run again in the backward pass; without gradients it is the forward as it was.

    Args:
        use_reentrant: as ``torch.utils.checkpoint.checkpoint`` has it.
    """

    def __init__(self, path: str, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__(path, module)
        self.use_reentrant = use_reentrant

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            raise ConfigError(
                f"{self.path} is recomputed but was given past_key_values, which it would extend twice; the model must heed use_cache=False"
            )
        # Every tensor goes in by position: from these torch learns the device whose random state it keeps, and the reentrant kind
        # passes gradients to these alone.
        leaves, arguments = tree_flatten((args, kwargs), is_leaf=lambda value: type(value) not in _CONTAINERS)
        root = self._root()
        if self.use_reentrant and root is None and not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return self.inner(*args, **kwargs)
        given: TreeSpec | None = None

        def run(_: Tensor | None, *leaves: Any) -> tuple[Any, ...]:
            nonlocal given
            args, kwargs = tree_unflatten(leaves, arguments)
            out, given = tree_flatten(self.inner(*args, **kwargs))
            return tuple(out)

        out = checkpoint(run, root, *leaves, use_reentrant=self.use_reentrant)
        assert given is not None
        return tree_unflatten(out, given)

    def _root(self) -> Tensor | None:
        """What makes the reentrant kind give gradients to weights although no input has one, as behind a frozen embedding."""
        if self.use_reentrant and any(parameter.requires_grad for parameter in self.module.parameters()):
            return torch.empty(0, requires_grad=True)
        return None
