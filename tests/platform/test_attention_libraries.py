"""Attention over segments by each library gives what torch gives, forward and backward, and what cannot be had is refused by name."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tangram.errors import ConfigError
from tangram.platform.operators import Segments, check_backend, ring_blocks, segment_attention
from tests.platform.attention_libraries import CALLS, DEVICES, forget, install

CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "windows": {"lengths": [4, 16, 4, 8, 1, 16], "causal": False},
    "frames of one size": {"lengths": [12, 12, 12], "causal": False},
    "packed samples, grouped queries": {"lengths": [3, 1, 9, 1, 1, 5], "groups": 2, "causal": True},
    "packed samples, one key head": {"lengths": [7, 13], "groups": 1, "causal": True, "scale": 0.9},
    "rows, grouped queries": {"rows": 3, "length": 11, "groups": 2, "causal": True},
    "one row": {"rows": 1, "length": 11, "causal": True, "scale": 0.2},
    "rows that are seen whole": {"rows": 2, "length": 6, "causal": False},
}


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("TANGRAM_FUSED_OPS", raising=False)
    with monkeypatch.context() as context:
        yield context
    forget()


def tensors(case: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Segments | None]:
    """Query, key and value as megatron-core has them, the last two parts of one tensor; and the segments."""
    lengths = case.get("lengths")
    length, rows = (sum(lengths), 1) if lengths else (case["length"], case["rows"])
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(length, rows, 4, 8, generator=generator, dtype=dtype)
    key, value = torch.randn(length, rows, case.get("groups", 4), 16, generator=generator, dtype=dtype).split(8, -1)
    return [query, key, value], Segments(tuple(lengths), CPU) if lengths else None


def run(case: dict[str, Any], backend: str) -> list[Tensor]:
    """Output and gradients."""
    inputs, segments = tensors(case)
    inputs = [x.requires_grad_() for x in inputs]
    out = segment_attention(*inputs, segments, None, 0.0, case["causal"], case.get("scale"), backend)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def dense(case: dict[str, Any]) -> list[Tensor]:
    """The same by torch with a mask of the whole matrix."""
    (query, key, value), segments = tensors(case)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    lengths = segments.lengths if segments is not None else [query.shape[0]]
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = sample[:, None] == sample
    rows = [x.permute(1, 2, 0, 3) for x in inputs]
    out = nn.functional.scaled_dot_product_attention(*rows, seen.tril() if case["causal"] else seen, scale=case.get("scale"), enable_gqa=True)
    out = out.permute(2, 0, 1, 3)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_each_library_computes_what_torch_does(patch: pytest.MonkeyPatch, backend: str, name: str) -> None:
    case = CASES[name]
    expected = dense(case)
    install(patch, backend)
    for chosen in (backend, "auto"):
        CALLS.clear()
        for found, wanted in zip(run(case, chosen), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        lengths = case.get("lengths") or [case["length"]] * case["rows"]
        ends, causal = [0, *accumulate(lengths)], case["causal"]
        wanted_calls: list[Any] = [(backend, ends, causal)]
        if "rows" in case and backend not in ("flash", "transformer_engine"):  # whole rows need no segments
            wanted_calls = [("npu rows", [0, case["length"]], causal)] if backend == "npu" else []
        assert wanted_calls == CALLS


@pytest.mark.parametrize("name", CASES)
def test_torch_computes_what_a_mask_of_the_whole_says(name: str) -> None:
    for backend in ("auto", "torch"):
        for found, wanted in zip(run(CASES[name], backend), dense(CASES[name]), strict=True):
            torch.testing.assert_close(found, wanted)


def test_the_first_that_is_installed_and_takes_the_type_is_chosen(patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["windows"]

    def chosen(dtype: torch.dtype, dropout: float = 0.0, backend: str = "auto") -> list[str]:
        CALLS.clear()
        inputs, segments = tensors(case, dtype)
        segment_attention(*inputs, segments, None, dropout, False, None, backend)
        return [name for name, *_ in CALLS]

    install(patch, "flash", "transformer_engine", "torch", exact=False)
    assert chosen(torch.bfloat16) == chosen(torch.float16) == ["flash"]
    assert chosen(torch.bfloat16, backend="torch") == ["torch"]
    assert chosen(torch.float32) == chosen(torch.float32, backend="torch") == [], "fp32 is left to scaled_dot_product_attention"
    with caplog.at_level(logging.WARNING, logger="tangram"):
        install(patch, "transformer_engine", "torch", exact=False)
        assert chosen(torch.bfloat16) == chosen(torch.bfloat16) == ["transformer_engine"]
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("segment_attention is not fused on cuda: ModuleNotFoundError: ")
    install(patch, "torch", exact=False)
    assert chosen(torch.bfloat16) == ["torch"]
    assert chosen(torch.bfloat16, dropout=0.5) == [], "varlen_attn has no dropout"
    patch.setenv("TANGRAM_FUSED_OPS", "0")
    install(patch, "flash", exact=False)
    assert chosen(torch.bfloat16) == []


def test_the_npu_gets_no_more_segments_at_a_time_than_it_takes(patch: pytest.MonkeyPatch) -> None:
    case = {"lengths": [1, 2, 5, 1, 1, 3, 2, 4, 1, 1], "causal": True}
    expected = run(case, "torch")
    install(patch, "npu")
    npu = importlib.import_module("tangram.platform.operators.npu")
    assert npu.MOST_SEGMENTS == 2048
    patch.setattr(npu, "MOST_SEGMENTS", 4)
    for found, wanted in zip(run(case, "npu"), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert [ends for _, ends, _ in CALLS] == [[0, 1, 3, 8, 9], [0, 1, 4, 6, 10], [0, 1, 2]]


def test_masks_go_to_what_takes_them(patch: pytest.MonkeyPatch) -> None:
    inputs, _ = tensors({"rows": 2, "length": 7, "groups": 2})
    mask = (torch.rand(2, 1, 7, 7, generator=torch.Generator().manual_seed(2)) > 0.4) | torch.eye(7, dtype=torch.bool)
    wanted = segment_attention(*inputs, None, mask, 0.0, True, None, "torch")
    install(patch, "npu")
    for backend in ("npu", "auto"):
        torch.testing.assert_close(segment_attention(*inputs, None, mask, 0.0, True, None, backend), wanted)
    assert [name for name, *_ in CALLS] == ["npu rows"] * 2
    install(patch, "flash", "transformer_engine")
    assert torch.equal(segment_attention(*inputs, None, mask, 0.0, True, None, "auto"), wanted)
    for backend in ("flash", "transformer_engine"):
        with pytest.raises(ConfigError, match=rf"attention_backend {backend} takes no mask, and this batch has one \(padding on the left"):
            segment_attention(*inputs, None, mask, 0.0, True, None, backend)


def test_what_is_asked_for_by_name_and_cannot_be_had_is_refused(patch: pytest.MonkeyPatch) -> None:
    inputs, segments = tensors(CASES["windows"], torch.bfloat16)
    wide = [x.repeat(1, 1, 1, 40) for x in inputs]

    def refused(backend: str, message: str, given: list[Tensor] = inputs) -> None:
        with pytest.raises(ConfigError, match=message):
            segment_attention(*given, segments, None, 0.0, False, None, backend)

    refused("flash", "attention_backend flash needs the device cuda, and this one is cpu; set auto or torch")
    with pytest.raises(ConfigError, match="attention_backend npu needs the device npu, and this one is cuda; set auto or torch"):
        check_backend("npu", "cuda")
    check_backend("auto", "cpu")
    check_backend("torch", "cpu")
    install(patch, "flash", exact=False)
    check_backend("flash", "cuda")
    refused("flash", "attention_backend flash takes float16 and bfloat16, not float64; set auto or torch", tensors(CASES["windows"])[0])
    refused("flash", "attention_backend flash takes heads of a width of up to 256, not 320; set auto or torch", wide)
    absent = "transformer_engine.pytorch is asked for, and cannot be used: ModuleNotFoundError: .*; install it, or set auto"
    refused("transformer_engine", absent)
    with pytest.raises(ConfigError, match=absent):
        check_backend("transformer_engine", "cuda")
    patch.setenv("TANGRAM_FUSED_OPS", "0")
    install(patch, "flash", exact=False)
    refused("flash", r"flash_attn.flash_attn_interface is asked for, and the environment turns off fused operators \(TANGRAM_FUSED_OPS\); remove one")


def test_a_ring_of_ranks_takes_blocks_of_what_is_asked_for(patch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    plain = ring_blocks("torch", query, masked=True)
    assert ring_blocks("auto", query, masked=False) == plain
    install(patch, "flash", "transformer_engine", exact=False)
    with pytest.raises(ConfigError, match="attention_backend transformer_engine has no attention round a ring of ranks; set auto, flash or torch"):
        ring_blocks("transformer_engine", query, masked=False)
    with pytest.raises(ConfigError, match="attention_backend flash takes no mask"):
        ring_blocks("flash", query, masked=True)
    with pytest.raises(ConfigError, match="attention_backend flash takes float16 and bfloat16, not float32"):
        ring_blocks("flash", query.float(), masked=False)
    with pytest.raises(ConfigError, match="has no attribute '_wrapped_flash_attn_varlen_forward'"):  # older than 2.7
        ring_blocks("flash", query, masked=False)
