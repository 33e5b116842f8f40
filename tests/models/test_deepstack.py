"""DeepStack in the assembled model, in one process: features, their places, recomputation, packed rows, and what travels over a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tangram.data.collate import Collator
from tangram.data.encode import EncodedSample
from tangram.families import get_family
from tangram.models.media import add_rows, media_places, put_rows
from tangram.models.payload import activation_shapes, pack, payload_shape, unpack
from tangram.models.rope import inverse_frequencies, text_angles
from tangram.models.vlm import VLMModel
from tangram.placement.topology import Topology
from tests.largest import largest
from tests.models.conftest import hf_config, make_hf, make_sample, run_hf
from tests.models.test_against_hf import assemble, canonical_gradients, relative

BATCH_KEYS = ("input_ids", "attention_mask", "position_ids", "labels", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
Grid = tuple[int, int, int]


def mixed() -> list[EncodedSample]:
    """An image; text alone; a video before an image; two images and a video between."""
    return [
        make_sample(0, [1, 2], (1, 4, 6), list(range(40, 52))),
        make_sample(1, list(range(100, 117))),
        make_sample(2, [22], (3, 6, 4), [23, 25], (1, 8, 4), list(range(60, 71)), timed=True),
        make_sample(3, (1, 4, 4), [7], (2, 4, 4), [8, 10], (1, 6, 4), [11, 13], timed=True),
    ]


def collate(built: VLMModel, samples: list[EncodedSample], packing: bool) -> dict[str, Any]:
    batch = Collator(get_family("qwen3_vl").rope_index, built.model, 0, 8 if packing else 1, packing)([[one] for one in samples])
    wanted = (*BATCH_KEYS, "cu_seqlens", "cu_seqlens_padded") if packing else BATCH_KEYS
    return {name: batch[name] for name in wanted if name in batch}


@pytest.mark.compat
def test_packed_rows_of_images_and_timed_videos_train_as_hugging_face(one_process: None) -> None:
    hf = make_hf("qwen3_vl")
    built, placement = assemble(hf, "qwen3_vl")
    apart, together = (collate(built, mixed(), packing) for packing in (False, True))
    inputs = {name: tensor for name, tensor in apart.items() if name != "position_ids"}
    reference = run_hf(hf, inputs, apart["position_ids"]).loss
    reference.backward()
    for batch in (apart, together):
        built.zero_grad()
        loss = built(**batch)["loss_dict"]["token_losses"].mean()
        loss.backward()
        assert relative(loss, reference) < 1e-6
        gradients = canonical_gradients(built, placement, hf)
        worst = largest((relative(gradients[name], parameter.grad), name) for name, parameter in hf.named_parameters())
        assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("grids", [[(1, 4, 4)], [(1, 2, 14), (1, 20, 6)], [(3, 4, 6), (1, 6, 6), (2, 4, 6)]])
def test_vision_tokens_and_every_feature_match_on_grids_smaller_and_larger_than_the_position_table(one_process: None, grids: list[Grid]) -> None:
    hf = make_hf("qwen3_vl")
    built, _ = assemble(hf, "qwen3_vl")
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1176)
    visual = hf.model.visual(pixels, grid_thw=torch.tensor(grids))
    tokens, features = visual if isinstance(visual, tuple) else (visual.pooler_output, visual.deepstack_features)
    assert built.image_encoder is not None
    ours, made = built.image_encoder(pixels, grids)
    assert relative(ours[:, 0], tokens) < 1e-5
    assert len(made) == len(features) == 3
    assert all(relative(mine, theirs) < 1e-5 for mine, theirs in zip(made, features, strict=True))


@pytest.mark.parametrize(
    "method", [{}, {"recompute_method": "uniform", "recompute_num_layers": 2}, {"recompute_method": "block", "recompute_num_layers": 1}]
)
def test_a_micro_batch_without_media_gives_the_vision_path_gradients_of_exactly_zero(one_process: None, method: dict[str, Any]) -> None:
    hf = make_hf("qwen3_vl")
    built, placement = assemble(hf, "qwen3_vl", **recompute(method))
    batch = collate(built, [mixed()[1]], packing=False)
    reference = run_hf(hf, {name: tensor for name, tensor in batch.items() if name != "position_ids"}, batch["position_ids"]).loss
    reference.backward()
    built(**batch)["loss_dict"]["token_losses"].mean().backward()
    vision = {name: parameter.grad for name, parameter in built.named_parameters() if name.startswith("image_encoder.")}
    assert any("deepstack_layer" in name for name in vision) and "image_encoder.encoder.pos_embed.weight" in vision
    assert all(gradient is not None and not gradient.any() for gradient in vision.values())
    gradients = canonical_gradients(built, placement, hf)
    text = [(name, parameter) for name, parameter in hf.named_parameters() if not name.startswith("model.visual.")]
    assert largest(relative(gradients[name], parameter.grad) for name, parameter in text) < 1e-5


def recompute(method: dict[str, Any]) -> dict[str, Any]:
    from tangram.backends.megatron.cpu import adapt

    adapt()
    return {"recompute_granularity": "full", **method} if method else {}


@pytest.mark.parametrize(("method", "layers"), [("uniform", 1), ("uniform", 2), ("uniform", 3), ("block", 2)])
def test_recomputation_changes_no_number(one_process: None, method: str, layers: int) -> None:
    """In the vision encoder too, whose layers give features: the last of a run, in the middle of it, and outside."""
    hf = make_hf("qwen3_vl")
    results = []
    for keys in ({}, recompute({"recompute_method": method, "recompute_num_layers": layers})):
        built, placement = assemble(hf, "qwen3_vl", **keys)
        assert built.image_encoder is not None
        for key, value in keys.items():
            setattr(built.image_encoder.encoder.blocks.config, key, value)
        loss = built(**collate(built, mixed(), packing=True))["loss_dict"]["token_losses"].sum()
        loss.backward()
        results.append((loss.item(), canonical_gradients(built, placement, hf)))
    (loss_a, gradients_a), (loss_b, gradients_b) = results
    assert loss_a == loss_b
    assert all(torch.equal(gradients_a[name], gradients_b[name]) for name in gradients_a)


def test_rotary_pairs_go_to_time_height_and_width_in_turn_and_what_is_left_to_time() -> None:
    """Sections of 4, 2 and 2 of 8 pairs: t h w t h w t t."""
    positions = torch.tensor([3, 50, 700])[:, None, None]
    angles = text_angles(positions, 16, 1e4, [4, 2, 2], interleaved=True)
    expected = torch.tensor([3, 50, 700, 3, 50, 700, 3, 3]) * inverse_frequencies(16, 1e4, torch.device("cpu"))
    assert torch.equal(angles.flatten(), torch.cat([expected, expected]))


def test_rows_go_to_images_then_videos_row_after_row_and_a_blank_row_goes_nowhere() -> None:
    ids = torch.tensor([[9, 1, 5, 1], [1, 5, 5, 9]])
    places = media_places(ids, (1, 5))
    assert places.tolist() == [2, 6, 1, 4, 3, 5], "position * 2 + row of ones, then of fives"
    hidden, rows = torch.zeros(4, 2, 1), torch.arange(1.0, 7.0)[:, None].requires_grad_()
    assert put_rows(hidden, places, rows)[..., 0].T.tolist() == [[0, 1, 4, 2], [3, 5, 6, 0]]
    assert add_rows(hidden + 10, places, rows)[..., 0].T.tolist() == [[10, 11, 14, 12], [13, 15, 16, 10]]
    blank = torch.ones(1, 1, requires_grad=True)
    none = media_places(ids, (7, None))
    (put_rows(hidden, none, blank) + add_rows(hidden, none, blank)).sum().backward()
    assert none.shape == (0,) and blank.grad is not None and blank.grad.tolist() == [[0.0]]


def test_several_tensors_travel_as_one_and_each_gets_its_gradient() -> None:
    tensors = [torch.randn(5, 2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    sent = pack(tensors)
    assert tuple(sent.shape) == payload_shape(shapes) == (54,) and not sent._is_view()
    received = sent.detach().requires_grad_()
    parts = unpack(received, shapes)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, tensors, strict=True))
    (2 * parts[0]).sum().add((3 * parts[2]).sum()).backward()
    sent.backward(received.grad)
    assert [tensor.grad.unique().tolist() for tensor in tensors] == [[2.0], [0.0], [3.0]]  # type: ignore[union-attr]
    assert pack(tensors[:1]) is tensors[0] and unpack(received, [(54,)])[0] is received


def test_features_travel_from_the_stage_of_their_block_to_that_of_their_text_layer() -> None:
    """QwenLM/Qwen3-VL#1497: one text layer on the first stage, and three features. Vision 32 wide with features after blocks 0, 1 and 3, text 64."""
    model = get_family("qwen3_vl").from_hf_config(hf_config(make_hf("qwen3_vl")))
    batch = {"input_ids": torch.zeros(2, 40), "image_grid_thw": torch.tensor([[1, 4, 6]]), "video_grid_thw": torch.tensor([[2, 4, 4]])}
    text, feature = (40, 2, 64), (14, 64)
    expected = {
        ((4, 0, 0), (1, 1, 1)): [(text, feature, feature), (text, feature)],
        ((4, 0), (0, 3)): [((14, 1, 64), feature, feature, feature)],
        ((1, 1, 2), (0, 0, 3)): [((56, 1, 32), feature), ((56, 1, 32), feature, feature)],
        ((2, 2, 0), (0, 2, 1)): [((56, 1, 32), feature, feature), (text, feature)],
    }
    for (vision, layers), wanted in expected.items():
        topology = Topology.build(vision_layers=4, text_layers=3, vit_pp_layers=list(vision), llm_pp_layers=list(layers))
        assert [activation_shapes(topology, model, position, batch) for position in range(len(layers) - 1)] == wanted, (vision, layers)
    topology = Topology.build(vision_layers=4, text_layers=3, vit_pp_layers=[4, 0], llm_pp_layers=[1, 2])
    assert activation_shapes(topology, model, 0, {"input_ids": torch.zeros(1, 9)}) == ((9, 1, 64), (1, 64), (1, 64)), "one blank token"
