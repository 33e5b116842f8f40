"""megatron-core's named random generators, which dropout inside tensor-parallel regions draws from, as checkpoints see them."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class MegatronGenerators:
    """``Generators`` of ``megatron.core.tensor_parallel.random``'s tracker."""

    def get(self) -> dict[str, torch.Tensor]:
        """Name -> state, uint8."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        return {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}

    def set(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore them."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        get_cuda_rng_tracker().set_states(dict(states))
