"""Attention to a block of the keys: plain, and by flash-attn, for which a stand-in computes from its documented formulas and records."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tangram.platform.operators import attention_block, attention_block_backward, blocks, operator


class FlashTensor(Tensor):
    """Counts as a tensor on cuda."""


class StandIn(ModuleType):
    """The two functions of flash-attn 2.7 that take packed rows [tokens, heads, d]."""

    def __init__(self) -> None:
        super().__init__("flash_attn.flash_attn_interface")
        self.calls: list[tuple[str, list[int], list[int], bool]] = []

    def _segments(self, name: str, ends: tuple[Tensor, Tensor], longest: tuple[int, int], causal: bool) -> Iterator[tuple[slice, slice]]:
        bounds = [each.tolist() for each in ends]
        assert all(each.dtype == torch.int32 for each in ends)
        assert [max(b - a for a, b in pairwise(each)) for each in bounds] == list(longest)
        self.calls.append((name, *bounds, causal))
        yield from zip(*([slice(a, b) for a, b in pairwise(each)] for each in bounds), strict=True)

    def _weights(self, query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
        key = key.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf) if causal else scores

    def _wrapped_flash_attn_varlen_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cq: Tensor, ck: Tensor, mq: int, mk: int, *, dropout_p: float, softmax_scale: float, causal: bool
    ) -> tuple[Tensor, ...]:
        out, total = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
        for rows, columns in self._segments("forward", (cq, ck), (mq, mk), causal):
            scores = self._weights(q[rows], k[columns], softmax_scale, causal)
            total[:, rows] = scores.logsumexp(-1)
            values = v[columns].float().repeat_interleave(q.shape[1] // v.shape[1], 1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
        return out, total, torch.empty(0), torch.empty(0)

    def _wrapped_flash_attn_varlen_backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **how: Any) -> None:
        out, lse, dq, dk, dv, cq, ck, mq, mk = rest
        assert (how["window_size_left"], how["window_size_right"], how["softcap"], how["dropout_p"]) == (-1, -1, 0.0, 0.0)
        heads, groups = q.shape[1], k.shape[1]
        for rows, columns in self._segments("backward", (cq, ck), (mq, mk), how["causal"]):
            weights = (self._weights(q[rows], k[columns], how["softmax_scale"], how["causal"]) - lse[:, rows, None]).exp()
            values = v[columns].float().repeat_interleave(heads // groups, 1)
            keys = k[columns].float().repeat_interleave(heads // groups, 1)
            along = (dout[rows].float() * out[rows].float()).sum(-1).t()[..., None]
            scores = weights * (torch.einsum("qhd,khd->hqk", dout[rows].float(), values) - along) * how["softmax_scale"]
            dq[rows] = torch.einsum("hqk,khd->qhd", scores, keys).to(q.dtype)
            for whole, weight, other in ((dk, scores, q), (dv, weights, dout)):
                each = torch.einsum("hqk,qhd->khd", weight, other[rows].float())
                whole[columns] = each.unflatten(1, (groups, -1)).sum(2).to(q.dtype)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in, package = StandIn(), ModuleType("flash_attn")
    package.flash_attn_interface = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", stand_in)
    monkeypatch.setattr(operator, "device_type", lambda tensor: "cuda" if isinstance(tensor, FlashTensor) else tensor.device.type)
    operator._load.cache_clear()
    yield stand_in
    operator._load.cache_clear()
    sys.modules.pop("tangram.platform.operators.flash", None)


@pytest.mark.parametrize("lengths", [None, [11], [1, 7, 3]], ids=["all keys", "causal", "packed"])
@pytest.mark.parametrize("keys", [5, 11])
def test_a_block_and_its_gradients_are_those_of_torch(lengths: list[int] | None, keys: int) -> None:
    if lengths is not None and keys != 11:
        return
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, heads, 8, generator=generator).double().requires_grad_() for n, heads in ((11, 4), (keys, 2), (keys, 2)))
    seen = torch.ones(11, keys, dtype=torch.bool)
    if lengths is not None:
        sample = torch.repeat_interleave(torch.tensor(lengths))
        seen = (sample[:, None] == sample).tril()
    expected = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)), seen, enable_gqa=True).transpose(1, 2)
    gradient = torch.randn(expected.shape, generator=generator).double()
    wanted = torch.autograd.grad(expected, (query, key, value), gradient)
    for given in ((lengths, None), (None, seen[None, None])):
        out, total = attention_block(query.detach(), key.detach(), value.detach(), *given, 8**-0.5)
        torch.testing.assert_close(out, expected)
        found = attention_block_backward(gradient, *(x.detach() for x in (query, key, value)), out, total, *given, 8**-0.5)
        torch.testing.assert_close(found, wanted)


def test_a_query_that_sees_no_key_of_the_block_adds_nothing() -> None:
    query, key, value = torch.randn(1, 2, 1, 4), torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1, 4)
    out, total = attention_block(query, key, value, None, torch.tensor([[False] * 3, [True] * 3])[None, None], 0.5)
    assert total[0, 0, 0] == -torch.inf and not out[0, 0].any() and torch.isfinite(out).all()


@pytest.mark.parametrize("lengths", [None, [1, 7, 3]], ids=["all keys", "packed"])
def test_flash_attention_is_asked_for_the_same(flash: StandIn, lengths: list[int] | None) -> None:
    """Two rows of queries against fewer keys, or causal samples; bf16, so a rounding of 2^-8 apart."""
    generator = torch.Generator().manual_seed(0)
    keys = 11 if lengths is not None else 5
    tensors = [torch.randn(2, n, heads, 8, generator=generator).bfloat16() for n, heads in ((11, 4), (keys, 2), (keys, 2), (11, 4))]
    query, key, value, gradient = tensors
    out, total = blocks.attention_block(query, key, value, lengths, None, 0.3)
    wanted = blocks.attention_block_backward(gradient, query, key, value, out, total, lengths, None, 0.3)
    query, key, value, gradient = (x.as_subclass(FlashTensor) for x in tensors)
    fused, fused_total = attention_block(query, key, value, lengths, None, 0.3)
    assert fused.dtype == torch.bfloat16
    found = attention_block_backward(gradient, query, key, value, fused, fused_total, lengths, None, 0.3)
    ends = [[0, 1, 8, 11, 12, 19, 22]] * 2 if lengths is not None else [[0, 11, 22], [0, 5, 10]]
    assert flash.calls == [(name, *ends, lengths is not None) for name in ("forward", "backward")]
    for mine, right in zip((fused, fused_total, *found), (out, total, *wanted), strict=True):
        torch.testing.assert_close(mine.as_subclass(Tensor).float(), right, rtol=2**-6, atol=2**-6)


def test_flash_attention_is_left_alone_with_masks_and_in_fp32(flash: StandIn) -> None:
    query = torch.randn(1, 4, 2, 8).as_subclass(FlashTensor)
    attention_block(query, query, query, None, None, 0.3)
    attention_block(query.bfloat16(), query, query, None, torch.ones(1, 1, 4, 4, dtype=torch.bool), 0.3)
    assert not flash.calls and attention_block.fused_on("cuda") is not blocks.attention_block
