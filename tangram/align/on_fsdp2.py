"""The fsdp2 backend as a comparison runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tangram.align.batch import blank_like
from tangram.align.pack import by_rows
from tangram.align.task import Task, TraceTo
from tangram.align.trace.on_hf import Fsdp2Trace
from tangram.align.trace.seen import Chosen
from tangram.align.trace.store import TraceWriter
from tangram.backends.engine import Batch, CanonicalTensor
from tangram.backends.fsdp2.engine import Fsdp2Engine
from tangram.backends.fsdp2.placement import canonical_name
from tangram.config.run import RunConfig
from tangram.errors import ConfigError


class OnFsdp2:
    """Implements ``tangram.align.worker.Runner``."""

    def __init__(self, task: Task, run: RunConfig) -> None:
        self.engine, self._model, self.split = Fsdp2Engine(run), run.model.config, task.split
        _without_dropout(self.engine.module)

    def load_split(self, directory: str) -> None:
        raise ConfigError(f"--checkpoint {directory}: an mp_rank directory, which the fsdp2 backend does not read; convert it (mm-convert mm_to_hf)")

    def share(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        ranks = self.engine.data_parallel_size
        filled = [*parts, *[blank_like(parts[-1])] * (-len(parts) % ranks)]
        return filled[self.engine.data_parallel_rank :: ranks]

    def logits(self, mine: Sequence[Batch], shape: tuple[int, int]) -> Iterator[CanonicalTensor]:
        for batch, logits in zip(mine, self.engine.logits(mine), strict=True):
            for row, whole in by_rows(batch, logits.float().cpu(), shape[1]):
                yield CanonicalTensor("logits", (row, 0, 0), (*shape, whole.shape[-1]), whole)

    def trace(self, to: TraceTo, rank: int) -> Fsdp2Trace:
        return Fsdp2Trace(self.engine, TraceWriter(Path(to.folder), rank), str(self.split), Chosen(to.only))

    def frozen(self) -> list[str]:
        return sorted(canonical_name(name, self._model) for name, parameter in self.engine.parameters.items() if not parameter.requires_grad)

    def close(self) -> None:
        self.engine.close()


def _without_dropout(model: nn.Module) -> None:
    """The reference has none either."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
