"""What one rank reads from a checkpoint, decided before anything is read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from tangram.checkpoints.dcp_blocks import BlockTensor, block_piece, flat_pieces
from tangram.checkpoints.dcp_planner import check_entries, check_model_names, whole_moments
from tangram.checkpoints.dcp_ranks import rank
from tangram.checkpoints.dcp_state import (
    MASTER,
    MOMENTS,
    OPTIMIZERS,
    STEP,
    LocalChunk,
    ParameterState,
    canonical_names,
    model_state,
    optimizer_key,
    optimizer_state,
    split_key,
)
from tangram.errors import CheckpointError, name_some
from tangram.placement.table import Shape

log = logging.getLogger(__name__)


class LoadPlan:
    """Entries to read on this rank, and what to do with the optimizer's parameters afterwards.

    Args:
        chunks: this rank's model chunks.
        weights: the same with what ``model.`` entries are read into.

    Raises:
        CheckpointError: the checkpoint is of another model, in names, shapes or dtypes.
    """

    def __init__(
        self, folder: Path, metadata: Metadata, chunks: Sequence[LocalChunk], weights: Sequence[LocalChunk], shapes: Mapping[str, Shape]
    ) -> None:
        self.where = str(folder)
        self.metadata = metadata
        self.stored = metadata.state_dict_metadata
        self.chunks = chunks
        self.shapes = shapes
        check_model_names(metadata, shapes, self.where)
        self._weights = weights
        self.entries = model_state(weights, shapes, saving=False)
        check_entries(self.entries, metadata, self.where)
        self._states: list[ParameterState] = []
        self._restored: list[tuple[ParameterState, list[str]]] = []
        self._without_master: list[ParameterState] = []
        self.masters: set[tuple[int, str]] = set()
        """Chunk and local name of the parameters whose master is read."""

    @property
    def restored_names(self) -> set[str]:
        """Canonical names whose moments are read on this rank."""
        return {name for _, names in self._restored for name in names}

    @property
    def stored_moments(self) -> set[str]:
        """Canonical names whose moments the checkpoint has."""
        return {name for kind, name in map(split_key, self.stored) if kind in MOMENTS}

    def add_optimizer(self, states: Iterable[ParameterState], *, fresh: bool) -> None:
        """Plan the optimizer's state.

        Args:
            fresh: read none of it.

        Raises:
            CheckpointError: the checkpoint has a part of a parameter's state.
        """
        states = self._states = list(states)
        started = states if fresh else [state for state in states if not self._add(state)]
        for state in started:
            state.forget()
        if fresh:
            self._without_master = states
            return
        if started:
            names = name_some(state.name for state in started)
            log.warning("%s: rank %d: no optimizer state for %d parameters, they start fresh: %s", self.where, rank(), len(started), names)
        wanted = optimizer_state(self.chunks, states, self.shapes, saving=False).tensors
        wanted = {key: tensor for key, tensor in wanted.items() if key in self.stored or split_key(key)[0] != MASTER}
        without = {(state.chunk, state.name) for state in self._without_master}
        self.masters = {(state.chunk, state.name) for state in states if MASTER in state.tensors()} - without
        check_entries(wanted, self.metadata, self.where)
        self.entries |= wanted
        self.entries |= {optimizer_key(STEP, name): torch.tensor(0) for name in self.restored_names}

    def _add(self, state: ParameterState) -> bool:
        """Plan one parameter; whether the checkpoint has its moments."""
        names = canonical_names(self.chunks[state.chunk][1].tensors[state.name])
        moments = {name: whole_moments(name, self.stored, self.where) for name in names}
        for name, kinds in moments.items():
            if kinds and kinds != state.moments:
                raise CheckpointError(
                    f"{self.where}: the optimizer state of {name} is {OPTIMIZERS[kinds]}'s, this run updates it with {OPTIMIZERS[state.moments]}; "
                    "train with the optimizer it was saved with, or set no_load_optim to start with fresh state"
                )
        masters = {name: optimizer_key(MASTER, name) in self.stored for name in names}
        for what, present in (("moments", moments), ("master", masters)):
            if any(present.values()) and not all(present.values()):
                lost = name_some(name for name, there in present.items() if not there)
                raise CheckpointError(f"{self.where}: {what} of {state.name} are partial: {lost} missing; it must be whole or wholly absent")
        if not all(masters.values()):
            self._without_master.append(state)
        if not all(moments.values()):
            return False
        state.create()
        self._restored.append((state, names))
        return True

    def add_bytes(self, key: str) -> None:
        """Read an entry of bytes whose length the checkpoint knows."""
        self.entries[key] = torch.empty(self.stored[key].size, dtype=torch.uint8)  # type: ignore[union-attr]

    def check_finite(self) -> None:
        """Refuse what was read where no loss could come of it: every step would be skipped.

        Raises:
            CheckpointError: a weight, a moment or a master is NaN or infinite.
        """
        for key, entry in self.entries.items():
            kind, name = split_key(key)
            if kind == "model" and optimizer_key(MASTER, name) in self.entries:
                continue  # the master takes its place
            parts = [piece.data for piece in entry.pieces] if isinstance(entry, BlockTensor) else [entry]
            bad = sum(part.numel() - int(part.isfinite().sum()) for part in parts)
            if bad:
                raise CheckpointError(
                    f"{self.where}: {bad} of {sum(part.numel() for part in parts)} elements of {key} on this rank are NaN or infinite; the run that "
                    "saved it diverged, give an earlier checkpoint"
                )

    def finish(self) -> None:
        """Set steps, derive masters and clear padding, once the entries are read.

        Raises:
            CheckpointError: the tensors of one local parameter have taken different numbers of steps.
        """
        for state, names in self._restored:
            steps = sorted({int(self.entries[optimizer_key(STEP, name)]) for name in names})
            if len(steps) > 1:
                raise CheckpointError(
                    f"{self.where}: {state.name} is made of {', '.join(names)}, which have taken {steps} optimizer steps, but it has one counter"
                )
            state.set_step(steps[0])
        for state in self._without_master:
            state.renew_master()
        self._clear_padding()

    def _clear_padding(self) -> None:
        """Padding is not stored; it is zero everywhere, whatever the model held before."""
        for _, placement, parameters in self._weights:
            for block in placement.blocks:
                if block.canonical is None:
                    block_piece(block, parameters[block.local].detach()).data.zero_()
        for state in self._states:
            tensor = self.chunks[state.chunk][1].tensors[state.name]
            for block in tensor.blocks:
                if block.canonical is None:
                    for values in state.tensors().values():
                        for piece in flat_pieces(block, tensor.shape, state.start, values.detach().view(-1)):
                            piece.data.zero_()
