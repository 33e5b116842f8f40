"""A model from a folder of the user's own: registered, assembled, equal to its reference, split over TP and PP without a gap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tangram.errors import ConfigError
from tangram.families import get_family
from tangram.families.plugins import load_plugins
from tangram.models.registry import find_component
from tangram.placement.proof import prove_table
from tangram.placement.topology import Topology
from tests.largest import largest
from tests.models.conftest import hf_config, hf_positions, make_batch, make_hf, run_hf
from tests.models.test_against_hf import GRIDS, ROWS, assemble, canonical_gradients, relative

TOY = Path(__file__).parent.parent / "data" / "plugins" / "toy_vl"


def test_toy_family_matches_its_reference(one_process: None) -> None:
    load_plugins([TOY])
    hf = make_hf("qwen2_vl")
    post_norm = torch.nn.LayerNorm(32, eps=1e-6)
    torch.nn.init.normal_(post_norm.weight, 1.0, 0.2)
    torch.nn.init.normal_(post_norm.bias, 0.0, 0.2)
    hf.model.visual.post_norm = post_norm
    hf.model.visual.merger.register_forward_pre_hook(lambda module, args: (post_norm(args[0]), *args[1:]))
    batch = make_batch(GRIDS, ROWS)
    positions = hf_positions(hf, batch)
    reference = run_hf(hf, batch, positions)
    reference.loss.backward()
    built, placement = assemble(hf, "toy_vl")
    loss = built(position_ids=positions, **batch)["loss_dict"]["token_losses"].mean()
    loss.backward()
    assert abs(loss.item() - reference.loss.item()) <= 1e-6 * reference.loss.item()
    gradients = canonical_gradients(built, placement, hf)
    worst = largest((relative(gradients[name], parameter.grad), name) for name, parameter in hf.named_parameters())
    assert worst[0] < 1e-5, worst


def test_toy_table_covers_the_model_in_every_split() -> None:
    load_plugins([TOY])
    family = get_family("toy_vl")
    model = family.from_hf_config(json.loads(json.dumps(hf_config(make_hf("qwen2_vl")))))
    for tensor in (1, 2):
        for vision, text in (([4], [3]), ([4, 0], [1, 2]), ([3, 1], [0, 3])):
            topology = Topology.build(vision_layers=4, text_layers=3, tensor=tensor, vit_pp_layers=vision, llm_pp_layers=text)
            assert "model.visual.post_norm.weight" in prove_table(family.tensor_table(model, 320), topology)


def test_unknown_ids_name_the_known_ones() -> None:
    section = get_family("qwen2_vl").from_hf_config(hf_config(make_hf("qwen2_vl"))).text_decoder
    with pytest.raises(ConfigError, match="model_id 'qwen2lmm' names no component .did you mean 'qwen2lm'"):
        find_component(section.model_copy(update={"model_id": "qwen2lmm"}))
    with pytest.raises(ConfigError, match="unknown model family 'qwen9vl'"):
        get_family("qwen9vl")
