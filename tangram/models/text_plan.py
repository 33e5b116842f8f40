"""Which tokens of a micro-batch's text see each other, on one rank or over context-parallel ranks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise, starmap

import torch
from torch import Tensor
from torch.nn import functional as F

from tangram.models.attention import SegmentPlan
from tangram.models.context import ContextGroups, ring_tiles
from tangram.models.sequence import SequenceSplit


def text_plan(
    split: SequenceSplit,
    context: ContextGroups | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    device: torch.device,
) -> SegmentPlan | None:
    """The plan of all text layers. None: causality is enough.

    Args:
        context: of a sequence that ranks share.
        attention_mask: [b, s] or bool [b, s, s], as ``VLMModel.forward``; not looked at in a packed row.
        cu_seqlens: [k + 1], real lengths of a packed row's samples, added up; None: each row is one sample.
        cu_seqlens_padded: [k + 1], where each begins and the row ends.
    """
    lengths, mask = None, None
    if cu_seqlens is None:
        mask = _mask(attention_mask, split.padded)
    else:
        assert cu_seqlens_padded is not None, "cu_seqlens_padded goes with cu_seqlens"
        lengths = packed_lengths(cu_seqlens.tolist(), cu_seqlens_padded.tolist(), split.padded)
    if context is not None and context.ring is not None:
        return SegmentPlan(context=context, tiles=ring_tiles(split.padded, split.ring, context.ring.rank(), lengths, mask))
    if lengths is not None:
        plan = SegmentPlan.from_lengths(lengths, device)
    elif mask is not None or context is not None:
        plan = SegmentPlan(mask=mask)
    else:
        return None
    plan.context = context
    return plan


def packed_lengths(cu_seqlens: Sequence[int], cu_seqlens_padded: Sequence[int], length: int) -> list[int]:
    """Lengths of the segments of a row of ``length``: no token sees another sample, and a padding token sees itself alone."""
    lengths: list[int] = []
    real, padded = (starmap(operator.sub, ((end, start) for start, end in pairwise(ends))) for ends in (cu_seqlens, cu_seqlens_padded))
    for tokens, places in zip(real, padded, strict=True):
        lengths += [tokens, *[1] * (places - tokens)]
    return lengths + [1] * (length - cu_seqlens_padded[-1])


def _mask(attention_mask: Tensor | None, size: int) -> Tensor | None:
    """Bool [b, 1, size, size] where a mask has holes; causality alone is enough for padding on the right, which no real token ever sees.

    ``size`` is the length with padding that was added after the end.
    """
    if attention_mask is None:
        return None
    added = size - attention_mask.shape[-1]
    if attention_mask.dim() == 2:
        if bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all()):
            return None
        causal = torch.ones(size, size, dtype=torch.bool, device=attention_mask.device).tril()
        seen = causal & F.pad(attention_mask.bool(), (0, added))[:, None, :]
    else:
        seen = F.pad(attention_mask.bool(), (0, added, 0, added))
    # A padding token sees itself, so that no row of the softmax is empty.
    seen = seen | torch.eye(size, dtype=torch.bool, device=seen.device)
    return seen[:, None]
