"""Offload of activations: the same gradients, and tensors that really leave, once each, and come back in time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tangram.align.reference import load_reference, observe
from tangram.backends.fsdp2.features import prepare
from tangram.backends.fsdp2.features.offload import Offloaded
from tangram.errors import ConfigError
from tangram.platform.offload.chain import Chain
from tests.fsdp2.kit import real_batch
from tests.fsdp2.memory_kit import BLOCKS, LAYERS, features, offload, recompute

TinyHF = Callable[..., Path]


class Recorder:
    """A transfer whose copies carry the numbers of what they hold, and whose copies back hold nothing until they are waited for."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.sent: list[Tensor] = []
        self._coming: list[tuple[Tensor, Tensor]] = []

    def __call__(self, device: torch.device) -> Recorder:
        return self

    def _number(self, host: Tensor) -> int:
        return next(number for number, sent in enumerate(self.sent) if sent is host)

    def to_host(self, flat: Tensor) -> tuple[Tensor, Any]:
        self.sent.append(flat.clone())
        self.log.append(("out", len(self.sent) - 1))
        return self.sent[-1], None

    def to_device(self, flat: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        back = torch.full_like(flat, float("nan"))
        self._coming.append((back, flat))
        self.log.append(("back", self._number(flat)))
        return back, len(self._coming) - 1

    def wait(self, done: Any) -> None:
        back, host = self._coming[done]
        back.copy_(host)
        self.log.append(("wait", self._number(host)))


class Squares(nn.Module):
    """Saves its input alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def chained(blocks: int, recorder: Recorder) -> nn.Sequential:
    model, chain = nn.Sequential(*(Squares() for _ in range(blocks))), Chain(recorder)
    for number, module in enumerate(model):
        Offloaded(str(number), module, chain).install()
    return model


def test_the_last_two_calls_stay_and_the_others_come_back_one_call_ahead() -> None:
    recorder = Recorder()
    model = chained(5, recorder)
    x = (torch.rand(512) + 0.5).requires_grad_()
    y = model(x)
    assert recorder.log == [("out", number) for number in range(5)]
    recorder.log.clear()
    y.sum().backward()
    assert recorder.log == [("back", 2), ("back", 1), ("wait", 2), ("back", 0), ("wait", 1), ("wait", 0)]
    expected = x.detach().clone().requires_grad_()
    nn.Sequential(*(Squares() for _ in range(5)))(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]


def test_micro_batches_follow_each_other_and_nothing_is_left_behind() -> None:
    recorder = Recorder()
    model = chained(4, recorder)
    for _ in range(2):
        recorder.log.clear()
        recorder.sent.clear()
        x = torch.rand(512, requires_grad=True)
        model(x).sum().backward()
        assert sorted(recorder.log) == [("back", 0), ("back", 1), *(("out", n) for n in range(4)), ("wait", 0), ("wait", 1)]
    assert not [thing for thing in gc.get_objects() if type(thing).__name__ in ("Stretch", "Call")]


def test_each_stretch_of_memory_goes_once_and_weights_and_shared_inputs_stay() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (self.q(x) * self.k(x).transpose(0, 1).contiguous().transpose(0, 1)) * mask

    recorder = Recorder()
    module = Attention()
    Offloaded("a", module, Chain(recorder)).install()
    x, mask = torch.rand(4, 16, 32, requires_grad=True), torch.rand(16, 32)
    module(x, mask)
    # x, which both projections save, their two outputs; neither the weights (1,024 elements) nor the mask.
    assert [tensor.numel() for tensor in recorder.sent] == [2048, 2048, 2048]
    assert torch.equal(recorder.sent[0], x.detach().flatten())


@pytest.mark.parametrize(
    ("family", "plan"), [("qwen2_5_vl", offload(*LAYERS, *BLOCKS)), ("qwen3_vl", offload(*LAYERS, *BLOCKS) | recompute(*LAYERS))]
)
def test_gradients_of_models_are_bit_equal(tiny_hf: TinyHF, family: str, plan: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    hf = tiny_hf(family)
    batch, _ = real_batch(hf)
    expected = observe(load_reference(hf), batch)
    model = load_reference(hf)
    prepare(model, features(**plan))
    found = observe(model, batch)
    assert caplog.messages.count("activations are on the host already: offloading them copies them and saves nothing") == 1
    assert found.loss == expected.loss
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_a_recomputed_block_sends_its_hidden_states_alone(tiny_hf: TinyHF, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_hf("qwen2_5_vl")
    batch, _ = real_batch(hf)
    model = load_reference(hf)
    recorder = Recorder()
    monkeypatch.setattr("tangram.backends.fsdp2.features.apply.Chain", lambda: Chain(recorder))
    prepare(model, features(**recompute(*LAYERS), **offload(*LAYERS)))
    observe(model, batch)
    rows, length = batch["input_ids"].shape
    assert [tensor.numel() for tensor in recorder.sent] == [rows * length * 64] * 4
    assert [step for step in recorder.log if step[0] != "out"] == [("back", 1), ("back", 0), ("wait", 1), ("wait", 0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_activation_offload": True}, "enable_activation_offload is on, but features.activation_offload_plan.apply_modules is empty"),
        (recompute("0") | offload("0.0"), "0.0 lies within 0, which is recomputed, so what it saves would be copied for nothing; name 0"),
    ],
)
def test_plans_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), features(**changes))


def test_plans_of_features_that_are_off_change_nothing() -> None:
    """Public run files keep them."""
    model = nn.Sequential(nn.Linear(2, 2))
    prepare(model, features(activation_offload_plan={"apply_modules": ["0"]}, chunkmbs_plan={"apply_modules": ["0"]}))
    assert "forward" not in model[0].__dict__
