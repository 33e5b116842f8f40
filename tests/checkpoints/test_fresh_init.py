"""Random initialisation that no split can change."""

import math

import pytest
import torch

from tangram.checkpoints.copier import LocalSource
from tangram.checkpoints.fresh import FreshSource, generator_seed, initialize
from tangram.checkpoints.reader import read_whole
from tangram.families.base import get_family
from tangram.placement.blocks import canonical_shapes, place
from tangram.placement.topology import Topology

STD = {"vision": 0.01, "text": 0.02}
SPLITS = [
    {"tensor": 2},
    {"tensor": 4},
    {"llm_pp_layers": [1, 3]},
    {"tensor": 2, "llm_pp_layers": [0, 4], "vit_pp_layers": [3, 1]},
    {"llm_pp_layers": [[1, 1], [1, 1]]},
]


def model_of(kit, tied):
    config = kit.golden_config()
    for section in (config, config["text_config"]):
        section.update(num_attention_heads=8, num_key_value_heads=4, hidden_size=64, vocab_size=1000, intermediate_size=768, tie_word_embeddings=tied)
    config["vision_config"]["out_hidden_size"] = 64
    family = get_family("qwen2_5_vl")
    return family.tensor_table(family.from_hf_config(config), 1000)


def draw(table, topology, seed=1, dtype=torch.float32):
    """Canonical tensors of a freshly initialised split, and its local ones by (tp, pp, vp)."""
    parts, local = [], {}
    for pp_rank in range(topology.pipeline):
        for tp_rank in range(topology.tensor):
            placements = [place(table, topology, tp_rank, topology.chunk(pp_rank, vp)) for vp in range(topology.virtual)]
            parameters = [{name: torch.full(t.shape, torch.nan, dtype=dtype) for name, t in p.tensors.items()} for p in placements]
            initialize(placements, parameters, seed, STD)
            for vp, (placement, chunk) in enumerate(zip(placements, parameters, strict=True)):
                parts.append((placement, chunk, f"{tp_rank} {pp_rank}"))
                local[tp_rank, pp_rank, vp] = chunk
    source = LocalSource(parts, canonical_shapes(table, topology))
    return {name: read_whole(source, name).clone() for name in source.names()}, local


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def table(request, kit):
    return model_of(kit, request.param)


@pytest.fixture(scope="module")
def whole(table):
    return draw(table, Topology.build(vision_layers=4, text_layers=4))[0]


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_every_split_starts_from_the_same_bits(sizes, table, whole, kit):
    found, _ = draw(table, Topology.build(vision_layers=4, text_layers=4, **sizes))
    kit.assert_same(found, whole)


def test_values_are_normal_with_the_component_s_deviation(whole):
    for name, std in (
        ("model.visual.merger.mlp.0.weight", 0.01),
        ("model.language_model.embed_tokens.weight", 0.02),
        ("model.language_model.layers.2.mlp.up_proj.weight", 0.02),
    ):
        values = whole[name].double().flatten() / std
        count = values.numel()
        # five standard errors of the mean, of the variance and of the share within one deviation
        assert abs(values.mean()) < 5 / math.sqrt(count)
        assert abs(values.var() - 1) < 5 * math.sqrt(2 / count)
        share = math.erf(1 / math.sqrt(2))
        assert abs((values.abs() < 1).double().mean() - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_norms_start_at_one_and_biases_at_zero(whole):
    for name, tensor in whole.items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif "norm" in name or "ln_q" in name:
            assert (tensor == 1).all(), name
        else:
            assert tensor.std() > 0, name


def test_no_two_tensors_or_rows_start_alike(whole):
    rows = torch.cat([tensor.flatten(1)[:, :8] for tensor in whole.values() if tensor.dim() > 1 and tensor.std() > 0])
    assert len(rows.unique(dim=0)) == len(rows)


def test_another_seed_gives_other_values(table, whole):
    other, _ = draw(table, Topology.build(vision_layers=4, text_layers=4), seed=2)
    name = "model.language_model.embed_tokens.weight"
    assert not torch.isclose(other[name], whole[name]).any(dim=1).all()
    assert not torch.equal(other[name], whole[name])


def test_ranks_hold_different_parts_and_equal_replicas(kit):
    _, local = draw(model_of(kit, tied=True), Topology.build(vision_layers=4, text_layers=4, tensor=2, llm_pp_layers=[1, 3]))
    one, two = local[0, 0, 0], local[1, 0, 0]
    assert not torch.equal(
        one["text_decoder.decoder.layers.0.self_attention.linear_qkv.weight"], two["text_decoder.decoder.layers.0.self_attention.linear_qkv.weight"]
    )
    assert torch.equal(one["image_encoder.encoder.patch_embed.proj.weight"], two["image_encoder.encoder.patch_embed.proj.weight"])
    assert torch.equal(one["text_decoder.embedding.word_embeddings.weight"], local[0, 1, 0]["text_decoder.output_layer.weight"])


def test_narrow_types_are_drawn_wide_and_rounded(table, whole):
    found, _ = draw(table, Topology.build(vision_layers=4, text_layers=4), dtype=torch.bfloat16)
    assert all(torch.equal(tensor, whole[name].bfloat16()) for name, tensor in found.items())


def test_a_part_is_drawn_without_the_rest():
    # the whole tensor would take 4 TB
    source = FreshSource(3, {"w": ((1 << 30, 1 << 10), "normal", 1.0)})
    far = source.read("w", ((1 << 30) - 100, 5), (100, 7))
    assert far.shape == (100, 7) and far.std() > 0.5
    assert torch.equal(far[40:], FreshSource(3, {"w": ((1 << 30, 1 << 10), "normal", 1.0)}).read("w", ((1 << 30) - 60, 5), (60, 7)))


def test_seeds_of_chunks_are_the_same_everywhere():
    # printf '42/lm_head.weight/0' | b2sum -l 64
    assert generator_seed(42, "lm_head.weight", 0) == int.from_bytes(bytes.fromhex("75ea6898f7fc53c2"), "little") >> 1
