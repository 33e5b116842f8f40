"""What a training checkpoint holds, under canonical names, and where on this rank each part of it lives.

Keys:

- ``model.<canonical>``: the parameter, as the model holds it;
- ``optimizer.exp_avg.<canonical>``, ``optimizer.exp_avg_sq.<canonical>``: Adam's moments, fp32;
- ``optimizer.momentum.<canonical>``: Muon's, in their place;
- ``optimizer.master.<canonical>``: the fp32 parameter, where the model's is of a smaller type;
- ``optimizer.step.<canonical>``: steps that the optimizer has taken with it (a number, int64);
- ``rng.<rank>``: random state of one rank.

A parameter that never got a gradient has no moments and no step; a frozen one has its ``model`` entry alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tangram.checkpoints.dcp_blocks import BlockTensor, Piece, block_piece, flat_pieces
from tangram.errors import CheckpointError
from tangram.placement.blocks import LocalTensor, Placement, check_names
from tangram.placement.table import Shape
from tangram.placement.topology import Chunk

ADAM = ("exp_avg", "exp_avg_sq")
MUON = ("momentum",)
OPTIMIZERS = {ADAM: "Adam", MUON: "Muon"}
"""Moments that an optimizer keeps of a parameter, and its name."""
MOMENTS = (*ADAM, *MUON)
MASTER = "master"
STEP = "step"

LocalChunk = tuple[Chunk, Placement, Mapping[str, torch.nn.Parameter]]
"""One model chunk of this rank, its placement and its parameters by local name."""


def model_key(canonical: str) -> str:
    return f"model.{canonical}"


def optimizer_key(kind: str, canonical: str) -> str:
    return f"optimizer.{kind}.{canonical}"


def split_key(key: str) -> tuple[str, str]:
    """``(kind, canonical name)`` of a key; kind is ``model``, ``rng``, ``master``, ``step`` or one of ``MOMENTS``.

    Raises:
        CheckpointError: not a key of a training checkpoint.
    """
    section, _, rest = key.partition(".")
    if section in ("model", "rng") and rest:
        return section, rest
    kind, _, name = rest.partition(".")
    if section == "optimizer" and kind in (*MOMENTS, MASTER, STEP) and name:
        return kind, name
    raise CheckpointError(f"unexpected entry {key!r}; entries start with model., optimizer. or rng.")


class ParameterState(Protocol):
    """Optimizer state of one local parameter, or of a flat stretch of it, as a backend's optimizer holds it."""

    chunk: int
    """Index into the rank's chunks."""
    name: str
    """Local parameter name."""
    start: int
    """First element of the flattened local parameter that this rank's optimizer holds."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Which its optimizer keeps: a key of ``OPTIMIZERS``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of ``moments`` and ``master`` that exist, flat or in the parameter's shape, sharing the optimizer's memory."""

    @property
    def step(self) -> int | None:
        """Steps taken; None before the first."""

    def create(self) -> None:
        """Make the moments exist, to be loaded into."""

    def set_step(self, step: int) -> None:
        """Continue as after ``step`` steps; the moments exist."""

    def forget(self) -> None:
        """Drop moments and step, as before the first step."""

    def renew_master(self) -> None:
        """Make the master, if there is one, equal to the parameter."""


class OptimizerState(Protocol):
    """A backend's optimizer as checkpoints see it."""

    def parameters(self, *, loading: bool = False) -> Sequence[ParameterState]:
        """Everything that this rank's optimizer updates. Frozen parameters are not among them.

        Args:
            loading: with the masters of all that could read one, also where none would be saved.
        """

    def synchronize(self) -> None:
        """Make the model's parameters on every rank those of the last step; a collective call where updates are gathered late."""

    def scaler_state(self) -> dict[str, float]:
        """State of the fp16 loss scaler; empty without one."""

    def load_scaler_state(self, state: Mapping[str, float]) -> None:
        """Restore it."""


@dataclass
class LocalState:
    """This rank's part of a checkpoint: entries that share memory with the model and the optimizer."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Key -> BlockTensor."""
    steps: dict[str, int] = field(default_factory=dict)
    """Canonical name -> optimizer steps taken."""


def _check_chunk(placement: Placement, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    where = f"model chunk of pipeline rank {placement.chunk.pp_rank}, tensor rank {placement.tp_rank}"
    check_names(list(parameters), list(placement.tensors), where)
    for name, tensor in placement.tensors.items():
        if tuple(parameters[name].shape) != tensor.shape:
            raise CheckpointError(f"{where}: {name} has shape {tuple(parameters[name].shape)}, its placement says {tensor.shape}")


def _gather(found: Iterable[tuple[str, str, Piece]], shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for key, canonical, piece in found:
        pieces[key, canonical].append(piece)
    return {key: BlockTensor(shapes[canonical], parts) for (key, canonical), parts in pieces.items()}


def model_state(chunks: Sequence[LocalChunk], shapes: Mapping[str, Shape], *, saving: bool) -> dict[str, torch.Tensor]:
    """``model.`` entries of this rank.

    Args:
        shapes: canonical name -> full shape, of the whole model.
        saving: leave out tied copies: their owner writes them. Loading fills them like any other.

    Raises:
        CheckpointError, PlacementError: a parameter is not as its placement says.
    """

    def parts() -> Iterator[tuple[str, str, Piece]]:
        for _, placement, parameters in chunks:
            _check_chunk(placement, parameters)
            for tensor in placement.tensors.values():
                if saving and tensor.rule.tied:
                    continue
                for block in tensor.blocks:
                    if block.canonical is not None:
                        yield model_key(block.canonical), block.canonical, block_piece(block, parameters[tensor.name].detach())

    return _gather(parts(), shapes)


def canonical_names(tensor: LocalTensor) -> list[str]:
    """The canonical tensors that a local parameter holds parts of."""
    return sorted({block.canonical for block in tensor.blocks if block.canonical is not None})


def optimizer_state(chunks: Sequence[LocalChunk], states: Iterable[ParameterState], shapes: Mapping[str, Shape], *, saving: bool) -> LocalState:
    """``optimizer.`` entries of this rank, of the state that exists.

    Args: as ``model_state``.

    Raises:
        CheckpointError: a parameter has one of its moments and lacks another, or two parts of one canonical tensor have taken different numbers of
            steps.
    """
    local = LocalState()
    found: list[tuple[str, str, Piece]] = []
    for state in states:
        _, placement, _ = chunks[state.chunk]
        tensor = placement.tensors[state.name]
        if saving and tensor.rule.tied:
            continue
        held = state.tensors()
        missing = [kind for kind in state.moments if kind not in held]
        if missing and (len(missing) < len(state.moments) or state.step is not None):
            raise CheckpointError(f"optimizer state of {state.name} is partial: {', '.join(missing)} missing; it must be whole or wholly absent")
        for kind, values in held.items():
            for block in tensor.blocks:
                if block.canonical is None:
                    continue
                for piece in flat_pieces(block, tensor.shape, state.start, values.detach().view(-1)):
                    found.append((optimizer_key(kind, block.canonical), block.canonical, piece))
        if state.step is not None:
            for canonical in canonical_names(tensor):
                known = local.steps.setdefault(canonical, state.step)
                if known != state.step:
                    raise CheckpointError(f"optimizer state of {canonical}: one part has taken {known} steps, another {state.step}")
    local.tensors = _gather(found, shapes)
    return local


def step_entries(steps: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """``optimizer.step.`` entries."""
    return {optimizer_key(STEP, canonical): torch.tensor(step) for canonical, step in steps.items()}
