"""What ranks of ``test_context.py`` do: attention over a sequence that they share, against torch's own over the whole. Without a ring a stand-in for
flash-attn attends."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangram.models.context import ContextGroups, ring_tiles
from tangram.models.context.ring import ring_attention
from tangram.models.sequence import SequenceSplit
from tangram.platform.operators import Segments, segment_attention
from tests.largest import largest
from tests.platform.attention_libraries import CALLS, install

HEAD = 8


def join() -> None:
    dist.init_process_group("gloo")


def groups_of(context: int, ring: int) -> ContextGroups:
    """Groups of consecutive ranks for Ulysses, and across them for the ring."""
    ulysses, rank = context // ring, dist.get_rank()
    rows = [list(range(r * ulysses, (r + 1) * ulysses)) for r in range(ring)]
    inner = [dist.new_group(row) for row in rows]
    outer = [dist.new_group(list(column)) for column in zip(*rows, strict=True)]
    return ContextGroups(
        whole=dist.group.WORLD,
        ulysses=inner[rank // ulysses] if ulysses > 1 else None,
        ring=outer[rank % ulysses] if ring > 1 else None,
    )


def seen_by(length: int, samples: list[int] | None, mask: Tensor | None) -> Tensor:
    if mask is not None:
        return mask
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if samples is not None:
        sample = torch.bucketize(torch.arange(length), torch.tensor(list(accumulate(samples))), right=True)
        seen &= sample[:, None] == sample
    return seen


def worst_error(groups: ContextGroups, ring: int, case: dict[str, object]) -> float:
    """Largest norm-wise error of the output and the gradients of query, key and value."""
    length, batch, heads, kv = case["length"], case["batch"], case["heads"], case["groups"]
    samples, left = case.get("samples"), case.get("left", 0)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(length, batch, count, HEAD, generator=generator, dtype=torch.float64).requires_grad_() for count in (heads, kv, kv)]
    weights = torch.randn(length, batch, heads, HEAD, generator=generator, dtype=torch.float64)
    size = groups.whole.size()
    split = SequenceSplit(length, context=size, context_rank=dist.get_rank(), ring=ring)
    missing = split.padded - length
    mask = None
    if left:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[:, :left] = False
        mask |= torch.eye(length, dtype=torch.bool)
    if case.get("ahead"):
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[0, -1] = True
    query, key, value = (part.permute(1, 2, 0, 3) for part in whole)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, seen_by(length, samples, mask), enable_gqa=True).permute(2, 0, 1, 3)
    (expected * weights).sum().backward()

    own = [split.take_context(split.pad(part.detach(), 0), 0).requires_grad_() for part in whole]
    padded_samples = [*samples, *[1] * missing] if samples is not None else None
    if mask is not None:
        mask = nn.functional.pad(mask, (0, missing, 0, missing)) | torch.eye(split.padded, dtype=torch.bool)
        mask = mask[None, None]
    moved = groups.share_heads(*own)
    if groups.ring is not None:
        out = ring_attention(*moved, groups.ring, ring_tiles(split.padded, ring, groups.ring.rank(), padded_samples, mask), None)
    else:
        segments = Segments(tuple(padded_samples), torch.device("cpu")) if padded_samples is not None else None
        backend = "torch" if mask is not None else "flash"
        out = segment_attention(*moved, segments, mask, 0.0, True, None, backend)
    out = groups.share_tokens(out)
    (out * split.take_context(split.pad(weights, 0), 0)).sum().backward()
    real = split.context_positions() < length
    places = split.context_positions()[real]
    pairs = [(out.detach(), expected.detach()), *((mine.grad, part.grad) for mine, part in zip(own, whole, strict=True))]
    return largest(float((found[real] - wanted[places]).norm() / wanted.norm()) for found, wanted in pairs)


CASES = {
    "divides": {"length": 24, "batch": 2, "heads": 4, "groups": 4},
    "does not divide, grouped queries": {"length": 29, "batch": 2, "heads": 4, "groups": 2},
    "one key head": {"length": 17, "batch": 1, "heads": 4, "groups": 1},
    "packed": {"length": 37, "batch": 1, "heads": 4, "groups": 2, "samples": [3, 1, 9, 1, 1, 17, 5]},
    "packed, one sample is most": {"length": 31, "batch": 1, "heads": 4, "groups": 2, "samples": [1, 29, 1]},
    "padding on the left": {"length": 21, "batch": 2, "heads": 4, "groups": 2, "left": 9},
    "the first token sees the last": {"length": 24, "batch": 2, "heads": 4, "groups": 2, "ahead": True},
    "shorter than the ranks": {"length": 3, "batch": 1, "heads": 4, "groups": 2},
}


def attend(rings: list[int]) -> dict[str, float]:
    join()
    install(pytest.MonkeyPatch(), "flash")
    size, found = dist.get_world_size(), {}
    for ring in rings:
        groups = groups_of(size, ring)
        for name, case in CASES.items():
            wide = dict(case)
            ulysses = size // ring
            if ulysses == 3:
                wide |= {"heads": 6, "groups": 3 if case["groups"] != 1 else 1}
            CALLS.clear()
            found[f"{size} ranks, ring {ring}: {name}"] = worst_error(groups, ring, wide)
            assert len(CALLS) == (ring == 1 and not {"left", "ahead"} & set(case))
    return found
