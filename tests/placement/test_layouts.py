"""Layouts, blocks and topology against hand-worked examples and the sizes of published models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tangram.config.model import ModelConfig
from tangram.errors import ConfigError, PlacementError
from tangram.families import get_family
from tangram.placement.blocks import place, place_all
from tangram.placement.proof import prove, prove_table
from tangram.placement.table import GatedSplit, GroupedQKV, PackedQKV, Run, Vocabulary, padded_vocabulary
from tangram.placement.topology import Topology
from tests.families.sizes import SIZES, qwen2_5_vl


def small(tied: bool) -> ModelConfig:
    hf = qwen2_5_vl(64, 4, 4, 2, 96, 40, 320, tied)
    hf["rope_scaling"]["mrope_section"] = [2, 3, 3]
    return get_family("qwen2_5_vl").from_hf_config(hf)


def test_local_shapes_of_7b_are_those_of_public_checkpoints() -> None:
    model = get_family("qwen2_5_vl").from_hf_config(SIZES["qwen2_5_vl-7b"].hf)
    topology = Topology.build(vision_layers=32, text_layers=28, vit_pp_layers=[32, 0], llm_pp_layers=[12, 16])
    table = get_family("qwen2_5_vl").tensor_table(model, 152064)
    first, last = (place(table, topology, 0, chunk).tensors for chunk in topology.order)
    assert first["image_encoder.encoder.blocks.layers.0.self_attention.linear_qkv.weight"].shape == (3840, 1280)
    assert first["image_encoder.encoder.blocks.layers.31.mlp.linear_fc1.weight"].shape == (6840, 1280)
    assert first["image_encoder.projector.encoder.linear_fc1.weight"].shape == (5120, 5120)
    assert first["text_decoder.decoder.layers.11.self_attention.linear_qkv.weight"].shape == (4608, 3584)
    assert first["text_decoder.decoder.layers.0.mlp.linear_fc1.weight"].shape == (37888, 3584)
    assert "text_decoder.decoder.layers.12.input_layernorm.weight" not in first
    assert "text_decoder.decoder.final_layernorm.weight" not in first
    assert last["text_decoder.decoder.layers.15.mlp.linear_fc2.weight"].shape == (3584, 18944)
    assert last["text_decoder.output_layer.weight"].shape == (152064, 3584)
    assert not any(name.startswith("image_encoder") for name in last)


def test_grouped_qkv_of_four_heads_and_two_groups() -> None:
    """q0 q1 k0 v0 | q2 q3 k1 v1, with heads of width 4."""
    layout = GroupedQKV(groups=2)
    whole = layout.runs([16, 8, 8], 1, 0)
    assert whole == [Run(0, 0, 8), Run(1, 0, 4), Run(2, 0, 4), Run(0, 8, 8), Run(1, 4, 4), Run(2, 4, 4)]
    assert layout.runs([16, 8, 8], 2, 1) == [Run(0, 8, 8), Run(1, 4, 4), Run(2, 4, 4)]


def test_packed_qkv_is_interleaved_by_head() -> None:
    """[q0 q1; k0 k1; v0 v1] with heads of width 3 becomes q0 k0 v0 | q1 k1 v1."""
    assert PackedQKV(heads=2).runs([18], 2, 1) == [Run(0, 3, 3), Run(0, 9, 3), Run(0, 15, 3)]


def test_gated_split_takes_both_halves_on_every_rank() -> None:
    assert GatedSplit().runs([6, 6], 3, 1) == [Run(0, 2, 2), Run(1, 2, 2)]


def test_vocabulary_is_padded_at_the_end_only() -> None:
    """10 entries over 4 ranks: Megatron pads to 12, three each; the last rank holds entry 9 and two of padding."""
    assert padded_vocabulary(10, 4) == 12
    assert padded_vocabulary(151936, 2, divisible_by=128) == 152064
    layout = Vocabulary(12)
    assert layout.runs([10], 4, 0) == [Run(0, 0, 3)]
    assert layout.runs([10], 4, 3) == [Run(0, 9, 1), Run(None, 0, 2)]
    assert Vocabulary(16).runs([10], 4, 3) == [Run(None, 0, 4)]


def test_proof_fails_for_every_single_rule_that_is_left_out() -> None:
    model = small(tied=False)
    table = get_family("qwen2_5_vl").tensor_table(model, 320)
    topology = Topology.build(vision_layers=32, text_layers=4, tensor=2, vit_pp_layers=[20, 12, 0], llm_pp_layers=[0, 1, 3])
    shapes = prove_table(table, topology)
    for rule in table:
        rest = [other for other in table if other is not rule]
        with pytest.raises(PlacementError, match="elements that no rank holds"):
            prove(place_all(rest, topology), shapes)
    with pytest.raises(PlacementError, match="two rules for the local parameter"):
        place_all([*table, table[3]], topology)


def test_proof_counts_every_row() -> None:
    """Half of the rows gone with one rank's placements; and a parameter of two halves that is given the first half twice."""
    table = get_family("qwen2_5_vl").tensor_table(small(tied=False), 320)
    topology = Topology.build(vision_layers=32, text_layers=4, tensor=2)
    shapes = prove_table(table, topology)
    first, second = place_all(table, topology)
    with pytest.raises(PlacementError, match=r"tensors have elements that no rank holds: lm_head.weight, "):
        prove([first], shapes)
    name = "text_decoder.decoder.layers.1.mlp.linear_fc1.weight"
    gated = first.tensors[name]
    assert len(gated.blocks) == 2
    twice = replace(gated, blocks=(gated.blocks[0], gated.blocks[0]))
    with pytest.raises(PlacementError, match=rf"{name} on tensor rank 0, stage 0: elements covered between 0 and 2 times instead of once"):
        prove([replace(first, tensors={**first.tensors, name: twice}), second], shapes)
    beyond = replace(gated, blocks=(gated.blocks[0], replace(gated.blocks[1], local_start=(49, 0))))
    with pytest.raises(PlacementError, match=r"a block reaches to 97 along dim 0 of a tensor of shape \(96, 64\)"):
        prove([replace(first, tensors={**first.tensors, name: beyond}), second], shapes)


