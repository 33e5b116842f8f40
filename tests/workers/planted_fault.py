"""``FAULT ...``: ``tangram ...`` with a fault for the length of the run; ``FAULT@RANK``: on this rank alone."""

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.backends.fsdp2.placement import local_value
from tangram.backends.megatron import forward, gradients
from tangram.backends.megatron.engine import MegatronEngine
from tangram.cli.main import main
from tangram.data.sampler import GlobalOrder

reduce_token_losses, locate = forward.reduce_token_losses, GlobalOrder._locate
sound_finalizer, sound_passes = gradients.make_finalizer, Fsdp2Engine.forward_backward


def a_heavier_copy(*arguments: Any) -> Any:
    """A loss counts a ten-thousandth more."""
    terms = reduce_token_losses(*arguments)
    return replace(terms, numerator=terms.numerator * 1.0001)


def one_further(order: GlobalOrder, place: int) -> tuple[int, int]:
    """The order of samples moved by one."""
    return locate(order, place + 1)


def not_summed(*_: Any) -> None:
    """Sequence parallelism without the sum over tensor-parallel ranks of the gradients of norms."""


def nudged_after_two_steps(sound: Callable[..., Any]) -> Callable[..., Any]:
    """One number of a parameter becomes another, as after a bit that flipped."""

    def step(self: Any, lr: float) -> Any:
        result = sound(self, lr)
        self.steps_done = getattr(self, "steps_done", 0) + 1
        if self.steps_done == 2:
            with torch.no_grad():
                first = next(iter(self.chunks[0][2].values()))
                local_value(first).view(-1)[0] += 1e-3
        return result

    return step


def keep_own_gradients(*arguments: Any) -> Any:
    """``make_finalizer`` of a rank whose gradients do not become those of all data-parallel ranks."""
    finalize = sound_finalizer(*arguments)

    def only_mine(model: Any, num_tokens: Any = None, **others: Any) -> None:
        held = [parameter for chunk in arguments[0] for parameter in chunk.parameters() if parameter.requires_grad]
        own = [parameter.main_grad.clone() for parameter in held]
        finalize(model, num_tokens, **others)
        for parameter, gradient in zip(held, own, strict=True):
            parameter.main_grad.copy_(gradient / num_tokens)

    return only_mine


def keep_own_shards(self: Any, micro_batches: Any) -> Any:
    """``forward_backward`` of a rank that does not hear of the gradients of the other copy."""
    result = sound_passes(self, micro_batches)
    for parameter in self.optimizer.parameters.values():
        if parameter.grad is not None:
            local_value(parameter.grad).mul_(0.6)
    return result


FAULTS: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "loss": [(forward, "reduce_token_losses", a_heavier_copy)],
    "order": [(GlobalOrder, "_locate", one_further)],
    "norms": [(importlib.import_module("megatron.core.distributed.finalize_model_grads"), "_allreduce_non_tensor_model_parallel_grads", not_summed)],
    "nudge": [(engine, "step", nudged_after_two_steps(engine.step)) for engine in (MegatronEngine, Fsdp2Engine)],
    "unsummed": [(gradients, "make_finalizer", keep_own_gradients), (Fsdp2Engine, "forward_backward", keep_own_shards)],
}
fault, _, rank = sys.argv[1].partition("@")
with ExitStack() as planted:
    for place in FAULTS[fault] if os.environ["RANK"] == (rank or os.environ["RANK"]) else ():
        planted.enter_context(patch.object(*place))
    status = main(sys.argv[2:])
sys.exit(status)
