"""Which way round a model's class holds its experts.

Canonical tensors have the hub's order, ``[experts, in, out]``. transformers 4.57 holds them so and multiplies ``x @ w``; the classes of 5.x hold
``[experts, out, in]``, unless they say ``is_transposed`` (``transformers.integrations.moe``). The class decides, never a comparison of shapes: where
in = out those tell nothing.
"""

from __future__ import annotations

from torch import nn

from tangram.checkpoints.expert_stacks import turned
from tangram.errors import PlacementError
from tangram.placement.table import Shape

IN_OUT_CLASSES = ("transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextExperts",)
"""Classes of transformers 4.57, which do not say how they hold them: ``[experts, in, out]``."""


def holds_out_in(experts: nn.Module) -> bool:
    """Whether a module's stacked weights are ``[experts, out, in]``.

    Raises:
        PlacementError: its class does not tell.
    """
    transposed = getattr(experts, "is_transposed", None)
    if transposed is not None:
        return not transposed
    # fully_shard gives a module a subclass of its own class.
    names = [f"{known.__module__}.{known.__qualname__}" for known in type(experts).__mro__]
    if any(name in IN_OUT_CLASSES for name in names):
        return False
    raise PlacementError(
        f"{names[0]} does not tell whether it holds experts as [experts, in, out] or [experts, out, in]; give the class an attribute is_transposed "
        "(True: [experts, in, out]), as transformers 5 does"
    )


def check_stack(name: str, shape: Shape, canonical: Shape, out_in: bool) -> None:
    """Check that a parameter is the family's stack of experts, the way round that its class has it.

    Raises:
        PlacementError: it is not.
    """
    expected = turned(canonical) if out_in else canonical
    if shape != expected:
        order = "[experts, out, in]" if out_in else "[experts, in, out]"
        raise PlacementError(f"{name}: the model has shape {shape}, but its config.json asks for {expected} ({order}); they are of different models")
