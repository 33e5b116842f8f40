"""Training checkpoints: saved so that no crash can lose the previous one, loaded at any split, strict in both directions."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from tangram.checkpoints import dcp_planner, stored_types
from tangram.checkpoints.background import Background, Staging, own_group
from tangram.checkpoints.dcp_load import LoadPlan
from tangram.checkpoints.dcp_manifest import (
    MANIFEST_FILE,
    TRACKER_FILE,
    Manifest,
    RunFacts,
    check_same_run,
    find_checkpoint,
    iteration_folder,
    read_manifest,
    schedule_changes,
)
from tangram.checkpoints.dcp_ranks import gather, on_coordinator, rank, together
from tangram.checkpoints.dcp_rng import Generators, capture, restore, rng_key
from tangram.checkpoints.dcp_state import LocalChunk, LocalState, OptimizerState, model_state, optimizer_state
from tangram.checkpoints.publish import publish, remove_stale, temporary_name, write_text
from tangram.checkpoints.retention import remove_oldest
from tangram.checkpoints.stored_types import StoredAs
from tangram.errors import CheckpointError, name_some
from tangram.placement.table import Shape

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """Where a loaded checkpoint stopped."""

    step: int
    consumed_samples: int
    extra: Mapping[str, Any]
    manifest: Manifest


class CheckpointManager:
    """Saves and loads one run. All ranks call each method together.

    Args:
        facts: what identifies the run.
        chunks: this rank's model chunks; loading writes into their parameters in place.
        shapes: canonical name -> shape, of the whole model (``canonical_shapes``).
        optimizer: None for a run without one.
        generators: random generators that the backend keeps besides torch's.
        stored_as: types that parameters are stored in; None: their own, and no other is read.
        no_save_optim, no_save_rng: leave that state out of what is saved. Without the optimizer's masters, weights keep the type they are stored in.
        no_load_optim, no_load_rng: start with fresh state although the checkpoint has it.
        save_async: write in the background, from copies in host memory (see ``Staging``).
        save_total_limit: checkpoints that are kept (``remove_oldest``); None: all.
    """

    def __init__(
        self,
        facts: RunFacts,
        chunks: Sequence[LocalChunk],
        shapes: Mapping[str, Shape],
        optimizer: OptimizerState | None = None,
        generators: Generators | None = None,
        *,
        stored_as: StoredAs | None = None,
        no_save_optim: bool = False,
        no_save_rng: bool = False,
        no_load_optim: bool = False,
        no_load_rng: bool = False,
        save_async: bool = False,
        save_total_limit: int | None = None,
    ) -> None:
        self.facts = facts
        self.chunks = chunks
        self.shapes = shapes
        self.optimizer = optimizer
        self.generators = generators
        self.stored_as = stored_as
        self.no_save_optim = no_save_optim
        self.no_save_rng = no_save_rng
        self.no_load_optim = no_load_optim
        self.no_load_rng = no_load_rng
        self.save_total_limit = save_total_limit
        self.staging = Staging() if save_async else None
        self._background = Background()
        self._group = own_group() if save_async else None

    def save(self, folder: str | Path, step: int, consumed_samples: int, extra: Mapping[str, Any] | None = None) -> Path:
        """Write ``<folder>/iter_<step>`` and make it the newest.

        Everything is written under a temporary name and flushed to the disk before the folder gets its name, and the tracker file names it
        last; so at any moment the tracker's checkpoint is whole. Older ones beyond ``save_total_limit`` go after that. What killed runs left
        behind is removed first.

        With ``save_async`` this returns when the state is copied, and the rest happens in the background; the save before it is waited for.

        Args:
            extra: JSON data of the training loop.

        Returns:
            The new folder.

        Raises:
            CheckpointError: on every rank, if any rank failed, now or in the background of the save before; the previous checkpoint is as it was.
        """
        began = time.monotonic()
        final = Path(folder) / iteration_folder(step)
        self.wait()
        if self.optimizer is not None:
            self.optimizer.synchronize()
        staging = self.staging
        state = together(self._entries if staging is None else lambda: staging.copy(self._entries()))
        manifest = Manifest.of(
            self.facts,
            step=step,
            consumed_samples=consumed_samples,
            optimizer=self._saves_optimizer,
            rng=not self.no_save_rng,
            grad_scaler=self.optimizer.scaler_state() if self.optimizer is not None and self._saves_optimizer else {},
            extra=dict(extra or {}),
        )
        if staging is None:
            self._write(final, state, manifest, began)
        else:
            self._background.start(lambda: self._write(final, state, manifest, began))
            if rank() == 0:
                log.info("saving %s in the background; training waited %.1f s", final, time.monotonic() - began)
        return final

    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank, so that ``wait`` will raise."""
        return self._background.failed()

    def wait(self) -> None:
        """Until the save in the background, if there is one, is on the disk and published.

        Raises:
            CheckpointError: on every rank, if any rank failed; the previous checkpoint is as it was.
        """
        self._background.wait()

    def settle(self) -> None:
        """Wait as ``wait`` does, for a process that ends with another error."""
        self._background.settle()

    def _write(self, final: Path, state: LocalState, manifest: Manifest, began: float) -> None:
        temporary = on_coordinator(lambda: _prepare(final), self._group)
        try:
            dcp_planner.write(temporary, state.tensors, self.shapes, state.steps, self._group)
            on_coordinator(lambda: _publish(temporary, final, manifest, self.save_total_limit), self._group)
        except CheckpointError:
            if rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if rank() == 0:
            log.info("saved %s in %.1f s", final, time.monotonic() - began)

    @property
    def _saves_optimizer(self) -> bool:
        return self.optimizer is not None and not self.no_save_optim

    def _entries(self) -> LocalState:
        state = LocalState(model_state(stored_types.to_save(self.chunks, self.stored_as), self.shapes, saving=True))
        if self.optimizer is not None and self._saves_optimizer:
            held = optimizer_state(self.chunks, self.optimizer.parameters(), self.shapes, saving=True)
            state.tensors |= held.tensors
            state.steps = held.steps
        if not self.no_save_rng:
            state.tensors[rng_key(rank())] = capture(self.generators)
        return state

    def load(self, path: str | Path) -> Resumed:
        """Fill model, optimizer and random state from a checkpoint of this family, saved at any split.

        A parameter whose optimizer state is wholly absent (it was frozen or never got a gradient) starts with fresh state.

        Args:
            path: the folder of one checkpoint, or the folder of checkpoints, of which the newest is taken.

        Raises:
            CheckpointError: on every rank. No checkpoint, damaged, of another model, dtype, tokenizer, dataset or seed, partial, or of a run
                that had diverged.
        """
        began = time.monotonic()
        folder, manifest = on_coordinator(lambda: self._open(path))
        for change in schedule_changes(manifest, self.facts):
            if rank() == 0:
                log.warning("%s: learning-rate schedule: %s; the new one is used", folder, change)
        metadata = together(lambda: dcp_planner.read_metadata(folder))
        targets = together(lambda: stored_types.to_load(self.chunks, self.stored_as, metadata))
        plan = together(lambda: self._plan(folder, manifest, metadata, targets))
        self._report_unused(plan, folder)
        dcp_planner.read(folder, metadata, plan.entries)
        together(lambda: self._apply(plan, manifest, targets))
        if rank() == 0:
            log.info("loaded %s: step %d, %d tensors, in %.1f s", folder, manifest.step, len(self.shapes), time.monotonic() - began)
        return Resumed(manifest.step, manifest.consumed_samples, manifest.extra, manifest)

    def _open(self, path: str | Path) -> tuple[Path, Manifest]:
        folder = find_checkpoint(path)
        manifest = read_manifest(folder)
        check_same_run(manifest, self.facts, str(folder))
        if self.optimizer is not None and not self.no_load_optim and not manifest.optimizer:
            raise CheckpointError(f"{folder}: was saved without optimizer state; set no_load_optim to start with fresh moments")
        return folder, manifest

    def _plan(self, folder: Path, manifest: Manifest, metadata: Metadata, targets: Sequence[LocalChunk]) -> LoadPlan:
        plan = LoadPlan(folder, metadata, self.chunks, targets, self.shapes)
        if self.optimizer is not None:
            plan.add_optimizer(self.optimizer.parameters(loading=True), fresh=self.no_load_optim)
        own = rng_key(rank())
        if not self.no_load_rng and manifest.rng and self.facts.has_ranks_of(manifest) and own in plan.stored:
            plan.add_bytes(own)
        elif not self.no_load_rng and rank() == 0:
            log.warning("%s: random state not restored: %s", folder, "the split is another one" if manifest.rng else "none was saved")
        return plan

    def _apply(self, plan: LoadPlan, manifest: Manifest, targets: Sequence[LocalChunk]) -> None:
        plan.check_finite()
        stored_types.loaded(self.chunks, targets, plan.masters)
        plan.finish()
        if self.optimizer is not None and not self.no_load_optim:
            self.optimizer.load_scaler_state(manifest.grad_scaler)
        own = rng_key(rank())
        if own in plan.entries:
            restore(plan.entries[own], self.generators)

    def _report_unused(self, plan: LoadPlan, folder: Path) -> None:
        used = set().union(*gather(plan.restored_names))
        unused = plan.stored_moments - used
        if unused and not self.no_load_optim and rank() == 0:
            log.warning("%s: optimizer state of %d tensors not used, they are frozen in this run: %s", folder, len(unused), name_some(unused))


def _prepare(final: Path) -> Path:
    """Remove what killed runs left and make the folder to write in."""
    final.parent.mkdir(parents=True, exist_ok=True)
    for name in {path.name.split(".")[0] for path in final.parent.glob("iter_*.*")} | {TRACKER_FILE}:
        for stale in remove_stale(final.parent / name):
            log.warning("removed %s, which an interrupted save had left", stale)
    temporary = temporary_name(final)
    temporary.mkdir()
    return temporary


def _publish(temporary: Path, final: Path, manifest: Manifest, limit: int | None) -> None:
    write_text(temporary / MANIFEST_FILE, manifest.text())
    publish(temporary, final, replace=True)
    write_text(final.parent / TRACKER_FILE, f"{manifest.step}\n")
    if limit is not None:
        for path in remove_oldest(final.parent, manifest, limit):
            log.info("removed %s: %d checkpoints are kept", path, limit)
