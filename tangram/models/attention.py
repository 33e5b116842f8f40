"""Core attention over segments: what megatron-core has only with TransformerEngine.

A sequence may hold several segments that must not see each other: frames or windows of a vision encoder, samples of a packed row.
``SegmentPlan`` says where they lie; it is made once per micro-batch and shared by all layers. megatron-core hands it through as
``packed_seq_params``; because the plan keeps the ``[s, b, h, d]`` layout, core's rotary code treats the sequence as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from tangram.models.context import ContextGroups, Tile
from tangram.models.context.ring import ring_attention
from tangram.platform.operators import Segments, segment_attention


@dataclass
class SegmentPlan(PackedSeqParams):
    """How attention is restricted.

    Args:
        segments: that no token sees beyond; None: each row is one.
        mask: bool [b, 1, s, s], True where a query may see a key; it replaces causality. Only without ``segments``.
        context: ranks that share the sequence, of which all else here describes the whole; None: this rank has it all.
        tiles: of a ring of such ranks, in place of all else; see ``ring_tiles``.
    """

    qkv_format: str = "sbhd"
    segments: Segments | None = None
    mask: Tensor | None = None
    context: ContextGroups | None = None
    tiles: tuple[tuple[Tile, ...], ...] = ()

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> SegmentPlan:
        """Plan for consecutive segments of the given lengths."""
        return cls(segments=Segments(tuple(lengths), device))

    def tensors(self) -> list[Tensor]:
        """All that it holds so far, for layers share them."""
        masks = [self.mask, *(tile.mask for owner in self.tiles for tile in owner)]
        return [mask for mask in masks if mask is not None] + (self.segments.tensors() if self.segments is not None else [])


class SegmentAttention(MegatronModule):
    """Softmax attention with segments, grouped queries and masks, by the library that the component's ``attention_backend`` names.

    Takes query [s, b, heads, d] and key, value [s, b, groups, d]; gives [s, b, heads * d].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.causal = attn_mask_type == AttnMaskType.causal
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.sequence_parallel = config.sequence_parallel
        self.scale = softmax_scale
        self.backend: str = config.attention_library

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert attention_mask is None and attention_bias is None, "masks travel in the segment plan"
        plan = _as_plan(packed_seq_params)
        if plan.context is None:
            return self._attend(query, key, value, plan).flatten(2)
        query, key, value = plan.context.share_heads(query, key, value)
        if plan.context.ring is None:
            out = self._attend(query, key, value, plan)
        else:
            assert not (self.dropout and self.training), "attention over a ring has no dropout"
            out = ring_attention(query, key, value, plan.context.ring, plan.tiles, self.scale, self.backend)
        return plan.context.share_tokens(out).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan) -> Tensor:
        """[s, b, heads, d], over all tokens of the sequence."""
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads, so each drops by a generator of its own; with sequence parallelism all layers do.
        with get_cuda_rng_tracker().fork() if dropout and not self.sequence_parallel else nullcontext():
            return segment_attention(query, key, value, plan.segments, plan.mask, dropout, self.causal, self.scale, self.backend)


_WHOLE = SegmentPlan()


def _as_plan(params: PackedSeqParams | None) -> SegmentPlan:
    if params is None:
        return _WHOLE
    if not isinstance(params, SegmentPlan):
        raise TypeError(f"SegmentAttention needs a SegmentPlan, got {type(params).__name__}")
    return params
