"""Fused operators: which tensors reach them, what they are given, and that models compute the same with them.

``torch_npu`` is a stand-in here that computes plainly and records; a tensor lies on the npu if it is an ``NpuTensor``, which torch hands on to
all that is computed from it.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tangram.align.default_batch import default_batch
from tangram.align.reference import load_reference, observe
from tangram.errors import ConfigError
from tangram.families import get_family
from tangram.platform.operators import OPERATORS, Operator, attention, operator, rms_norm
from tangram.platform.operators.fuse import fuse

TinyHF = Callable[..., Path]


class NpuTensor(Tensor):
    """Counts as a tensor on the npu."""


class StandIn(ModuleType):
    """torch_npu's four functions, by their documented formulas."""

    def __init__(self) -> None:
        super().__init__("torch_npu")
        self.calls: Counter[str] = Counter()
        self.given: list[tuple[Any, ...]] = []

    def _see(self, name: str, *tensors: Tensor, **rest: Any) -> None:
        assert isinstance(tensors[0], NpuTensor), f"{name} got a tensor of another device"
        self.calls[name] += 1
        self.given.append((name, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors), rest))

    def npu_rms_norm(self, x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
        self._see("rms_norm", x, gamma, epsilon=epsilon)
        assert x.dtype == gamma.dtype
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        return (x.float() * scale).to(x.dtype) * gamma, scale

    def npu_swiglu(self, x: Tensor, dim: int = -1) -> Tensor:
        self._see("swiglu", x, dim=dim)
        gate, up = x.chunk(2, dim)
        return nn.functional.silu(gate) * up

    def npu_rotary_mul(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        self._see("rotary_mul", x, cos, sin)
        assert x.dim() == cos.dim() == sin.dim() == 4 and x.dtype == cos.dtype == sin.dtype == torch.float32
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def npu_fusion_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_num: int,
        input_layout: str,
        *,
        atten_mask: Tensor | None = None,
        scale: float = 1.0,
        keep_prob: float = 1.0,
        sparse_mode: int = 0,
    ) -> tuple[Tensor, ...]:
        self._see("fusion_attention", query, key, value, sparse_mode=sparse_mode, keep_prob=keep_prob)
        assert input_layout == "BNSD" and head_num == query.shape[1] and head_num % key.shape[1] == 0
        key, value = (x.repeat_interleave(head_num // key.shape[1], dim=1) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * scale
        if sparse_mode == 2:
            assert atten_mask is not None and atten_mask.shape == (2048, 2048)
            atten_mask = atten_mask[: query.shape[2], : key.shape[2]]
        if atten_mask is not None:
            scores = scores.masked_fill(atten_mask, float("-inf"))
        return scores.softmax(-1) @ value, scores


@contextmanager
def importable(library: ModuleType | None) -> Iterator[None]:
    """``import torch_npu`` gives ``library``, or fails, while the operators are looked up anew. Afterwards it is gone, for transformers and
    accelerate look for it, too."""
    operator._load.cache_clear()
    sys.modules["torch_npu"] = library  # type: ignore[assignment]
    try:
        yield
        for one in OPERATORS.values():
            one.fused_on("npu")
    finally:
        sys.modules.pop("torch_npu")
        sys.modules.pop("tangram.platform.operators.npu", None)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TANGRAM_FUSED_OPS", raising=False)
    monkeypatch.delenv("QWEN25VL_DISABLE_NPU_FUSION", raising=False)
    operator._load.cache_clear()
    yield
    operator._load.cache_clear()


@pytest.fixture
def npu(clean: None, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    assert "tangram.platform.operators.npu" not in sys.modules, "imported before it was wanted"
    with importable(stand_in):
        pass
    monkeypatch.setattr(operator, "device_type", lambda tensor: "npu" if isinstance(tensor, NpuTensor) else tensor.device.type)
    return stand_in


def on_npu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(NpuTensor)


def batch_of(hf: Path, family: str) -> dict[str, Tensor]:
    import json

    described = get_family(family)
    return dict(default_batch(hf, described, described.from_hf_config(json.loads((hf / "config.json").read_text())))[0])


@pytest.mark.parametrize(
    ("family", "text", "vision"),
    [("qwen2_vl", 2 * 4 + 1, 0), ("qwen2_5_vl", 2 * 4 + 1, 2 * 4 + 1), ("qwen3_vl", 4 * 4 + 1, 0)],
)
def test_models_compute_the_same_with_fused_operators(tiny_hf: TinyHF, npu: StandIn, family: str, text: int, vision: int) -> None:
    """Qwen2-VL and Qwen3-VL have layer norms in the tower, and Qwen3-VL norms of queries and keys besides."""
    hf = tiny_hf(family)
    batch = batch_of(hf, family)
    model = load_reference(hf)
    names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    expected = observe(model, batch)
    assert fuse(model, "npu") == {"rms_norm": text + vision, "swiglu": 4, "vision_rope": 4}
    assert list(model.state_dict()) == names and [type(module) for module in model.modules()] == classes

    assert observe(model, batch).loss == expected.loss
    assert not npu.calls, "a tensor on the cpu was computed by the npu's operator"

    found = observe(model, {name: on_npu(tensor) for name, tensor in batch.items()})
    towers = 2  # images and videos each go through the tower
    assert npu.calls == {"rms_norm": text + vision * towers, "swiglu": 4, "rotary_mul": 2 * 4 * towers}
    assert abs(found.loss - expected.loss) < 1e-6 * expected.loss
    for name, gradient in expected.gradients.items():
        assert (found.gradients[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_other_instances_of_the_same_classes_stay_as_they_are(tiny_hf: TinyHF, npu: StandIn) -> None:
    hf = tiny_hf("qwen2_5_vl")
    fused, other = load_reference(hf), load_reference(hf)
    fuse(fused, "npu")
    batch = {name: on_npu(tensor) for name, tensor in batch_of(hf, "qwen2_5_vl").items()}
    observe(other, batch)
    assert not npu.calls


def test_fusing_twice_and_copies(tiny_hf: TinyHF, npu: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    model = load_reference(tiny_hf("qwen2_5_vl"))
    with caplog.at_level(logging.INFO, logger="tangram"):
        counts = fuse(model, "npu")
    assert caplog.messages == ["fused on npu: rms_norm in 18 modules, swiglu in 4 modules, vision_rope in 4 modules"]
    before = [module.__dict__.get("forward") for module in model.modules()]
    assert fuse(model, "npu") == counts
    assert [module.__dict__.get("forward") for module in model.modules()] == before
    norm = model.get_submodule("model.language_model.norm")
    twin = copy.deepcopy(norm)
    with torch.no_grad():
        twin.weight.zero_()
    x = on_npu(torch.rand(2, 64))
    assert twin(x).abs().sum() == 0 and norm(x).abs().sum() > 0


@pytest.mark.parametrize(("variable", "value"), [("TANGRAM_FUSED_OPS", "0"), ("QWEN25VL_DISABLE_NPU_FUSION", "1")])
def test_the_environment_turns_fusion_off(tiny_hf: TinyHF, npu: StandIn, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    model = load_reference(tiny_hf("qwen2_5_vl"))
    with importable(npu):
        assert fuse(model, "npu") == {}
    assert not [module for module in model.modules() if "forward" in module.__dict__]
    rms_norm(on_npu(torch.rand(2, 8)), torch.ones(8), 1e-6)
    assert not npu.calls
    assert (rms_norm.fused_on("cuda") is None) == (variable == "TANGRAM_FUSED_OPS")


def test_a_switch_that_is_neither_on_nor_off(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_FUSED_OPS", "off")
    with pytest.raises(ConfigError, match="environment TANGRAM_FUSED_OPS is 'off'; give 0 or 1"):
        rms_norm.fused_on("cuda")


def test_a_broken_installation_is_told_once_and_computes_plainly(
    npu: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = on_npu(torch.rand(2, 8))
    with caplog.at_level(logging.WARNING, logger="tangram"):
        with importable(None):
            pass
        for _ in range(3):
            assert torch.equal(rms_norm(x, torch.ones(8), 1e-6), nn.functional.rms_norm(x, (8,), eps=1e-6))
    assert len(caplog.messages) == len([one for one in OPERATORS.values() if "npu" in one.fused])
    assert caplog.messages[0].startswith("rms_norm is not fused on npu: ModuleNotFoundError: ")


def test_one_missing_function_leaves_the_others_fused(npu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StandIn, "npu_swiglu")
    with importable(npu):
        pass
    assert {name: one.fused_on("npu") is not None for name, one in OPERATORS.items() if "npu" in one.fused} == {
        "rms_norm": True,
        "swiglu": False,
        "vision_rope": True,
        "attention": True,
        "grouped_linear": False,
    }


@pytest.mark.parametrize(
    ("x", "weight", "out"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_norm_kernels_get_one_type_and_give_that_of_transformers(npu: StandIn, x: torch.dtype, weight: torch.dtype, out: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    norm = LlamaRMSNorm(64, eps=1e-5).to(weight)
    nn.init.normal_(norm.weight)
    values = torch.randn(9, 64).to(x)
    expected = norm(values)
    assert fuse(norm, "npu") == {"rms_norm": 1}
    found = norm(on_npu(values))
    assert npu.given == [("rms_norm", ((9, 64), out), ((64,), out), {"epsilon": 1e-5})]
    assert found.dtype == expected.dtype == out
    torch.testing.assert_close(found.as_subclass(Tensor), expected, rtol=8e-3, atol=0)


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_the_kernel_of_cuda_is_the_norm_of_transformers_within_a_rounding(clean: None, dtype: torch.dtype, apart: float) -> None:
    """It rounds to bf16 once, behind the weight, and transformers also before it."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    nn.init.normal_(norm.weight)
    x = torch.randn(200, 64).to(dtype)
    fused = rms_norm.fused_on("cuda")
    assert fused is not None
    torch.testing.assert_close(fused(x, norm.weight, 1e-5), norm(x), rtol=apart, atol=0)


@pytest.mark.parametrize(("name", "causal"), [("whole", False), ("causal", True), ("mask", True)])
def test_attention_of_the_npu_is_that_of_torch(npu: StandIn, name: str, causal: bool) -> None:
    """Grouped queries; a mask replaces causality and says which keys are seen, the kernel's says which are not."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mask = torch.rand(2, 1, 7, 7) > 0.4 if name == "mask" else None
    if mask is not None:
        mask = mask | torch.eye(7, dtype=torch.bool)
    for scale in (None, 0.7):
        expected = nn.functional.scaled_dot_product_attention(query, key, value, mask, 0.0, causal and mask is None, scale=scale, enable_gqa=True)
        assert torch.equal(attention(query, key, value, mask, 0.0, causal, scale), expected)
        assert not npu.calls
        found = attention(on_npu(query), key, value, mask, 0.0, causal, scale)
        torch.testing.assert_close(found.as_subclass(Tensor), expected)
        assert npu.given[-1][-1] == {"sparse_mode": 2 if name == "causal" else 0, "keep_prob": 1.0}
        npu.calls.clear()


def test_operators_are_called_like_their_plain_selves(npu: StandIn) -> None:
    torch.manual_seed(0)
    samples = {
        "rms_norm": (torch.randn(3, 8), torch.randn(8), 1e-6),
        "swiglu": (torch.randn(3, 8), torch.randn(3, 8)),
        "vision_rope": (torch.randn(5, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 8), torch.randn(5, 8)),
    }
    for name, (first, *rest) in samples.items():
        one: Operator = OPERATORS[name]
        expected, found = one.plain(first, *rest), one(*(on_npu(x) if isinstance(x, Tensor) else x for x in (first, *rest)))
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found)), strict=True):
            torch.testing.assert_close(b.as_subclass(Tensor), a)
    assert npu.calls == {"rms_norm": 1, "swiglu": 1, "rotary_mul": 2}
