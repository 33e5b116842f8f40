"""Ring attention: blocks of keys and values travel round a ring of ranks while each attends to the block that it has.

What the blocks give is merged by their log-sum-exp, in fp32. In the backward pass keys and values travel once more, and their gradients with
them. Sources: Liu et al. 2023 (Ring Attention with Blockwise Transformers); Dao 2023 (FlashAttention-2) for the gradients of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tangram.models.context.tiles import Tile
from tangram.platform.operators import ring_blocks


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    tiles: Sequence[Sequence[Tile]],
    scale: float | None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention over the keys of all ranks of ``group``. Collective, forward and backward.

    Args:
        query: [s, b, heads, d], of this rank's tokens.
        key, value: [s, b, groups, d], of the same tokens; ``groups`` divides ``heads``.
        tiles: what this rank's queries see of each rank's keys, see ``ring_tiles``.
        scale: of the scores; None: ``d ** -0.5``.
        backend: what computes blocks, see ``ring_blocks``.

    Returns:
        [s, b, heads, d].

    Raises:
        ConfigError: as ``ring_blocks``.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    blocks = ring_blocks(backend, query, any(tile.mask is not None for owner in tiles for tile in owner))
    out: Tensor = _Ring.apply(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), group, tiles, scale, blocks)
    return out.transpose(0, 1)


class _Ring(torch.autograd.Function):
    """All tensors [b, s, heads, d]; log-sum-exps [b, heads, s]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: dist.ProcessGroup,
        tiles: Sequence[Sequence[Tile]],
        scale: float,
        blocks: tuple[Callable[..., Any], Callable[..., Any]],
    ) -> Tensor:
        attention_block, _ = blocks
        batch, length, heads, _ = query.shape
        sums = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(query.shape, dtype=sums, device=query.device)
        total = torch.full((batch, heads, length), -torch.inf, dtype=sums, device=query.device)
        size, rank = group.size(), group.rank()
        block = torch.stack([key, value])
        for step in range(size):
            coming = _PassOn(block, group) if step < size - 1 else None
            for tile in tiles[(rank - step) % size]:
                rows, columns = slice(*_bounds(tile.queries)), slice(*_bounds(tile.keys))
                part = attention_block(query[:, rows], block[0][:, columns], block[1][:, columns], tile.lengths, tile.mask, scale)
                _merge(out[:, rows], total[..., rows], *part)
            block = coming.received() if coming is not None else block
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.way = group, tiles, scale, blocks
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        group, tiles, scale, (_, attention_block_backward) = ctx.way
        size, rank = group.size(), group.rank()
        of_query = torch.zeros(query.shape, dtype=total.dtype, device=query.device)
        block = torch.stack([key, value])
        returning: _PassOn | None = None
        for step in range(size):
            coming = _PassOn(block, group) if step < size - 1 else None
            of_block = torch.zeros(block.shape, dtype=total.dtype, device=block.device)
            for tile in tiles[(rank - step) % size]:
                rows, columns = slice(*_bounds(tile.queries)), slice(*_bounds(tile.keys))
                parts = attention_block_backward(
                    gradient[:, rows],
                    query[:, rows],
                    block[0][:, columns],
                    block[1][:, columns],
                    out[:, rows],
                    total[..., rows],
                    tile.lengths,
                    tile.mask,
                    scale,
                )
                for whole, part in zip((of_query[:, rows], of_block[0][:, columns], of_block[1][:, columns]), parts, strict=True):
                    whole += part
            # The gradients of this very block, as the ranks before us found them, arrive from the previous one.
            of_block = of_block if returning is None else of_block + returning.received()
            returning = _PassOn(of_block, group)
            block = coming.received() if coming is not None else block
        assert returning is not None
        of_key, of_value = returning.received().unbind()
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None, None


def _bounds(run: tuple[int, int]) -> tuple[int, int]:
    return run[0], run[0] + run[1]


def _merge(out: Tensor, total: Tensor, more: Tensor, more_total: Tensor) -> None:
    """Add keys to a softmax, in place.

    Args:
        out, more: [b, s, heads, d], outputs over two disjoint sets of keys.
        total, more_total: [b, heads, s], the logarithms of their sums of exponentials; -inf for no key at all.
    """
    both = torch.logaddexp(total, more_total)
    for tensor, share in ((out, total - both), (more := more.to(out.dtype), more_total - both)):
        tensor.mul_(share.exp().transpose(1, 2)[..., None])
    out.add_(more)
    total.copy_(both)


class _PassOn:
    """A tensor on its way to the next rank of the ring, and the previous rank's on its way here. ``received`` waits for both."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        self._sent, self._buffer = tensor, torch.empty_like(tensor)
        following, previous = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._work = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, self._sent, following, group), dist.P2POp(dist.irecv, self._buffer, previous, group)]
        )

    def received(self) -> Tensor:
        for work in self._work:
            work.wait()
        return self._buffer
