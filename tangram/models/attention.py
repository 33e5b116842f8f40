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
from tangram.platform.operators import attention


@dataclass(frozen=True)
class SegmentGroup:
    """Segments of equal length. ``index`` [segments, length] holds the positions of their tokens."""

    index: Tensor
    length: int


@dataclass
class SegmentPlan(PackedSeqParams):
    """How attention is restricted.

    Args:
        groups: segments by length; empty: the whole sequence is one segment.
        inverse: [s], where each token stands in the concatenation of the groups; None: in order already.
        mask: bool [b, 1, s, s], True where a query may see a key; it replaces causality. Only with empty ``groups``.
        context: ranks that share the sequence, of which all else here describes the whole; None: this rank has it all.
        tiles: of a ring of such ranks, in place of all else; see ``ring_tiles``.
    """

    qkv_format: str = "sbhd"
    groups: tuple[SegmentGroup, ...] = ()
    inverse: Tensor | None = None
    mask: Tensor | None = None
    context: ContextGroups | None = None
    tiles: tuple[tuple[Tile, ...], ...] = ()

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> SegmentPlan:
        """Plan for consecutive segments of the given lengths."""
        sizes = torch.tensor(lengths, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        groups = []
        for length in sorted(set(lengths)):
            first = starts[sizes == length]
            groups.append(SegmentGroup((first[:, None] + torch.arange(length)).to(device), length))
        if len(groups) == 1:
            return cls(groups=tuple(groups))
        order = torch.cat([group.index.flatten() for group in groups])
        return cls(groups=tuple(groups), inverse=torch.argsort(order))


class SegmentAttention(MegatronModule):
    """Softmax attention by the platform's operator, with segments, grouped queries and masks.

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
            return self._attend_plan(query, key, value, plan).flatten(2)
        query, key, value = plan.context.share_heads(query, key, value)
        if plan.context.ring is None:
            out = self._attend_plan(query, key, value, plan)
        else:
            assert not (self.dropout and self.training), "attention over a ring has no dropout"
            out = ring_attention(query, key, value, plan.context.ring, plan.tiles, self.scale)
        return plan.context.share_tokens(out).flatten(2)

    def _attend_plan(self, query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan) -> Tensor:
        """[s, b, heads, d], over all tokens of the sequence."""
        if not plan.groups:
            out = self._attend(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), plan.mask)
            return out.permute(2, 0, 1, 3)
        assert query.shape[1] == 1, f"segments need one row, got {query.shape[1]}"
        out = torch.cat([self._attend_group(query, key, value, group) for group in plan.groups])
        return (out if plan.inverse is None else out.index_select(0, plan.inverse)).unsqueeze(1)

    def _attend_group(self, query: Tensor, key: Tensor, value: Tensor, group: SegmentGroup) -> Tensor:
        """[segments * length, heads, d], in the order of the group's index."""

        def gather(x: Tensor) -> Tensor:
            if group.index.numel() != x.shape[0]:
                x = x.index_select(0, group.index.flatten())
            return x.reshape(-1, group.length, *x.shape[2:]).transpose(1, 2)

        return self._attend(gather(query), gather(key), gather(value), None).transpose(1, 2).flatten(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[rows, heads, s, d] each; key and value may have fewer heads."""
        dropout = self.dropout if self.training else 0.0
        # Tensor-parallel ranks hold different heads, so each drops by a generator of its own; with sequence parallelism all layers do.
        with get_cuda_rng_tracker().fork() if dropout and not self.sequence_parallel else nullcontext():
            return attention(query, key, value, mask, dropout, self.causal, self.scale)


_WHOLE = SegmentPlan()


def _as_plan(params: PackedSeqParams | None) -> SegmentPlan:
    if params is None:
        return _WHOLE
    if not isinstance(params, SegmentPlan):
        raise TypeError(f"SegmentAttention needs a SegmentPlan, got {type(params).__name__}")
    return params
