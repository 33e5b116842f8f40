"""Linears of many groups at once: every kernel gives what a loop of plain linears gives, forward and backward, groups without rows included.

TransformerEngine and torch_npu are stand-ins that compute plainly, by the documented meaning of what they are given, and record it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tangram.config.experts import runs_grouped
from tangram.errors import ConfigError
from tangram.families.qwen3_vl_moe.config import Qwen3MoeTextDecoderConfig
from tangram.platform import CudaPlatform
from tangram.platform.operators import grouped, grouped_linear, operator, plain

COUNTS = [3, 0, 5, 1]


class CudaTensor(Tensor):
    """Counts as a tensor on cuda."""


class NpuTensor(Tensor):
    """Counts as a tensor on the npu."""


class TransformerEngine(ModuleType):
    """``GroupedLinear``: parameters ``weight0``, ``weight1``, ..., each [out, in], each for its own run of rows."""

    def __init__(self) -> None:
        super().__init__("transformer_engine.pytorch")
        calls = self.calls = []  # type: ignore[var-annotated]

        class GroupedLinear(nn.Module):
            def __init__(self, num_gemms: int, in_features: int, out_features: int, *, bias: bool, params_dtype: torch.dtype, device: str) -> None:
                super().__init__()
                assert not bias
                self.bias0 = torch.empty(0, device=device)
                for i in range(num_gemms):
                    self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device)))

            def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
                assert isinstance(inp, CudaTensor) and self.bias0.device == inp.device
                weights = [getattr(self, f"weight{i}") for i in range(len(m_splits))]
                calls.append((m_splits, tuple(weights[0].shape), [weight.data_ptr() for weight in weights]))
                return torch.cat([rows @ weight.T for rows, weight in zip(inp.split(m_splits), weights, strict=True)])

        self.GroupedLinear = GroupedLinear


class TorchNpu(ModuleType):
    """``npu_grouped_matmul`` for the two group types of training."""

    def __init__(self) -> None:
        super().__init__("torch_npu")
        self.calls: list[tuple[Any, ...]] = []

    def npu_grouped_matmul(
        self, x: list[Tensor], weight: list[Tensor], *, group_list: Tensor, split_item: int, group_type: int, group_list_type: int
    ) -> list[Tensor]:
        assert group_list.dtype == torch.int64 and (split_item, group_list_type) == (3, 1)
        counts = group_list.tolist()
        self.calls.append((group_type, counts, tuple(x[0].shape), [tuple(one.shape) for one in weight]))
        if group_type == 0:
            return [torch.cat([rows @ one for rows, one in zip(x[0].split(counts), weight, strict=True)])]
        assert group_type == 2
        return [torch.stack([left @ right for left, right in zip(x[0].split(counts, 1), weight[0].split(counts), strict=True)])]


def draw(dtype: torch.dtype = torch.float32, inside: int = 16, out: int = 24, counts: Sequence[int] = COUNTS) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(counts), inside, generator=generator).to(dtype).requires_grad_()
    return tokens, [torch.randn(out, inside, generator=generator).to(dtype).requires_grad_() for _ in counts]


def same(tokens: Tensor, weights: list[Tensor], counts: Sequence[int], given: Tensor, atol: float = 1e-6) -> None:
    """``given`` is what the operator gets in place of ``tokens``; gradients are compared with those of a loop, also for a sum's."""
    expected = torch.cat([nn.functional.linear(rows, weight) for rows, weight in zip(tokens.split(list(counts)), weights, strict=True)])
    found = grouped_linear(given, weights, counts).as_subclass(Tensor)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=atol)
    leaves = (tokens, *weights)
    for gradient in (torch.linspace(-1, 1, expected.numel()).view_as(expected).to(expected.dtype), torch.ones(()).to(expected).expand_as(expected)):
        wanted = torch.autograd.grad(expected, leaves, gradient, retain_graph=True)
        got = torch.autograd.grad(found, leaves, gradient, retain_graph=True)
        torch.testing.assert_close([one.as_subclass(Tensor) for one in got], list(wanted), rtol=1e-6, atol=atol)
        assert not any(one.any() for one, count in zip(got[1:], counts, strict=True) if not count)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    libraries = {"transformer_engine": ModuleType("transformer_engine"), "transformer_engine.pytorch": TransformerEngine(), "torch_npu": TorchNpu()}
    for name, library in libraries.items():
        monkeypatch.setitem(sys.modules, name, library)
    devices = {CudaTensor: "cuda", NpuTensor: "npu"}
    monkeypatch.setattr(operator, "device_type", lambda tensor: devices.get(type(tensor), tensor.device.type))
    monkeypatch.delenv("TANGRAM_FUSED_OPS", raising=False)
    operator._load.cache_clear()
    yield libraries
    operator._load.cache_clear()
    for name in ("grouped_te", "npu"):
        sys.modules.pop(f"tangram.platform.operators.{name}", None)


