"""A run of transformer layers of one component, with recomputation and offload of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from tangram.models.attention import SegmentPlan
from tangram.models.config import ComponentConfig
from tangram.models.experts import Routing
from tangram.models.media import add_rows
from tangram.platform.offload.chain import Chain


class LayerStack(MegatronModule):
    """Layers ``numbers`` (global, 0-based) of a component.

    megatron-core's TransformerBlock divides the layers over stages by itself and gives every layer one mask; here the stage's layers are
    stated and each may have its own segments. A layer with a merger (``add_merger``) gives a DeepStack feature besides its output.
    """

    def __init__(self, config: ComponentConfig, spec: ModuleSpec, numbers: range, groups: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.numbers = numbers
        # One for each run of layers: micro-batches pass through it, forward and backward, in one order, whatever the schedule.
        self.offload = Chain() if config.offload_activations else None
        # core counts layers from 1.
        self.layers = nn.ModuleList(build_module(spec, config=config, layer_number=i + 1, pg_collection=groups) for i in numbers)

    def add_merger(self, number: int, merger: nn.Module) -> None:
        """Let layer ``number`` (global) give ``merger(output)`` besides its output."""
        self.layers[number - self.numbers.start].deepstack_layer = merger

    def forward(
        self,
        hidden: Tensor,
        angles: Tensor | None,
        plans: Sequence[SegmentPlan | None],
        features: Sequence[Tensor] = (),
        places: Tensor | None = None,
        routing: Routing | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers.

        Args:
            hidden: [s, b, h]; with sequence parallelism this rank's part, [s / TP, b, h].
            angles: [s, b, 1, head_dim], rotary angles; None: positions are in the hidden states already.
            plans: one for each of the stack's first layers; those after them take no part.
            features: what is added after the first layers of this stack, one [n, h] for each.
            places: [n], where in ``hidden``; see ``add_rows``.
            routing: what experts must know of the micro-batch.

        Returns:
            Hidden states [s, b, h], and what the mergers gave, in the order of their layers.
        """
        # Ranks that hold different tokens must not drop alike.
        with get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext():
            return self._run(hidden, angles, plans, features, places, routing)

    def _run(
        self,
        hidden: Tensor,
        angles: Tensor | None,
        plans: Sequence[SegmentPlan | None],
        features: Sequence[Tensor],
        places: Tensor | None,
        routing: Routing | None,
    ) -> tuple[Tensor, list[Tensor]]:
        def run(first: int, last: int) -> Callable[..., tuple[Tensor, ...]]:
            def forward(hidden: Tensor, angles: Tensor | None, *features: Tensor) -> tuple[Tensor, ...]:
                made = []
                for layer, plan, rows in zip_longest(self.layers[first:last], plans[first:last], features):
                    hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=plan, padding_mask=routing)
                    merger = getattr(layer, "deepstack_layer", None)
                    if merger is not None:
                        made.append(merger(hidden))
                    if rows is not None:
                        assert places is not None, "features need places"
                        hidden = add_rows(hidden, places, rows)
                return (hidden, *made)

            return forward

        made: list[Tensor] = []
        for first, last, recompute in self._runs(len(plans)):
            arguments = (hidden, angles, *features[first:last])
            with self._saving(first, last, arguments, plans, places, routing):
                if recompute:
                    hidden, *more = tensor_parallel.checkpoint(run(first, last), False, *arguments)
                else:
                    hidden, *more = run(first, last)(*arguments)
            made += more
        return hidden, made

    def _saving(
        self,
        first: int,
        last: int,
        arguments: Sequence[Tensor | None],
        plans: Sequence[SegmentPlan | None],
        places: Tensor | None,
        routing: Routing | None,
    ) -> AbstractContextManager[None]:
        """Where what these layers save waits for the backward pass: on the host, if it is to. What all layers share stays."""
        if self.offload is None:
            return nullcontext()
        shared = [tensor for plan in plans[first:last] if plan is not None for tensor in plan.tensors()]
        return self.offload.saving(self.layers[first:last], [*arguments, *shared, places, routing.padding if routing is not None else None])

    def _runs(self, count: int) -> Iterator[tuple[int, int, bool]]:
        """Of the first ``count`` layers: first and last (local, exclusive) of what runs at once, and whether its activations are computed again."""
        step = self.config.recompute_num_layers
        full = self.config.recompute_granularity == "full" and self.training
        uniform = full and self.config.recompute_method == "uniform"
        recomputed = count if uniform else min(step, count) if full else 0
        size = step if uniform else 1
        for first in range(0, recomputed, size):
            yield first, min(first + size, recomputed), True
        # What is offloaded goes layer by layer.
        size = 1 if self.offload is not None else count
        for first in range(recomputed, count, max(size, 1)):
            yield first, min(first + size, count), False
