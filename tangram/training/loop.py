"""The one training loop. It knows an engine, a loader of steps and somewhere to save; nothing of a backend."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import torch
import torch.distributed as dist

from tangram.backends.engine import Batch, Copies, Engine, ForwardResult, StepResult
from tangram.config.run import TrainingConfig
from tangram.data.source import SKIPPED
from tangram.errors import DataError, DivergedError
from tangram.platform import current
from tangram.training.agreement import Share, Totals, collective_device, gather, rank_record, totals_of
from tangram.training.collection import GarbageCollection
from tangram.training.logs import LOGGER
from tangram.training.profiling import StepProfiler
from tangram.training.rank_records import RankRecord, RanksFile, is_kept
from tangram.training.records import MetricsFile, StepRecord, log_line
from tangram.training.schedule import LearningRate
from tangram.training.signals import StopRequest
from tangram.training.tracing import StepTracer
from tangram.training.writers import Writer

Steps = Iterable[Sequence[Batch]]
"""This rank's micro-batches of each global batch."""
HOPELESS = 100
"""Steps in a row that are not finite, after which a run ends. Finding the first loss scale of fp16 skips some 30 at most."""


def steps_of(data: Iterable[Batch | Sequence[Batch]], micro_batches_per_step: int) -> Steps:
    """Steps from data that gives either steps or single micro-batches. Micro-batches at the end that do not fill a step are left out."""
    step: list[Batch] = []
    for item in data:
        if not isinstance(item, Mapping):
            yield item
            continue
        step.append(item)
        if len(step) == micro_batches_per_step:
            yield step
            step = []


@dataclass
class Progress:
    """Where a run stands; what a checkpoint keeps of the loop."""

    step: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    """Steps that were not finite and changed no weight."""
    skipped_samples: int = 0
    """Places that stayed empty since their sample cannot be used."""

    @property
    def updates(self) -> int:
        """Steps that changed weights. The learning rate goes by these, as in Megatron: a skipped step leaves it where it was."""
        return self.step - self.skipped


Save = Callable[[Progress], object]
"""Writes a checkpoint; all ranks call it together."""


class SavesInBackground(Protocol):
    """Where a checkpoint may still be being written when ``Save`` has returned."""

    def failed(self) -> bool:
        """Whether that has failed on this rank, so that ``wait`` will raise."""

    def wait(self) -> None:
        """Until it is written; all ranks call it together.

        Raises:
            CheckpointError: it was not, on every rank.
        """


@dataclass
class Outputs:
    """Where records go; only the rank that reports has any."""

    lines: Callable[[str], object] | None = None
    metrics: MetricsFile | None = None
    ranks: RanksFile | None = None
    advance: Callable[[StepRecord], object] | None = None
    """Moves a progress bar."""
    writers: Sequence[Writer] = ()