@pytest.mark.parametrize("counts", [COUNTS, [0, 9, 0, 0], [0, 0, 0, 0], [4]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_kernel_is_a_loop_of_linears(dtype: torch.dtype, counts: list[int]) -> None:
    tokens, weights = draw(dtype, counts=counts)
    same(tokens, weights, counts, tokens, atol=1e-6 if dtype == torch.float32 else 2**-4)


def test_torchs_kernel_is_asked_for_all_groups_at_once_and_keeps_no_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, weights = draw()
    called, kept, kernel = [], [], nn.functional.grouped_mm
    monkeypatch.setattr(nn.functional, "grouped_mm", lambda *given, **rest: called.append(given[1].shape) or kernel(*given, **rest))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.dim()) or tensor, lambda tensor: tensor):
        made = grouped_linear(tokens, weights, COUNTS)
    made.sum().backward()
    assert called == [(4, 16, 24), (4, 24, 16), (9, 16)]
    assert max(kept) == 2


def test_rows_that_torchs_kernel_does_not_take_go_through_the_loop() -> None:
    """Rows of 5 numbers in fp32 have 20 bytes, and of 12 in bf16 24."""
    assert grouped.fits(12, 20, itemsize=4) and not grouped.fits(5, 16, itemsize=4) and not grouped.fits(12, 16, itemsize=2)
    tokens, weights = draw(inside=5)
    same(tokens, weights, COUNTS, tokens)


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0]], ids=str)
def test_transformer_engine_is_given_the_weights_where_they_lie(installed: dict[str, Any], counts: list[int]) -> None:
    tokens, weights = draw(counts=counts)
    same(tokens, weights, counts, tokens.as_subclass(CudaTensor))
    calls = installed["transformer_engine.pytorch"].calls
    assert calls == ([(counts, (24, 16), [weight.data_ptr() for weight in weights])] if sum(counts) else [])


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0], [4]], ids=str)
def test_the_npu_is_asked_for_rows_and_for_sums(installed: dict[str, Any], counts: list[int]) -> None:
    tokens, weights = draw(counts=counts)
    same(tokens, weights, counts, tokens.as_subclass(NpuTensor))
    backward = [(0, counts, (9, 24), [(24, 16)] * 4), (2, counts, (24, 9), [(9, 16)])]
    expected = [(0, counts, (9, 16), [(16, 24)] * 4), *backward, *backward]
    assert installed["torch_npu"].calls == (expected if counts == COUNTS else [])


def test_what_is_not_trained_costs_nothing(installed: dict[str, Any]) -> None:
    tokens, weights = draw()
    for weight in weights:
        weight.requires_grad_(False)
    grouped_linear(tokens.as_subclass(NpuTensor), weights, COUNTS).sum().backward()
    assert [call[0] for call in installed["torch_npu"].calls] == [0, 0] and tokens.grad is not None


def test_cuda_without_transformer_engine_has_torchs_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("TANGRAM_FUSED_OPS", raising=False)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    operator._load.cache_clear()
    with caplog.at_level("WARNING", logger="tangram"):
        assert grouped_linear.fused_on("cuda") is grouped.grouped_linear
    assert not caplog.messages
    operator._load.cache_clear()


def decoder(wanted: bool | None, width: int = 24) -> Qwen3MoeTextDecoderConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 2, "num_query_groups": 1, "vocab_size": 64}
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_intermediate_size": width, "moe_grouped_gemm": wanted}
    return Qwen3MoeTextDecoderConfig(
        model_id="qwen3_lm", **sizes, **experts, kv_channels=16, mrope_section=[4, 2, 2], untie_embeddings_and_output_weights=True
    )


def test_one_product_where_it_is_asked_for_or_an_accelerator_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANGRAM_FUSED_OPS", raising=False)
    operator._load.cache_clear()
    assert [runs_grouped(decoder(wanted), tensor=2, itemsize=4) for wanted in (True, False, None)] == [True, False, False]
    monkeypatch.setattr("tangram.config.experts.current", CudaPlatform)
    assert [runs_grouped(decoder(wanted), tensor=2, itemsize=4) for wanted in (True, False, None)] == [True, False, True]
    assert not runs_grouped(decoder(None), tensor=2, itemsize=2)
    assert not runs_grouped(decoder(None), tensor=2, itemsize=4, deterministic=True)
    with pytest.raises(ConfigError, match="deterministic mode, and no kernel of grouped products on cuda promises the same bits each time; set"):
        runs_grouped(decoder(True), tensor=2, itemsize=4, deterministic=True)
    operator._load.cache_clear()


def test_what_cannot_be_had_is_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANGRAM_FUSED_OPS", raising=False)
    operator._load.cache_clear()
    sizes = (
        "moe_grouped_gemm: torch's kernel takes rows of a multiple of 16 bytes, and those of hidden_size 32 have 64, those of moe_intermediate_size "
        "24 / tensor-parallel size 2 have 24; set it to false, or leave it out"
    )
    with pytest.raises(ConfigError, match=sizes):
        runs_grouped(decoder(True), tensor=2, itemsize=2)
    monkeypatch.setenv("TANGRAM_FUSED_OPS", "0")
    operator._load.cache_clear()
    with pytest.raises(ConfigError, match="moe_grouped_gemm: cpu has no kernel of grouped products, or the environment switches it off"):
        runs_grouped(decoder(True), tensor=1, itemsize=4)
    assert grouped_linear.fused_on("cpu") is None and grouped_linear.plain is plain.grouped_linear
    operator._load.cache_clear()