def test_tied_copy_stands_where_the_embedding_does_not() -> None:
    model = small(tied=True)
    table = get_family("qwen2_5_vl").tensor_table(model, 320)

    def heads(vit: list[Any], llm: list[Any]) -> list[int]:
        topology = Topology.build(vision_layers=32, text_layers=4, vit_pp_layers=vit, llm_pp_layers=llm)
        return [p.chunk.position for p in place_all(table, topology) if "text_decoder.output_layer.weight" in p.tensors]

    assert heads([32], [4]) == []
    assert heads([32, 0, 0, 0], [1, 1, 1, 1]) == [3]
    assert heads([32, 0], [0, 4]) == []
    assert heads([[32, 0], [0, 0]], [[0, 1], [1, 2]]) == [3]


@pytest.mark.parametrize(
    ("vit", "llm", "message"),
    [
        ([32], [2, 1], r"vit_pp_layers \[32\] holds 1 x 1 stages .* llm_pp_layers \[2, 1\] holds 1 x 2"),
        ([32, 0], [2, 1], r"llm_pp_layers \[2, 1\] sums to 3, but the model has 4 layers"),
        ([31, 0], [2, 2], r"vit_pp_layers \[31, 0\] sums to 31, but the model has 32 layers"),
        ([20, 12], [1, 3], r"the text decoder starts on stage 0 but the vision encoder ends on stage 1"),
        ([32, 0], [4, 0], r"pipeline rank 1, virtual stage 0 holds no layer"),
        ([32, 0], [5, -1], r"-1 in \[5, -1\] is not a number of layers"),
        ([32, 0], [[2, 1], [1]], r"rows of \[\[2, 1\], \[1\]\] have lengths \[1, 2\]"),
        ([32, 0], [[2, 1], 1], r"mixes numbers and lists"),
        ([32, 0], [], r"expected a list of layers per pipeline stage"),
        ([32, 0], [2.0, 2], r"2.0 in \[2.0, 2\] is not a number of layers"),
    ],
)
def test_layer_lists_that_cannot_work_are_refused(vit: list[Any], llm: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology.build(vision_layers=32, text_layers=4, vit_pp_layers=vit, llm_pp_layers=llm)


def test_uneven_and_virtual_stages_number_their_layers_in_order_of_execution() -> None:
    """Qwen2-VL-7B on 4 ranks with 3 virtual stages, as its public guide splits it."""
    topology = Topology.build(
        vision_layers=32,
        text_layers=28,
        vit_pp_layers=[[10, 10, 10, 2], [0, 0, 0, 0], [0, 0, 0, 0]],
        llm_pp_layers=[[0, 0, 0, 1], [4, 4, 4, 4], [4, 3, 2, 2]],
    )
    chunk = topology.chunk(pp_rank=3, vp_rank=0)
    assert (chunk.vision, chunk.text, chunk.vision_last, chunk.text_first) == (range(30, 32), range(0, 1), True, True)
    assert topology.chunk(0, 1).text == range(1, 5)
    assert topology.chunk(3, 2).text == range(26, 28)
    assert topology.text_last_chunk is topology.chunk(3, 2)
    topology = Topology.build(vision_layers=6, text_layers=4, vit_pp_layers=[[2, 2], [2, 0]], llm_pp_layers=[[0, 0], [1, 3]])
    assert [chunk.vision for chunk in topology.order if chunk.has_vision] == [range(2), range(2, 4), range(4, 6)]
    assert [chunk.vision_last for chunk in topology.order] == [False, False, True, False]