@dataclass
class Loop:
    """Runs an engine from ``progress`` to ``training.train_iters``.

    Args:
        valid_steps: gives a fresh pass over the validation data.
        after_first_step: called once, when memory has reached its working size.
        background: what ``save`` goes on with while the loop does.
        export: writes weights alone, after each ``save_hf_interval`` steps and after the last.
        flops: counts the model FLOPs of a micro-batch; None: they are not known.
        peak_tflops: what a device could do; None: not known.
        compares_copies: some rank keeps what each rank has found, and there are several.
        skips_samples: samples that cannot be used leave their places empty, so before each step ranks compare which.
    """

    engine: Engine
    training: TrainingConfig
    global_batch_size: int
    steps: Steps
    save: Save | None = None
    valid_steps: Callable[[], Steps] | None = None
    outputs: Outputs = field(default_factory=Outputs)
    progress: Progress = field(default_factory=Progress)
    profiler: StepProfiler | None = None
    tracer: StepTracer | None = None
    after_first_step: Callable[[int], object] | None = None
    background: SavesInBackground | None = None
    export: Save | None = None
    skips_samples: bool = False
    flops: Callable[[Batch], int] | None = None
    peak_tflops: float | None = None
    compares_copies: bool = False
    _peak_memory: int = field(default=0, init=False)
    """So far, bytes; a memory profile starts the device's own figure anew."""

    def run(self) -> Progress:
        """Train; returns where the run stopped.

        SIGTERM ends it after the step at hand, with a checkpoint where there is a folder for one. A save that has failed in the background ends
        it too. However it ends, the last save is on the disk.

        Raises:
            CheckpointError: a save failed, on every rank.
            DivergedError: ``HOPELESS`` steps in a row were not finite, or all from the start to the end, but for SIGTERM; on every rank.
        """
        training, progress = self.training, self.progress
        rate = LearningRate(training)
        pending: list[StepRecord] = []
        first = saved = finite = progress.step
        steps = iter(self.steps)
        if first >= training.train_iters:
            LOGGER.info("nothing to do: step %d of %d is done", first, training.train_iters)
        with StopRequest() as request, GarbageCollection(training.manual_gc_interval) as garbage:
            while progress.step < training.train_iters:
                record, stop = self._step(steps, rate(progress.updates), request)
                finite = finite if record.skipped else progress.step
                garbage.step(progress.step)
                pending.append(record)
                exits = training.exit_interval is not None and progress.step % training.exit_interval == 0
                hopeless = progress.step - finite >= HOPELESS
                self._log(pending, last=stop or exits or hopeless or progress.step == training.train_iters)
                if self.profiler is not None:
                    self.profiler.step(progress.step)
                if progress.step == first + 1 and self.after_first_step is not None:
                    self.after_first_step(progress.step)
                if training.eval_interval and progress.step % training.eval_interval == 0:
                    garbage.collect()
                    record = replace(record, valid_loss=self._validate())
                    garbage.collect()
                self._keep(record)
                if self._due(progress.step) or stop or exits:
                    saved = self._save(saved)
                self._export()
                if hopeless:
                    break
                if stop or exits:
                    LOGGER.info("stopping after step %d: %s", progress.step, "SIGTERM" if stop else f"exit_interval {training.exit_interval}")
                    break
            else:
                self._save(saved)
            if self.background is not None:
                self.background.wait()
        if finite < progress.step and (hopeless or (finite == first and not stop)):
            raise _diverged(record, progress.step - finite)
        if progress.skipped_samples:
            LOGGER.info("skipped=%d: so many places were left empty, for their samples cannot be used", progress.skipped_samples)
        return progress

    def _step(self, steps: Iterator[Sequence[Batch]], lr: float, request: StopRequest) -> tuple[StepRecord, bool]:
        """One optimizer step; its time includes that spent waiting for data."""
        began = time.perf_counter()
        micro_batches = next(steps, None)
        if micro_batches is None:
            raise DataError(
                f"the training data ended after step {self.progress.step} of {self.training.train_iters}; give more data or lower train_iters"
            )
        if self.skips_samples:
            self._compare_skips(micro_batches)
        if self.tracer is None:
            forward = self.engine.forward_backward(micro_batches)
        else:
            forward = self.tracer.forward_backward(self.progress.step + 1, micro_batches)
        if forward.tokens == 0:
            self._refuse_empty(micro_batches)
        scale = self.engine.loss_scale
        copies = self.engine.copies() if self.compares_copies and is_kept(self.progress.step + 1) else {}
        result = self.engine.step(lr)
        asked = request.asked or (self.background is not None and self.background.failed())
        totals, ranks = self._agree(micro_batches, asked, forward, result, copies)
        if self.outputs.ranks is not None:
            self.outputs.ranks.write(ranks)
        self.progress.step += 1
        self.progress.skipped += result.skipped
        self.progress.skipped_samples += totals.skipped_samples
        # Samples of a skipped step are consumed too: the order of the data does not depend on what it does to the model.
        self.progress.consumed_samples += self.global_batch_size
        record = StepRecord(
            step=self.progress.step,
            consumed_samples=self.progress.consumed_samples,
            loss=forward.loss,
            supervised_tokens=forward.tokens,
            tokens=totals.tokens,
            padded_tokens=totals.padded_tokens,
            samples=totals.samples,
            grad_norm=result.grad_norm,
            lr=lr,
            step_ms=1000 * (time.perf_counter() - began),
            loss_scale=scale,
            skipped=result.skipped,
            load_balancing=forward.load_balancing,
            skipped_samples=totals.skipped_samples,
            model_tflop=None if self.flops is None else totals.kiloflops / 1e9 / (dist.get_world_size() if dist.is_initialized() else 1),
            peak_tflops=self.peak_tflops,
            samples_digest=totals.samples_digest,
        )
        return record, totals.stop

    def _compare_skips(self, micro_batches: Sequence[Batch]) -> None:
        """Ranks of one copy of the model must leave the same places empty, or they would train on different tensors, or wait for each other.

        Raises:
            DataError: on every rank, if a file could be read on one rank and not on another.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        empty = [sorted(batch.get(SKIPPED, ())) for batch in micro_batches]
        mine = torch.tensor([self.engine.data_parallel_rank, zlib.crc32(repr(empty).encode())], device=collective_device())
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        seen: dict[int, tuple[int, int]] = {}
        for rank, (copy, digest) in enumerate(both.tolist() for both in every):
            other, expected = seen.setdefault(copy, (rank, digest))
            if digest != expected:
                raise DataError(
                    f"step {self.progress.step + 1}: ranks {other} and {rank} read the same samples, and some can be read on one of them alone "
                    f"(rank {dist.get_rank()} skips {[sample for part in empty for sample in part]}); make the files the same on every node"
                )

    def _refuse_empty(self, micro_batches: Sequence[Batch]) -> None:
        """A step that nothing can be learnt from is no step of training.

        Raises:
            DataError: on every rank.
        """
        totals, _ = self._agree(micro_batches, False)
        raise DataError(
            f"step {self.progress.step + 1}: its global batch of {self.global_batch_size} places has 0 supervised tokens "
            f"({totals.skipped_samples} samples are skipped); look at the skipped samples in bad_samples_report, or correct the template"
        )

    def _agree(
        self,
        micro_batches: Sequence[Batch],
        asked: bool,
        forward: ForwardResult | None = None,
        result: StepResult | None = None,
        copies: Mapping[str, Copies] | None = None,
    ) -> tuple[Totals, RankRecord]:
        """What the global batch comes to, and what each rank has found in it."""
        self._peak_memory = max(self._peak_memory, current().peak_memory())
        mine = Share.of(micro_batches, asked, self.engine.data_parallel_rank, self.flops, self._peak_memory, forward, result, copies)
        shares, step = gather(mine), self.progress.step + 1
        loss = forward.loss if forward is not None else None
        return totals_of(shares, len(shares) // self.engine.data_parallel_size, step), rank_record(shares, step, loss, list(copies or {}))

    def _log(self, pending: list[StepRecord], last: bool) -> None:
        if not last and pending[-1].step % self.training.log_interval:
            return
        if self.outputs.lines is not None:
            self.outputs.lines(log_line(pending, self.training.train_iters, show_tokens_per_sample=self.training.log_tps))
        pending.clear()

    def _keep(self, record: StepRecord) -> None:
        if self.outputs.metrics is not None:
            self.outputs.metrics.write(record)
        for writer in self.outputs.writers:
            writer.write(record)
        if self.outputs.advance is not None:
            self.outputs.advance(record)

    def _validate(self) -> float:
        """Loss over ``eval_iters`` global batches of the validation data, or all of it if that is None or more; one batch is held at a time."""
        if self.valid_steps is None:
            raise DataError(f"eval_interval {self.training.eval_interval} needs validation data, and there is none; give it, or remove eval_interval")
        total, weight, tokens = 0.0, 0.0, 0
        for micro_batches in islice(self.valid_steps(), self.training.eval_iters):
            if self.skips_samples:
                self._compare_skips(micro_batches)
            result = self.engine.evaluate(micro_batches)
            total += result.loss * result.weight
            weight += result.weight
            tokens += result.tokens
        loss = total / weight if weight else 0.0
        if self.outputs.lines is not None:
            self.outputs.lines(f" validation loss at iteration {self.progress.step}: {loss:.6E} | supervised tokens: {tokens} |")
        return loss

    def _due(self, step: int) -> bool:
        return self.training.save_interval is not None and step % self.training.save_interval == 0

    def _export(self) -> None:
        training, step = self.training, self.progress.step
        if self.export is not None and training.save_hf_interval and (step % training.save_hf_interval == 0 or step == training.train_iters):
            self.export(self.progress)

    def _save(self, saved: int) -> int:
        """Save unless this very step has been saved; returns the step of the newest checkpoint."""
        if self.save is not None and saved != self.progress.step:
            self.save(self.progress)
            return self.progress.step
        return saved


def _diverged(record: StepRecord, count: int) -> DivergedError:
    return DivergedError(
        f"step {record.step}: {count} steps in a row were skipped, since their loss or gradients were not finite (loss {record.loss}, gradient norm "
        f"{record.grad_norm}), and changed no weight; look for NaN in weights and data, lower the learning rate, or load an earlier checkpoint"
    )
