"""Chunks of micro-batches: the same numbers from slices of the batch, and errors where slices would be wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2_5_VLConfig

from tangram.backends.fsdp2.features import prepare
from tangram.errors import ConfigError
from tests.fsdp2.memory_kit import chunks, features, offload, recompute

NAMED = ["attention_mask", "position_ids", "position_embeddings"]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes, attn_implementation="eager"))


@pytest.mark.parametrize(("size", "more"), [(1, {}), (2, {}), (8, {}), (2, recompute("model.layers.{*}") | offload("model.layers.{*}"))])
def test_loss_and_gradients_are_those_of_whole_micro_batches(size: int, more: dict[str, Any]) -> None:
    """Five padded rows, so each has a mask of its own; positions are one row for all."""
    ids = torch.randint(50, (5, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([9, 4, 7, 2, 8])[:, None]).long()
    results = []
    for plan in ({}, chunks("model.layers.{*}", chunk_mbs=size, chunk_kwarg_names=NAMED) | more):
        model = llama()
        prepare(model, features(**plan))
        rows: Counter[int] = Counter()
        model.model.layers[1].self_attn.register_forward_pre_hook(
            lambda _, __, kwargs, rows=rows: rows.update([kwargs["hidden_states"].shape[0]]), with_kwargs=True
        )
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        if plan:
            assert rows == Counter([min(size, 5 - start) for start in range(0, 5, size)])
        loss.backward()
        results.append((loss, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (loss, gradients), (found, others) = results
    assert abs(found - loss) < 1e-6 * loss
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


class Pair(nn.Module):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        return x * 2, (None, {"squared": x.square() if scale is None else x.square() * scale})


def test_tuples_and_another_batch_dim() -> None:
    model = nn.Sequential(Pair())
    prepare(model, features(**chunks("0", chunk_mbs=2, batch_dim=1)))
    x = torch.rand(3, 5)
    doubled, (nothing, rest) = model(x)
    assert torch.equal(doubled, x * 2) and nothing is None and torch.equal(rest["squared"], x.square())


@pytest.mark.parametrize(
    ("plan", "args", "kwargs", "message"),
    [
        ({"chunk_arg_indexs": [1]}, [(4, 2)], {}, "0 is called with 1 arguments by position, none is number 1"),
        ({"chunk_kwarg_names": ["mask"]}, [(4, 2)], {"scale": (4, 2)}, "0 is not given mask by name, but scale; correct it"),
        ({"chunk_kwarg_names": ["scale"]}, [(4, 2)], {"scale": (3, 4, 2)}, r"scale of 0 has the shape \[3, 4, 2\], 3 rows at dim 0, but .* have 4"),
        ({"batch_dim": 2}, [(4, 2)], {}, r"batch_dim 2: argument 0 of 0 has the shape \[4, 2\]"),
        ({}, [(4, 2)], {"scale": (4, 2)}, r"output 2 of 0 for 1 rows is a tensor of shape \[4, 2\], so outputs cannot be joined at dim 0"),
        ({"chunk_arg_indexs": []}, [(4, 2)], {}, "names no tensor among the arguments of 0"),
    ],
)
def test_arguments_that_slices_would_get_wrong(plan: dict[str, Any], args: list[Any], kwargs: dict[str, Any], message: str) -> None:
    model = nn.Sequential(Pair())
    prepare(model, features(**chunks("0", **plan)))
    with pytest.raises(ConfigError, match=message):
        model[0](*map(torch.rand, args), **{name: torch.rand(shape) for name, shape in kwargs.items()})


def test_models_with_3d_positions_are_refused_before_they_run() -> None:
    model = nn.Sequential(Pair())
    model.config = Qwen2_5_VLConfig(text_config={"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}})  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"Sequential has 3-D positions \(mrope_section\).*smaller training.micro_batch_size"):
        prepare(model, features(**chunks("0")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_chunk_mbs": True}, "features.enable_chunk_mbs is on, but features.chunkmbs_plan.apply_modules is empty"),
        (chunks("0") | {"loss_cfg": {"router_aux_loss_coef": 0.01}}, "enable_chunk_mbs with router_aux_loss_coef 0.01"),
    ],
)
def test_plans_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(nn.Sequential(Pair()), features(**changes))
