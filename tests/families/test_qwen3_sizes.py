"""The published Qwen3-VL, on shapes alone: every element has a place at every split that divides it."""

from __future__ import annotations

from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tangram.config.hf_compare import differences
from tangram.config.sources import read_model
from tangram.errors import PlacementError
from tangram.families import get_family
from tangram.placement.blocks import canonical_shapes, place
from tangram.placement.proof import prove_table
from tangram.placement.table import Rule, padded_vocabulary
from tangram.placement.topology import Topology
from tests.families.sizes import QWEN3_VL, QWEN3_VL_PARAMETERS, Size
from tests.families.test_sizes import shapes_by_transformers

EXAMPLES = Path(__file__).parents[2] / "examples" / "qwen3vl"
Lists = tuple[list[Any], list[Any]]
"""Vision and text layers per stage."""

LISTS: dict[str, list[Lists]] = {
    "2b": [([24], [28]), ([24, 0], [10, 18])],
    "4b": [([24], [36]), ([24, 0], [14, 22])],
    "8b": [
        ([27], [36]),
        ([27, 0, 0, 0], [6, 10, 10, 10]),
        ([[27, 0, 0, 0], [0, 0, 0, 0]], [[3, 5, 5, 5], [5, 5, 5, 3]]),
        ([[10, 10, 7, 0], [0, 0, 0, 0]], [[0, 0, 3, 6], [7, 7, 7, 6]]),  # every stage of vision layers has one DeepStack merger
    ],
    "32b": [([27] + [0] * 7, [1] + [9] * 7)],
    "30b": [([27], [48]), ([27, 0, 0, 0], [6, 14, 14, 14]), ([[10, 10, 7, 0], [0, 0, 0, 0]], [[0, 0, 4, 8], [9, 9, 9, 9]])],
    "235b": [([27] + [0] * 7, [10] + [12] * 7)],
}


def split(size: str, lists: Lists, tensor: int = 1, expert: int = 1) -> tuple[list[Rule], Topology]:
    """Table and topology of a published model."""
    hf = QWEN3_VL[size]
    family = get_family(hf["model_type"])
    model = family.from_hf_config(hf)
    topology = Topology.build(
        vision_layers=hf["vision_config"]["depth"],
        text_layers=hf["text_config"]["num_hidden_layers"],
        tensor=tensor,
        vit_pp_layers=lists[0],
        llm_pp_layers=lists[1],
        expert=expert,
    )
    return family.tensor_table(model, padded_vocabulary(151936, tensor)), topology


def splits() -> list[Any]:
    """Dense models: every TP at the last list, the largest at the others. 30B: every TP and EP at its example's list, EP 8 at the others. 235B: the
    ends of the range."""
    cases = []
    for size, all_lists in LISTS.items():
        if "moe" not in QWEN3_VL[size]["model_type"]:
            cases += [(size, all_lists[-1], tensor, 1) for tensor in (1, 2, 4)] + [(size, lists, 8, 1) for lists in all_lists]
        elif size == "30b":
            cases += [(size, all_lists[1], tensor, expert) for tensor, expert in product((1, 2, 4), (1, 2, 4, 8))]
            cases += [(size, lists, 1, 8) for lists in (all_lists[0], all_lists[2])]
        else:
            cases += [(size, all_lists[0], 1, 1), (size, all_lists[0], 4, 8)]
    return [pytest.param(*case, id=f"{case[0]}-tp{case[2]}-ep{case[3]}-{case[1][0]}") for case in cases]


@pytest.mark.parametrize(("size", "lists", "tensor", "expert"), splits())
def test_every_element_has_a_place(size: str, lists: Lists, tensor: int, expert: int) -> None:
    prove_table(*split(size, lists, tensor, expert))


