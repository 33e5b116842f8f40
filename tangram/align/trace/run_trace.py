"""What records a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import torch.distributed as dist

from tangram.align.trace.seen import Chosen, modules_of
from tangram.align.trace.store import TraceWriter
from tangram.backends.engine import Batch, ForwardResult, RunnableEngine


class RunTrace(Protocol):
    """Records one ``forward_backward`` of an engine. Every rank of a run has one, and calls both methods."""

    def begin(self, micro_batches: Sequence[Batch]) -> None:
        """The next ``forward_backward`` is of these micro-batches of this rank."""

    def finish(self, result: ForwardResult) -> None:
        """Write parameters and their gradients, and end the trace. Before ``step``; collective."""


def trace_of(engine: RunnableEngine, folder: Path, only: Sequence[str], what: str, key: str) -> RunTrace:
    """What records a run of an engine of either backend.

    Args:
        what: the facts say besides backend and ranks.
        key: that ``only`` comes from, for messages.

    Raises:
        ConfigError: a pattern of ``only`` matches no module.
    """
    chosen = Chosen(only)
    chosen.check(modules_of(engine.canonical_shapes), key)
    ranks = dist.get_world_size()
    run = f"{engine.run.backend} on {ranks} rank{'s' if ranks > 1 else ''}, {what}"
    writer = TraceWriter(folder, dist.get_rank())
    if engine.run.backend == "fsdp2":
        from tangram.align.trace.on_hf import Fsdp2Trace
        from tangram.backends.fsdp2.engine import Fsdp2Engine

        return Fsdp2Trace(cast(Fsdp2Engine, engine), writer, run, chosen)
    from tangram.align.trace.on_megatron import MegatronTrace
    from tangram.backends.megatron.engine import MegatronEngine

    return MegatronTrace(cast(MegatronEngine, engine), writer, run, chosen)
