"""The megatron backend as a comparison runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tangram.align.batch import blank_like
from tangram.align.pack import by_rows
from tangram.align.task import Split, Task, TraceTo
from tangram.align.trace.on_megatron import MegatronTrace
from tangram.align.trace.seen import Chosen
from tangram.align.trace.store import TraceWriter
from tangram.backends.dtypes import DTYPES
from tangram.backends.engine import Batch, CanonicalTensor
from tangram.backends.megatron.engine import MegatronEngine
from tangram.backends.megatron.forward import get_batch, report_loss
from tangram.backends.megatron.parallel import shutdown
from tangram.checkpoints.mp_rank import MMDirectory, load_mm
from tangram.config.run import RunConfig
from tangram.losses.modes import reduce_token_losses
from tangram.platform import current


class OnMegatron:
    """Implements ``tangram.align.worker.Runner``."""

    def __init__(self, task: Task, run: RunConfig) -> None:
        assert isinstance(task.split, Split)
        self.split, self.vocabulary = task.split, task.model.text_decoder.vocab_size
        self._step = _ObservingStep(DTYPES[task.dtype])
        self.engine = MegatronEngine(run, forward_step=self._step)

    def load_split(self, directory: str) -> None:
        load_mm(
            MMDirectory(directory),
            [chunk.placement for chunk in self.engine.chunks],
            [chunk.parameters for chunk in self.engine.chunks],
            self.engine.topology,
            self.engine.model,
            cast=True,
        )

    def share(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        engine, split = self.engine, self.split
        unit = split.data * (split.pipeline if split.virtual > 1 else 1)
        filled = [*parts, *[blank_like(parts[-1])] * (-len(parts) % unit)]
        return filled[engine.data_parallel_rank :: engine.data_parallel_size]

    def logits(self, mine: Sequence[Batch], shape: tuple[int, int]) -> Iterator[CanonicalTensor]:
        kept = self._step.logits = []
        self.engine.evaluate(mine)
        self._step.logits = None
        for batch, logits in kept:
            start = self.engine.ranks.tensor_parallel_rank * logits.shape[-1]
            real = min(logits.shape[-1], self.vocabulary - start)
            if real > 0:
                for row, whole in by_rows(batch, logits[..., :real], shape[1]):
                    yield CanonicalTensor("logits", (row, 0, start), (*shape, self.vocabulary), whole)

    def trace(self, to: TraceTo, rank: int) -> MegatronTrace:
        return MegatronTrace(self.engine, TraceWriter(Path(to.folder), rank), f"megatron, {self.split}", Chosen(to.only))

    def frozen(self) -> list[str]:
        own = {
            block.canonical
            for chunk in self.engine.chunks
            for name, tensor in chunk.placement.tensors.items()
            for block in tensor.blocks
            if not (chunk.parameters[name].requires_grad or getattr(chunk.parameters[name], "idle", False))
        }
        every: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(every, own - {None})
        return sorted(set().union(*every))

    def close(self) -> None:
        shutdown()


class _ObservingStep:
    """Forward step that computes the per-token loss, or, while ``logits`` is a list, collects logits instead.

    Each entry of ``logits`` is (micro-batch, this tensor-parallel rank's logits ``[b, s, V / TP]``).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.device = current().use(int(os.environ.get("LOCAL_RANK", "0")))
        self.logits: list[tuple[Batch, torch.Tensor]] | None = None

    def __call__(self, iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, Any]:
        batch = next(iterator)
        inputs = get_batch(iter([batch]), self.device, self.dtype)
        if self.logits is None:
            return model(**inputs), self._loss
        del inputs["labels"]
        return model(**inputs), lambda output: self._keep(batch, output["logits"])

    @staticmethod
    def _loss(output: Any) -> Any:
        losses = output["loss_dict"]
        terms = reduce_token_losses(losses["token_losses"], losses["samples"], "per_token_loss")
        return report_loss(terms.numerator, terms.denominator)

    def _keep(self, batch: Batch, logits: torch.Tensor) -> Any:
        assert self.logits is not None
        self.logits.append((batch, logits.detach().float().cpu()))
        return report_loss(logits.new_zeros(()), 0)
