"""How one sequence is divided over context-parallel ranks and, with sequence parallelism, over tensor-parallel ranks.

The context axis comes first. Its ranks form ``ring`` groups of ``context / ring`` Ulysses ranks each; context rank c is Ulysses rank
``c % (context / ring)`` of ring rank ``c // (context / ring)``. Of 2 x ring equal parts ring rank r holds parts r and 2 x ring - 1 - r, so that
under a causal mask all do the same work (Zhu 2024, zigzag ring attention; Megatron-LM ``get_batch_on_this_cp_rank``). Within a ring
rank the Ulysses ranks hold consecutive parts of what it holds (Jacobs et al. 2023), and within a context rank the tensor-parallel ranks do
(Korthikanti et al. 2022). What does not divide is padded at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class SequenceSplit:
    """One rank's part of a sequence.

    Args:
        length: tokens of the sequence, without padding.
        context: context-parallel size.
        ring: how many of the context ranks attend in a ring; 1: all by Ulysses; ``context``: all in the ring.
        tensor: tensor-parallel size where activations are divided along the sequence, else 1.
        unit: so many consecutive tokens are never parted.
    """

    length: int
    context: int = 1
    context_rank: int = 0
    ring: int = 1
    tensor: int = 1
    tensor_rank: int = 0
    unit: int = 1

    def __post_init__(self) -> None:
        assert self.length > 0, f"a sequence of {self.length} tokens"
        assert self.context % self.ring == 0, f"{self.context} context ranks do not make {self.ring} ring ranks"
        assert 0 <= self.context_rank < self.context, f"context rank {self.context_rank} of {self.context}"
        assert 0 <= self.tensor_rank < self.tensor, f"tensor rank {self.tensor_rank} of {self.tensor}"

    @property
    def padded(self) -> int:
        """Length with padding: each rank, and each half of a ring rank's part, holds equally many units."""
        step = self.unit * self.context * self.tensor * (2 if self.ring > 1 else 1)
        return -(-self.length // step) * step

    @property
    def context_length(self) -> int:
        """Tokens of each context rank."""
        return self.padded // self.context

    @property
    def local_length(self) -> int:
        """Tokens of each rank."""
        return self.context_length // self.tensor

    @cached_property
    def order(self) -> Tensor:
        """[padded], the global positions of all context ranks' tokens, rank after rank."""
        if self.ring == 1:
            return torch.arange(self.padded)
        parts = torch.arange(self.padded).chunk(2 * self.ring)
        return torch.cat([part for r in range(self.ring) for part in (parts[r], parts[-1 - r])])

    def context_positions(self) -> Tensor:
        """[padded / context], the global positions of this context rank's tokens."""
        return self.order.chunk(self.context)[self.context_rank]

    def positions(self) -> Tensor:
        """[padded / context / tensor], the global positions of this rank's tokens."""
        return self.context_positions().chunk(self.tensor)[self.tensor_rank]

    def pad(self, x: Tensor, dim: int, value: float = 0) -> Tensor:
        """``x``, ``length`` long along ``dim``, with ``value`` after its end up to ``padded``."""
        assert x.shape[dim] == self.length, f"axis {dim} of {tuple(x.shape)} is not {self.length} long"
        missing = self.padded - self.length
        if not missing:
            return x
        return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, missing), value=value)

    def take_context(self, x: Tensor, dim: int) -> Tensor:
        """This context rank's part of ``x``, which is ``padded`` long along ``dim``."""
        assert x.shape[dim] == self.padded, f"axis {dim} of {tuple(x.shape)} is not padded to {self.padded}"
        if self.context == 1:
            return x
        if self.ring == 1:
            return x.chunk(self.context, dim)[self.context_rank]
        return x.index_select(dim, self.context_positions().to(x.device))

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of ``x``, which is ``padded`` long along ``dim``."""
        return self.take_context(x, dim).chunk(self.tensor, dim)[self.tensor_rank]

    def restore(self, gathered: Tensor, dim: int) -> Tensor:
        """The parts of all context ranks, one after the other along ``dim``, in the sequence's order and without padding."""
        assert gathered.shape[dim] == self.padded, f"axis {dim} of {tuple(gathered.shape)} is not {self.padded} long"
        if self.ring > 1:
            gathered = gathered.index_select(dim, self.order.argsort().to(gathered.device))
        return gathered.narrow(dim, 0, self.length)

    def context_local_of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens stand in this context rank's part.

        Args:
            positions: [n], global positions.

        Returns:
            Bool [n], whether each token is here, and the local positions [k] of those that are, in the order given.
        """
        return self._find(positions, 0, self.context_length)

    def local_of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens stand in this rank's part; as ``context_local_of``."""
        return self._find(positions, self.tensor_rank * self.local_length, self.local_length)

    def _find(self, positions: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        """``first`` and ``count`` say which part of the context rank's."""
        places = self.order.argsort().to(positions.device)[positions] if self.ring > 1 else positions
        places = places - self.context_rank * self.context_length - first
        here = (places >= 0) & (places < count)
        return here, places[here]
