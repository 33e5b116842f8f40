"""A run of transformer layers of one component, with activation recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from tangram.models.attention import SegmentPlan


class LayerStack(MegatronModule):
    """Layers ``numbers`` (global, 0-based) of a component.

    megatron-core's TransformerBlock divides the layers over stages by itself and gives every layer one mask; here the stage's layers are
    stated and each may have its own segments.
    """

    def __init__(self, config: TransformerConfig, spec: ModuleSpec, numbers: range, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.numbers = numbers
        # core counts layers from 1.
        self.layers = nn.ModuleList(build_module(spec, config=config, layer_number=i + 1, pg_collection=groups) for i in numbers)

    def forward(self, hidden: Tensor, angles: Tensor, plans: Sequence[SegmentPlan | None]) -> Tensor:
        """Run the layers.

        Args:
            hidden: [s, b, h]; with sequence parallelism this rank's part, [s / TP, b, h].
            angles: [s, b, 1, head_dim], rotary angles.
            plans: one per layer of this stack.
        """
        # Ranks that hold different tokens must not drop alike.
        with get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext():
            return self._run(hidden, angles, plans)

    def _run(self, hidden: Tensor, angles: Tensor, plans: Sequence[SegmentPlan | None]) -> Tensor:

        def run(first: int, last: int) -> Callable[[Tensor, Tensor], Tensor]:
            def forward(hidden: Tensor, angles: Tensor) -> Tensor:
                for layer, plan in zip(self.layers[first:last], plans[first:last], strict=True):
                    hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=plan)
                return hidden

            return forward

        count = len(self.layers)
        if self.config.recompute_granularity != "full" or not self.training:
            return run(0, count)(hidden, angles)
        step = self.config.recompute_num_layers
        if self.config.recompute_method == "uniform":
            for first in range(0, count, step):
                hidden = tensor_parallel.checkpoint(run(first, min(first + step, count)), False, hidden, angles)
            return hidden
        for i in range(min(step, count)):
            hidden = tensor_parallel.checkpoint(run(i, i + 1), False, hidden, angles)
        return run(min(step, count), count)(hidden, angles)
