"""Several ``tangram train`` in one launch, each of its own arguments, and with a fault on one rank if it names one.

Usage: many_runs.py PLAN, a JSON file with a list of ``{"arguments": [...], "port": ..., "fault": ..., "rank": ...}``. Each run meets at a port of its
own: at that of the run before, a rank that is ahead would still find addresses of that one.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.backends.fsdp2.placement import local_value
from tangram.backends.megatron import gradients
from tangram.backends.megatron.engine import MegatronEngine
from tangram.cli.main import main


def nudge_after_two_steps(engine: type[Any]) -> Callable[..., Any]:
    """One number of one of the rank's parameters becomes another, as after a bit that flipped."""
    sound = engine.step

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


sound_finalizer, sound_passes = gradients.make_finalizer, Fsdp2Engine.forward_backward
sound_steps = MegatronEngine.step, Fsdp2Engine.step
for entry in json.loads(Path(sys.argv[1]).read_text()):
    os.environ["MASTER_PORT"] = str(entry["port"])
    gradients.make_finalizer, Fsdp2Engine.forward_backward = sound_finalizer, sound_passes  # type: ignore[method-assign]
    MegatronEngine.step, Fsdp2Engine.step = sound_steps  # type: ignore[method-assign]
    if entry.get("fault") and int(os.environ["RANK"]) == entry["rank"]:
        if entry["fault"] == "nudge":
            MegatronEngine.step, Fsdp2Engine.step = map(nudge_after_two_steps, (MegatronEngine, Fsdp2Engine))  # type: ignore[method-assign]
        else:
            gradients.make_finalizer, Fsdp2Engine.forward_backward = keep_own_gradients, keep_own_shards  # type: ignore[method-assign]
    if status := main(entry["arguments"]):
        sys.exit(status)
