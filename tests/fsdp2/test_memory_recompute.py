"""Recomputation on models of transformers: the same gradients, to the last bit, and modules that really run twice."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tangram.align.reference import forward_arguments, load_reference, observe
from tangram.backends.fsdp2.features import prepare
from tangram.errors import ConfigError
from tests.fsdp2.kit import real_batch
from tests.fsdp2.memory_kit import BLOCKS, LAYERS, Kept, counted_calls, features, recompute

TinyHF = Callable[..., Path]


@pytest.mark.parametrize(("family", "reentrant"), [("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_gradients_are_bit_equal_and_every_block_runs_twice(tiny_hf: TinyHF, family: str, reentrant: bool) -> None:
    hf = tiny_hf(family)
    batch, _ = real_batch(hf)
    expected = observe(load_reference(hf), batch)
    model = load_reference(hf)
    names = list(model.state_dict())
    prepare(model, features(**recompute(*LAYERS, *BLOCKS, use_reentrant=reentrant)))
    with counted_calls(model, "norm1") as vision, counted_calls(model, ".input_layernorm") as text:
        found = observe(model, batch)
    assert len(vision) == len(text) == 4
    assert set(text.values()) == {2}
    assert set(vision.values()) == {4}  # images and videos each go through the tower
    assert list(model.state_dict()) == names
    assert found.loss == expected.loss
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


def test_without_gradients_nothing_runs_twice(tiny_hf: TinyHF) -> None:
    hf = tiny_hf("qwen2_5_vl")
    batch, _ = real_batch(hf)
    model = load_reference(hf)
    prepare(model, features(**recompute(*LAYERS, *BLOCKS)))
    with counted_calls(model, ".input_layernorm") as calls, torch.no_grad():
        model(**forward_arguments(model, batch))
    assert set(calls.values()) == {1}


def test_recomputation_keeps_a_ninth_of_the_bytes(tiny_hf: TinyHF) -> None:
    hf = tiny_hf("qwen2_5_vl")
    batch, _ = real_batch(hf)
    kept = []  # 7.7, 4.2 and 0.8 MB
    for plan in ({}, recompute(*LAYERS), recompute(*LAYERS, *BLOCKS)):
        model = load_reference(hf)
        prepare(model, features(**plan))
        with Kept(model, batch) as bytes_of:
            model(**forward_arguments(model, batch))
        kept.append(bytes_of.bytes)
    assert kept[1] < 0.6 * kept[0]
    assert kept[2] < kept[0] / 9


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_draws_the_same_again(reentrant: bool) -> None:
    def run(plan: dict[str, object]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)))
        prepare(model, features(**plan))
        x = torch.randn(5, 8)
        torch.manual_seed(4)
        loss = model(x).square().sum()
        torch.manual_seed(5)
        loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters())]

    assert all(map(torch.equal, run({}), run(recompute("1", use_reentrant=reentrant))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, shift: tuple[torch.Tensor, float], mask: torch.Tensor | None = None) -> dict[str, object]:
        hidden = self.two(torch.tanh(self.one(x) + shift[0] * shift[1]))
        return {"hidden": hidden, "mask": mask, "count": 1}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x, shift=(shift, 0.5))["hidden"]
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_arguments_by_name_nested_ones_and_outputs_by_name(reentrant: bool) -> None:
    """Gradients reach tensors wherever they stand among the arguments, and weights where no input has a gradient."""
    results = []
    for plan in ({}, recompute("blocks.{*}", use_reentrant=reentrant)):
        torch.manual_seed(0)
        model, shift = Model(), torch.randn(4, requires_grad=True)
        prepare(model, features(**plan))
        model(torch.randn(3, 4), shift).sum().backward()
        with counted_calls(model, "one") as calls:
            model(torch.randn(3, 4), shift.detach()).sum().backward()
        assert set(calls.values()) == {2 if plan else 1}
        results.append([shift.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_signatures_and_copies_of_recomputed_modules() -> None:
    model = Model()
    prepare(model, features(**recompute("blocks.{*}")))
    assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x", "shift", "mask"]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x, shift = torch.ones(1, 4), torch.ones(4)
    assert twin(x, shift).abs().sum() == 0
    assert model(x, shift).abs().sum() > 0


def test_a_frozen_block_with_inputs_without_gradient_is_left_without() -> None:
    model = Model().requires_grad_(False)
    prepare(model, features(**recompute("blocks.{*}", use_reentrant=True)))
    assert not model(torch.randn(3, 4), torch.randn(4)).requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute": True}, "features.recompute is on, but features.recompute_plan.apply_modules is empty; name the modules"),
        (
            {"recompute_plan": {"apply_modules": ["blocks.{*}"]}},
            "features.recompute_plan.apply_modules names modules, but features.recompute is off; set it true",
        ),
        (recompute("block.{*}"), "features.recompute_plan.apply_modules: 'block.{\\*}' matches no module"),
        (recompute("blocks"), r"blocks is a ModuleList, which is never called itself; name what it holds: blocks.{\*}"),
        (recompute("blocks.{*}", "blocks.1.one"), "blocks.1.one lies within blocks.1, which is named too; keep one of them"),
        (
            recompute("blocks.{*}", use_reentrant=True) | {"loss_cfg": {"router_aux_loss_coef": 0.1}},
            "use_reentrant with router_aux_loss_coef 0.1.*set use_reentrant false",
        ),
    ],
)
def test_plans_that_cannot_be_meant(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(Model(), features(**changes))


def test_a_cache_is_refused() -> None:
    class Caching(nn.Module):
        def forward(self, x: torch.Tensor, past_key_values: object = None) -> torch.Tensor:
            return x

    model = nn.ModuleList([Caching()])
    prepare(model, features(**recompute("0")))
    with pytest.raises(ConfigError, match="0 is recomputed but was given past_key_values"):
        model[0](torch.ones(1, requires_grad=True), past_key_values=object())
