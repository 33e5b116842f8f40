"""Fused and split layouts, worked out by hand."""

import pytest
import torch

from tangram.errors import PlacementError
from tangram.families.base import get_family
from tangram.placement.blocks import canonical_shapes, place_all
from tangram.placement.proof import prove, prove_table
from tangram.placement.topology import Topology

QKV = "self_attention.linear_qkv.weight"
TEXT_0 = "text_decoder.decoder.layers.0"
VISION_0 = "image_encoder.encoder.blocks.layers.0"


def row_numbers(name, shape):
    """Every row holds 1000 x (q 1, k 2, v 3, else 0) + its number."""
    family = next((i for i, part in enumerate(("q_proj", "k_proj", "v_proj"), 1) if part in name), 0)
    return (1000 * family + torch.arange(shape[0], dtype=torch.float32)).view(-1, *[1] * (len(shape) - 1)).expand(shape).contiguous()


def heads(kind, *numbers, width):
    return [1000 * kind + head * width + row for head in numbers for row in range(width)]


@pytest.fixture(scope="module")
def small(kit, tmp_path_factory):
    """4 query heads, 2 key/value groups, head width 8; 4 vision heads of width 8; rows numbered."""
    return kit.write_hf(tmp_path_factory.mktemp("layout") / "hf", heads=4, groups=2, dtype=torch.float32, fill=row_numbers)


def test_grouped_attention_is_interleaved_by_key_value_group(small, kit, tmp_path):
    # q0 q1 k0 v0 | q2 q3 k1 v1
    first = [*heads(1, 0, 1, width=8), *heads(2, 0, width=8), *heads(3, 0, width=8)]
    second = [*heads(1, 2, 3, width=8), *heads(2, 1, width=8), *heads(3, 1, width=8)]
    kit.to_mm(small, tmp_path / "tp1")
    assert kit.load_rank(tmp_path / "tp1", "mp_rank_00")["model"][f"{TEXT_0}.{QKV}"][:, 0].tolist() == first + second
    kit.to_mm(small, tmp_path / "tp2", tp_size=2)
    for rank, rows in enumerate((first, second)):
        assert kit.load_rank(tmp_path / "tp2", f"mp_rank_0{rank}")["model"][f"{TEXT_0}.{QKV}"][:, 0].tolist() == rows


def test_vision_attention_is_interleaved_by_head(small, kit, tmp_path):
    # rows of the one HF tensor: q 0..31, k 32..63, v 64..95, 8 to a head
    def head(number):
        return [part * 32 + number * 8 + row for part in range(3) for row in range(8)]

    kit.to_mm(small, tmp_path / "mm", tp_size=2)
    for rank, owned in enumerate(((0, 1), (2, 3))):
        found = kit.load_rank(tmp_path / "mm", f"mp_rank_0{rank}")["model"][f"{VISION_0}.{QKV}"][:, 0].tolist()
        assert found == [row for number in owned for row in head(number)]


def test_gate_and_up_are_split_before_they_are_joined(small, kit, tmp_path):
    kit.to_mm(small, tmp_path / "mm", tp_size=2)
    for rank in (0, 1):
        part = list(range(rank * 24, rank * 24 + 24))
        found = kit.load_rank(tmp_path / "mm", f"mp_rank_0{rank}")["model"][f"{TEXT_0}.mlp.linear_fc1.weight"]
        assert found[:, 0].tolist() == part + part


def test_row_parallel_weights_are_split_by_columns_and_their_bias_is_whole(kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf")
    kit.to_mm(hf, tmp_path / "mm", tp_size=2)
    whole = kit.hf_tensors(hf)
    for rank in (0, 1):
        model = kit.load_rank(tmp_path / "mm", f"mp_rank_0{rank}")["model"]
        assert torch.equal(model[f"{TEXT_0}.mlp.linear_fc2.weight"], whole["model.layers.0.mlp.down_proj.weight"][:, rank * 24 : rank * 24 + 24])
        assert torch.equal(model[f"{VISION_0}.mlp.linear_fc2.bias"], whole["visual.blocks.0.mlp.down_proj.bias"])


@pytest.mark.parametrize("split", [[2, 2], [1, 3]])
def test_later_stages_hold_later_layers(split, kit, tmp_path):
    def layer_number(name, shape):
        parts = name.split(".")
        return torch.full(shape, float(parts[parts.index("layers") + 1]) if "layers" in parts else -1.0)

    hf = kit.write_hf(tmp_path / "hf", fill=layer_number)
    kit.to_mm(hf, tmp_path / "mm", llm_pp_layers=split)
    for rank, layers in enumerate((range(split[0]), range(split[0], 4))):
        model = kit.load_rank(tmp_path / "mm", f"mp_rank_00_00{rank}")["model"]
        found = [model[f"text_decoder.decoder.layers.{i}.{QKV}"].unique().tolist() for i in range(len(layers))]
        assert found == [[float(layer)] for layer in layers]


def table_and_split(kit, **sizes):
    family, config = get_family("qwen2_5_vl"), kit.golden_config()
    return family.tensor_table(family.from_hf_config(config), 320), Topology.build(vision_layers=4, text_layers=4, **sizes)


def test_the_proof_fails_if_any_rule_is_removed(kit):
    table, topology = table_and_split(kit, tensor=2, llm_pp_layers=[2, 2])
    shapes = prove_table(table, topology)
    for removed in range(len(table)):
        shorter = table[:removed] + table[removed + 1 :]
        with pytest.raises(PlacementError, match=r"tensors have elements that no rank holds"):
            prove(place_all(shorter, topology), shapes)


def test_the_proof_fails_if_a_rank_is_missing(kit):
    table, topology = table_and_split(kit, tensor=2)
    with pytest.raises(PlacementError, match=r"elements that no rank holds: .*lm_head"):
        prove(place_all(table, topology)[:1], canonical_shapes(table, topology))


@pytest.mark.parametrize(("groups", "tp_size"), [(2, 4), (3, 2)])
def test_key_value_heads_that_do_not_divide_are_refused_before_anything_is_written(groups, tp_size, kit, tmp_path):
    hf = kit.write_hf(tmp_path / "hf", heads=groups * 2, groups=groups, hidden=groups * 16)
    with pytest.raises(PlacementError, match=rf"key/value heads {groups} is not divisible by tensor-parallel size {tp_size}"):
        kit.to_mm(hf, tmp_path / "mm", tp_size=tp_size)
    assert kit.files(tmp_path) == ["hf", "hf/config.json", "hf/model.safetensors"]
