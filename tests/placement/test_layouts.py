"""Layouts, blocks and topology against hand-worked examples and the sizes of published models."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.config.model import ModelConfig
from tangram.errors import ConfigError, PlacementError
from tangram.families import get_family
from tangram.placement.blocks import place, place_all
from tangram.placement.proof import distinct_elements, prove, prove_table
from tangram.placement.table import GatedSplit, GroupedQKV, PackedQKV, Run, Vocabulary, padded_vocabulary
from tangram.placement.topology import Topology


def published(
    hidden: int, layers: int, heads: int, groups: int, ffn: int, vit_ffn: int, vocab: int, tied: bool, mrope: tuple[int, ...] = (16, 24, 24)
) -> ModelConfig:
    """A Qwen2.5-VL config as the hub has it (flat keys)."""
    hf: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 128000,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": list(mrope)},
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": vit_ffn,
            "num_heads": 16,
            "in_chans": 3,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
    }
    return get_family("qwen2_5_vl").from_hf_config(hf)


SIZES = {
    "3b": (published(2048, 36, 16, 2, 11008, 3420, 151936, True), [1, 2], [32, 0], [12, 24]),
    "7b": (published(3584, 28, 28, 4, 18944, 3420, 152064, False), [1, 2, 4], [32, 0], [12, 16]),
    "32b": (published(5120, 64, 40, 8, 27648, 3456, 152064, False), [1, 2, 4, 8], [32] + [0] * 7, [1] + [9] * 7),
    "72b": (published(8192, 80, 64, 8, 29568, 3456, 152064, False), [1, 2, 4, 8], [32] + [0] * 7, [6, 11, 11, 11, 11, 11, 11, 8]),
}


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_are_covered_at_every_tensor_size(size: str) -> None:
    model, tensors, vit, llm = SIZES[size]
    family = get_family("qwen2_5_vl")
    for tensor in tensors:
        topology = Topology.build(vision_layers=32, text_layers=model.text_decoder.num_layers, tensor=tensor, vit_pp_layers=vit, llm_pp_layers=llm)
        table = family.tensor_table(model, padded_vocabulary(model.text_decoder.vocab_size, tensor))
        shapes = prove_table(table, topology)
        elements = sum(map(_numel, shapes.values()))
        assert distinct_elements(place_all(table, topology)) == elements


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def test_published_parameter_count_of_7b() -> None:
    """8.29 billion parameters: the size that the hub reports for Qwen2.5-VL-7B-Instruct (8,292,166,656)."""
    model, *_ = SIZES["7b"]
    topology = Topology.build(vision_layers=32, text_layers=28)
    shapes = prove_table(get_family("qwen2_5_vl").tensor_table(model, 152064), topology)
    assert sum(map(_numel, shapes.values())) == 8_292_166_656


def test_local_shapes_of_7b_are_those_of_public_checkpoints() -> None:
    model, *_ = SIZES["7b"]
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


@pytest.mark.parametrize(
    ("size", "tensor", "message"),
    [
        ("3b", 4, r"self_attn.q_proj.weight: number of key/value heads 2 is not divisible by tensor-parallel size 4"),
        ("7b", 8, r"mlp.gate_proj.weight: feed-forward size 3420 is not divisible by tensor-parallel size 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_both_numbers(size: str, tensor: int, message: str) -> None:
    model, *_ = SIZES[size]
    topology = Topology.build(vision_layers=32, text_layers=model.text_decoder.num_layers, tensor=tensor)
    with pytest.raises(PlacementError, match=message):
        prove_table(get_family("qwen2_5_vl").tensor_table(model, 151936), topology)


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
    model = published(64, 4, 4, 2, 96, 40, 320, False, mrope=(2, 3, 3))
    table = get_family("qwen2_5_vl").tensor_table(model, 320)
    topology = Topology.build(vision_layers=32, text_layers=4, tensor=2, vit_pp_layers=[20, 12, 0], llm_pp_layers=[0, 1, 3])
    shapes = prove_table(table, topology)
    for rule in table:
        rest = [other for other in table if other is not rule]
        with pytest.raises(PlacementError, match="elements that no rank holds"):
            prove(place_all(rest, topology), shapes)
    with pytest.raises(PlacementError, match="two rules for the local parameter"):
        place_all([*table, table[3]], topology)


def test_tied_copy_stands_where_the_embedding_does_not() -> None:
    model = published(64, 4, 4, 2, 96, 40, 320, True, mrope=(2, 3, 3))
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
