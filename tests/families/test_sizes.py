"""Every published size is covered, on shapes alone, at every tensor-parallel size and pipeline list that its public guide has."""

from __future__ import annotations

import sys
from math import prod

import pytest
import torch

from tangram.config.model import ModelConfig
from tangram.errors import PlacementError
from tangram.families import get_family
from tangram.placement.blocks import canonical_shapes, place_all
from tangram.placement.proof import cover_extremes, distinct_elements, prove
from tangram.placement.table import Rule, Shape, padded_vocabulary
from tangram.placement.topology import Topology
from tests.families.sizes import SIZES, Size

TENSORS = (1, 2, 4, 8)

ELEMENTS = {
    "qwen2_vl-2b": 2_208_985_600,
    "qwen2_vl-7b": 8_291_375_616,
    "qwen2_vl-72b": 73_405_560_320,
    "qwen2_5_vl-3b": 3_754_622_976,
    "qwen2_5_vl-7b": 8_292_166_656,
    "qwen2_5_vl-32b": 33_452_718_336,
    "qwen2_5_vl-72b": 73_410_777_344,
    "llava-7b": 7_063_427_072,
    "llava-13b": 13_351_494_656,
}
"""Parameters of the published checkpoints, tied heads counted once."""

REFUSED = {
    ("qwen2_vl-2b", 4): "layers.0.self_attn.q_proj.weight: number of key/value heads 2 is not divisible by tensor-parallel size 4",
    ("qwen2_vl-2b", 8): "layers.0.self_attn.q_proj.weight: number of key/value heads 2 is not divisible by tensor-parallel size 8",
    ("qwen2_vl-7b", 8): "layers.0.self_attn.q_proj.weight: number of key/value heads 4 is not divisible by tensor-parallel size 8",
    ("qwen2_5_vl-3b", 4): "layers.0.self_attn.q_proj.weight: number of key/value heads 2 is not divisible by tensor-parallel size 4",
    ("qwen2_5_vl-3b", 8): "blocks.0.mlp.gate_proj.weight: feed-forward size 3420 is not divisible by tensor-parallel size 8",
    ("qwen2_5_vl-7b", 8): "blocks.0.mlp.gate_proj.weight: feed-forward size 3420 is not divisible by tensor-parallel size 8",
}


def model_of(size: Size) -> ModelConfig:
    return get_family(size.family).from_hf_config(size.hf)


def table_of(size: Size, model: ModelConfig, tensor: int) -> list[Rule]:
    return get_family(size.family).tensor_table(model, padded_vocabulary(model.text_decoder.vocab_size, tensor))


def topologies(size: Size, model: ModelConfig, tensor: int) -> list[Topology]:
    assert model.image_encoder is not None
    layers = {"vision_layers": model.image_encoder.vision_encoder.num_layers, "text_layers": model.text_decoder.num_layers, "tensor": tensor}
    return [Topology.build(**layers, vit_pp_layers=vit, llm_pp_layers=llm) for vit, llm in ((None, None), *size.splits)]


def shapes_by_transformers(size: Size) -> dict[str, Shape]:
    """Name and shape of every parameter, of a model without storage; a tied head left out."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = {key: value for key, value in size.hf.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(size.hf["model_type"], **settings))
    tied = {"lm_head.weight"} if size.hf["tie_word_embeddings"] else set()
    named = {get_family(size.family).canonical_name(name): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shape for name, shape in named.items() if name not in tied}


@pytest.mark.compat
@pytest.mark.parametrize("name", SIZES)
def test_canonical_tensors_are_those_of_transformers(name: str) -> None:
    size = SIZES[name]
    model = model_of(size)
    shapes = canonical_shapes(table_of(size, model, 1), topologies(size, model, 1)[0])
    assert shapes == shapes_by_transformers(size)
    assert sum(map(prod, shapes.values())) == ELEMENTS[name]


@pytest.mark.parametrize("name", SIZES)
def test_every_legal_split_is_covered_and_every_other_refused(name: str) -> None:
    size = SIZES[name]
    model = model_of(size)
    for tensor in TENSORS:
        table = table_of(size, model, tensor)
        for topology in topologies(size, model, tensor):
            if (name, tensor) in REFUSED:
                with pytest.raises(PlacementError) as error:
                    place_all(table, topology)
                assert REFUSED[name, tensor] in str(error.value)
                continue
            placements = place_all(table, topology)
            prove(placements, canonical_shapes(table, topology))
            assert distinct_elements(placements) == ELEMENTS[name]


def test_work_of_the_proof_grows_as_the_number_of_layers() -> None:
    """Counted in calls of functions, at the largest tensor-parallel size: twice as many layers more are twice as many calls more."""
    size = SIZES["qwen2_5_vl-72b"]

    def calls(layers: int) -> int:
        model = get_family(size.family).from_hf_config({**size.hf, "num_hidden_layers": layers, "max_window_layers": layers})
        table = table_of(size, model, 8)
        topology = Topology.build(vision_layers=32, text_layers=layers, tensor=8, vit_pp_layers=[32, 0, 0, 0], llm_pp_layers=[layers // 4] * 4)
        made = 0

        def count(*_: object) -> None:
            nonlocal made
            made += 1

        cover_extremes.cache_clear()
        sys.setprofile(count)
        try:
            prove(place_all(table, topology), canonical_shapes(table, topology))
        finally:
            sys.setprofile(None)
        return made

    few, more, most = calls(8), calls(16), calls(32)
    assert (most - more) < 2.2 * (more - few)