@pytest.mark.compat
@pytest.mark.parametrize("size", QWEN3_VL)
def test_canonical_tensors_are_those_of_transformers(size: str) -> None:
    """transformers 5.x holds stacked experts transposed, 4.57 as the hub's files do."""
    hf = QWEN3_VL[size]
    shapes = canonical_shapes(*split(size, LISTS[size][0]))
    held = shapes_by_transformers(Size(hf["model_type"], hf, ()))
    assert set(held) == set(shapes)
    assert {name: (shape, held[name]) for name, shape in shapes.items() if held[name] not in (shape, (shape[0], *reversed(shape[1:])))} == {}
    assert all(held[name] == shape for name, shape in shapes.items() if "experts" not in name)


@pytest.mark.parametrize("size", QWEN3_VL_PARAMETERS)
def test_tables_hold_the_parameters_that_the_hub_counts(size: str) -> None:
    assert sum(map(prod, canonical_shapes(*split(size, LISTS[size][0])).values())) == QWEN3_VL_PARAMETERS[size]


@pytest.mark.parametrize(
    ("size", "sizes", "message"),
    [
        ("30b", {"tensor": 8}, r"layers.0.self_attn.q_proj.weight: number of key/value heads 4 is not divisible by tensor-parallel size 8; choose"),
        ("235b", {"tensor": 8}, r"layers.0.self_attn.q_proj.weight: number of key/value heads 4 is not divisible by tensor-parallel size 8; choose"),
        ("8b", {"tensor": 16}, r"layers.0.self_attn.q_proj.weight: number of key/value heads 8 is not divisible by tensor-parallel size 16; choose"),
        ("8b", {"tensor": 3}, r"visual.blocks.0.attn.qkv.weight: number of attention heads 16 is not divisible by tensor-parallel size 3; choose"),
        ("30b", {"expert": 3}, r"layers.0.mlp.experts.gate_up_proj: 128 experts are not divisible by expert-parallel size 3; choose"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_the_numbers(size: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        prove_table(*split(size, LISTS[size][0], **sizes))


def test_local_shapes_of_30b() -> None:
    """By hand: (32 + 2 * 4) heads of 128 rows over 2 ranks; gate and up of width 768 / 2; 128 / 8 experts; 4608 = 4 * 1152."""
    table, topology = split("30b", LISTS["30b"][1], tensor=2, expert=8)
    tensors = place(table, topology, 1, topology.chunk(0), ep_rank=7).tensors
    layer = "text_decoder.decoder.layers.5"
    shapes = {name.removeprefix(f"{layer}."): tensor.shape for name, tensor in tensors.items() if name.startswith(layer)}
    assert shapes["self_attention.linear_qkv.weight"] == (2560, 2048)
    assert shapes["self_attention.linear_proj.weight"] == (2048, 2048)
    assert shapes["mlp.router.weight"] == (128, 2048)
    assert shapes["mlp.experts.local_experts.15.linear_fc1.weight"] == (768, 2048)
    assert shapes["mlp.experts.local_experts.15.linear_fc2.weight"] == (2048, 384)
    assert "mlp.experts.local_experts.16.linear_fc1.weight" not in shapes
    assert [n for n in range(27) if f"image_encoder.encoder.blocks.layers.{n}.deepstack_layer.layernorm.bias" in tensors] == [8, 16, 24]
    assert tensors["image_encoder.encoder.blocks.layers.24.deepstack_layer.encoder.linear_fc2.weight"].shape == (2048, 2304)
    assert {block.canonical_start[0] for block in tensors[f"{layer}.mlp.experts.local_experts.15.linear_fc2.weight"].blocks} == {127}


@pytest.mark.parametrize("size", ["2b", "4b", "8b", "32b", "30b"])
def test_examples_describe_the_published_models(size: str) -> None:
    model = read_model(EXAMPLES / f"model_{size}.json")
    assert model.image_encoder is not None
    assert differences(model, get_family(QWEN3_VL[size]["model_type"]).from_hf_config(QWEN3_VL[size])) == []
    assert (model.image_encoder.vision_encoder.pipeline_num_layers, model.text_decoder.pipeline_num_layers) in LISTS[size]
