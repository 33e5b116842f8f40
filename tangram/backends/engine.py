"""What the training loop, and the run around it, know of a backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tangram.placement.table import Shape
from tangram.placement.topology import Topology

if TYPE_CHECKING:
    from tangram.checkpoints.dcp_rng import Generators
    from tangram.checkpoints.dcp_state import LocalChunk, OptimizerState
    from tangram.checkpoints.hf_directory import HFDirectory
    from tangram.checkpoints.stored_types import StoredAs
    from tangram.config.run import RunConfig

Batch = Mapping[str, Any]
"""One micro-batch as the collator makes it; see ``tangram.data.collate``."""


@dataclass(frozen=True)
class ForwardResult:
    """Loss of a global batch, the same number on every rank."""

    loss: float
    """By the run's loss type; the mean over what that type averages."""
    weight: float
    """How many of what the loss type averages (tokens, samples, micro-batches) the loss is the mean of."""
    tokens: int
    """Positions with a label, over all data-parallel ranks."""
    load_balancing: float | None = None
    """Of the training of a model whose experts are balanced by a loss: that loss without its weight, a mean over micro-batches and layers. 1 where
    all experts get the same."""
    own_loss: float | None = None
    """What this rank alone found: the sum of its micro-batches' losses over ``weight``. None: it computes none."""


@dataclass(frozen=True)
class RankNorms:
    """2-norms of the gradients that this rank alone holds, before clipping."""

    own: float
    """Of all that its optimizer updates."""
    shared: float | None = None
    """Of those among them that every rank of ``group`` has a copy of; the copies must not come apart. None: there are none."""
    group: int = 0
    """The lowest rank of those that have the same copies."""
    copied: int | None = None
    """The lowest rank of those whose optimizers hold all the same gradients. None: no other does."""


@dataclass(frozen=True)
class Copies:
    """Parameters that several ranks hold alike."""

    group: int
    """The lowest of those ranks."""
    digest: int | None
    """An int64 of their bits; see ``tangram.backends.copies``. None: no other rank holds them."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    grad_norm: float
    skipped: bool
    """True where a loss or gradient was not finite: weights, moments and schedule stay as they were."""
    rank: RankNorms | None = None
    """This rank's part, which differs from rank to rank."""


@dataclass(frozen=True)
class CanonicalTensor:
    """A local tensor under its canonical name: ``local`` equals the rectangle of the canonical tensor that starts at ``start``."""

    name: str
    start: tuple[int, ...]
    full_shape: tuple[int, ...]
    local: torch.Tensor


class Engine(Protocol):
    """An assembled model, its optimizer and the way to run them."""

    data_parallel_rank: int
    data_parallel_size: int

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before the backward pass; 1 but for fp16."""

    def forward_backward(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Run this rank's micro-batches of one global batch; gradients are final and unclipped afterwards."""

    def evaluate(self, micro_batches: Sequence[Batch]) -> ForwardResult:
        """Loss without gradients."""

    def copies(self) -> Mapping[str, Copies]:
        """What this rank holds copies of, by kind, as the step at hand has used it: between ``forward_backward`` and ``step``. Every rank names the
        same kinds, in the same order."""

    def step(self, lr: float) -> StepResult:
        """Clip, update with learning rate ``lr``, clear gradients."""

    def canonical_parameters(self) -> Iterator[CanonicalTensor]:
        """This rank's parameters."""

    def canonical_gradients(self) -> Iterator[CanonicalTensor]:
        """This rank's gradients, between ``forward_backward`` and ``step``: those of the loss that ``forward_backward`` returned."""


class RunnableEngine(Engine, Protocol):
    """What a run needs besides: to put weights in, to save and load, to feed data, and to tell what it is.

    Attributes:
        chunks: where this rank's parameters live in canonical tensors, and the parameters, to be written in place.
        canonical_shapes: name and shape of every tensor of the whole model.
        topology: the split over tensor-parallel ranks and stages.
        needs_pixels: this rank runs the vision tower.
        axes: sizes of the split that ``topology`` does not know.
        stored_as: types that checkpoints store parameters in; None: their own.
        reports_data: this rank is the one, of those with the same ``data_parallel_rank``, that lists skipped samples.
    """

    run: RunConfig
    topology: Topology
    axes: Mapping[str, int]
    needs_pixels: bool
    reports_data: bool

    @property
    def chunks(self) -> Sequence[LocalChunk]: ...

    @property
    def stored_as(self) -> StoredAs | None: ...

    @property
    def canonical_shapes(self) -> Mapping[str, Shape]: ...

    def random_weights(self, seed: int) -> None:
        """Start from random weights, the same on every split.

        Raises:
            ConfigError: nothing says how the model's weights are drawn.
        """

    def hf_directory(self, path: str) -> HFDirectory:
        """The weights of a Hugging Face directory, by canonical name.

        Raises:
            ConfigError, CheckpointError: as ``HFDirectory``.
        """

    def weights_changed(self) -> None:
        """Parameters were written to: make what derives from them follow."""

    def optimizer_state(self) -> OptimizerState:
        """The optimizer as checkpoints see it."""

    def generators(self) -> Generators | None:
        """Random generators besides torch's own."""

    def summary(self, global_batch_size: int) -> str:
        """Tables for the start of the log."""

    def close(self) -> None:
        """Leave the process group."""
