"""The assembled model in one process against Hugging Face: losses, logits, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tangram.errors import DataError, PlacementError
from tangram.families import get_family
from tangram.models.marks import mark_parallel
from tangram.models.vlm import VLMModel, build_model_chunk
from tangram.placement.blocks import Placement, place
from tangram.placement.topology import Topology
from tests.largest import largest
from tests.models.conftest import hf_config, hf_positions, make_batch, make_hf, run_hf

ROWS = [[1, 2, -1, 3, 4, 5, -2, *range(6, 20)], list(range(30, 60)), [7, -3, 8, 9]]
GRIDS = [(1, 4, 6), (1, 10, 8), (1, 4, 4)]


def assemble(hf: Any, family_name: str, **overrides: Any) -> tuple[VLMModel, Placement]:
    family = get_family(family_name)
    model = family.from_hf_config(hf_config(hf))
    if overrides:
        model = model.model_copy(update={"text_decoder": model.text_decoder.model_copy(update=overrides)})
    text, encoder = model.text_decoder, model.image_encoder
    assert encoder is not None
    topology = Topology.build(vision_layers=encoder.vision_encoder.num_layers, text_layers=text.num_layers)
    chunk = topology.order[0]
    built = build_model_chunk(model, chunk, topology, torch.float32, text.vocab_size)
    placement = place(family.tensor_table(model, text.vocab_size), topology, 0, chunk)
    parameters = dict(built.named_parameters())
    mark_parallel(parameters, placement, topology)
    state = hf.state_dict()
    with torch.no_grad():
        for block in placement.blocks:
            parameters[block.local][block.local_slices] = state[block.canonical][block.canonical_slices]
    return built.train(), placement


def canonical_gradients(built: VLMModel, placement: Placement, hf: Any) -> dict[str, torch.Tensor]:
    gradients = {name: torch.zeros_like(parameter) for name, parameter in hf.named_parameters()}
    parameters = dict(built.named_parameters())
    for block in placement.blocks:
        gradients[block.canonical][block.canonical_slices] += parameters[block.local].grad[block.local_slices]
    return gradients


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm-wise; where ``b`` is zero, as the gradient of what reaches no label, the norm of ``a``."""
    return float(((a - b).norm() / (b.norm() if b.any() else 1.0)).detach())


@pytest.mark.compat
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("left_pad", [False, True])
def test_loss_logits_and_every_gradient_match(one_process: None, family: str, tied: bool, left_pad: bool) -> None:
    hf = make_hf(family, tied)
    batch = make_batch(GRIDS, ROWS, left_pad)
    positions = hf_positions(hf, batch)
    reference = run_hf(hf, batch, positions)
    reference.loss.backward()
    built, placement = assemble(hf, family)
    loss = built(position_ids=positions, **batch)["loss_dict"]["token_losses"].mean()
    loss.backward()
    assert abs(loss.item() - reference.loss.item()) <= 1e-6 * reference.loss.item()
    logits = built(position_ids=positions, **{**batch, "labels": None})["logits"]
    real = batch["attention_mask"].bool()
    assert relative(logits[real], reference.logits[real]) < 1e-5
    gradients = canonical_gradients(built, placement, hf)
    # What the last text layer gets of DeepStack reaches no label: nothing attends to it any more.
    unused = {name for name, parameter in hf.named_parameters() if not parameter.grad.any()}
    assert {name for name, gradient in gradients.items() if not gradient.any()} == unused
    assert not unused or family == "qwen3_vl"
    worst = largest((relative(gradients[name], parameter.grad), name) for name, parameter in hf.named_parameters() if name not in unused)
    assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("alike", [True, False])
def test_losses_in_chunks_serve_any_loss_function(one_process: None, tied: bool, alike: bool) -> None:
    """Weights that are not alike make the head run once more in the backward pass."""
    hf = make_hf("qwen2_5_vl", tied)
    batch = make_batch(GRIDS, ROWS)
    positions = hf_positions(hf, batch)
    results = []
    for chunk_size in (None, 7):
        built, placement = assemble(hf, "qwen2_5_vl", loss_chunk_size=chunk_size)
        losses = built(position_ids=positions, **batch)["loss_dict"]["token_losses"]
        (losses * (0.3 if alike else torch.linspace(-1, 1, len(losses)))).sum().backward()
        results.append((losses.detach(), canonical_gradients(built, placement, hf)))
    (whole, wanted), (chunked, found) = results
    assert torch.allclose(chunked, whole, rtol=1e-6, atol=1e-6)
    assert largest(relative(found[name], wanted[name]) for name in wanted) < 1e-5


@pytest.mark.parametrize("grids", [[(1, 4, 4)], [(1, 8, 12)], [(1, 6, 10), (1, 12, 4)], [(3, 4, 6)]])
def test_vision_tokens_match_for_windows_that_do_and_do_not_divide(one_process: None, grids: list[tuple[int, int, int]]) -> None:
    hf = make_hf("qwen2_5_vl")
    built, _ = assemble(hf, "qwen2_5_vl")
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 1176)
    visual = hf.model.visual(pixels, grid_thw=torch.tensor(grids))
    visual = visual if isinstance(visual, torch.Tensor) else visual.pooler_output
    ours = built.image_encoder(pixels, grids)[0][:, 0]
    assert relative(ours, visual) < 1e-5


def test_window_blocks_and_full_blocks_are_not_interchangeable(one_process: None) -> None:
    hf = make_hf("qwen2_5_vl")
    built, _ = assemble(hf, "qwen2_5_vl")
    pixels, grids = torch.randn(8 * 12, 1176), [(1, 8, 12)]
    before, _ = built.image_encoder(pixels, grids)
    encoder = built.image_encoder.encoder
    encoder.section = encoder.section.model_copy(update={"fullatt_block_indexes": [0, 2]})
    assert relative(built.image_encoder(pixels, grids)[0], before) > 1e-3


def test_text_only_batch_gives_the_vision_path_zero_gradients_and_the_text_model_its_own(one_process: None) -> None:
    hf = make_hf("qwen2_5_vl")
    batch = make_batch([], [list(range(5, 25))])
    positions = hf_positions(hf, batch)
    reference = run_hf(hf, batch, positions)
    reference.loss.backward()
    built, placement = assemble(hf, "qwen2_5_vl")
    loss = built(position_ids=positions, **batch)["loss_dict"]["token_losses"].mean()
    loss.backward()
    assert abs(loss.item() - reference.loss.item()) <= 1e-6 * reference.loss.item()
    for name, parameter in built.named_parameters():
        if name.startswith("image_encoder."):
            assert parameter.grad is not None and not parameter.grad.any(), name
    gradients = canonical_gradients(built, placement, hf)
    text = [(name, p) for name, p in hf.named_parameters() if p.grad is not None and not name.startswith("model.visual.")]
    assert largest(relative(gradients[name], p.grad) for name, p in text) < 1e-5


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective"},
    ],
)
def test_recomputation_saves_less_and_changes_no_number(one_process: None, recompute: dict[str, Any]) -> None:
    from tangram.backends.megatron.cpu import adapt

    adapt()
    hf = make_hf("qwen2_5_vl")
    batch = make_batch(GRIDS, ROWS)
    positions = hf_positions(hf, batch)
    results = []
    for overrides in ({}, recompute):
        built, placement = assemble(hf, "qwen2_5_vl", **overrides)
        saved = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = built(position_ids=positions, **batch)["loss_dict"]["token_losses"].sum()
        loss.backward()
        results.append((loss.item(), canonical_gradients(built, placement, hf), saved))
    (loss_a, gradients_a, saved_a), (loss_b, gradients_b, saved_b) = results
    assert loss_a == loss_b
    assert all(torch.equal(gradients_a[name], gradients_b[name]) for name in gradients_a)
    assert saved_b < saved_a


def test_placeholders_and_images_that_disagree_are_refused_with_both_numbers(one_process: None) -> None:
    hf = make_hf("qwen2_5_vl")
    built, _ = assemble(hf, "qwen2_5_vl")
    batch = make_batch([(1, 4, 6)], [[1, -1, 2, 3]])
    positions = hf_positions(hf, batch)
    batch["image_grid_thw"] = torch.tensor([(1, 4, 4)])
    batch["pixel_values"] = batch["pixel_values"][:16]
    with pytest.raises(DataError, match="6 image placeholder tokens but its images give 4"):
        built(position_ids=positions, **batch)


def test_a_model_that_is_not_the_tables_is_refused_by_name(one_process: None) -> None:
    hf = make_hf("qwen2_5_vl")
    built, placement = assemble(hf, "qwen2_5_vl")
    parameters = dict(built.named_parameters())
    parameters["text_decoder.extra.weight"] = parameters.pop("text_decoder.output_layer.weight")
    with pytest.raises(PlacementError, match="1 missing: text_decoder.output_layer.weight; 1 unexpected: text_decoder.extra.weight"):
        mark_parallel(parameters, placement, built.topology)


def test_a_stage_after_frozen_ones_keeps_no_activations_for_them(one_process: None) -> None:
    """modelscope/ms-swift#9945: what arrives from another stage asks for a gradient, which makes a frozen encoder keep all it computes."""
    model = get_family("qwen2_5_vl").from_hf_config(hf_config(make_hf("qwen2_5_vl")))
    topology = Topology.build(vision_layers=4, text_layers=3, vit_pp_layers=[2, 2], llm_pp_layers=[0, 3])
    second = build_model_chunk(model, topology.order[1], topology, torch.float32, 320).train()
    batch = make_batch(GRIDS, ROWS)
    positions = torch.zeros(3, *batch["input_ids"].shape)

    def run(**frozen: bool) -> tuple[bool, torch.Tensor | None, int]:
        saved = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        second.freeze(**frozen)
        received = torch.zeros(len(batch["pixel_values"]), 1, 32, requires_grad=True)
        second.set_input_tensor([received])
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            losses = second(position_ids=positions, **batch)["loss_dict"]["token_losses"]
        return losses.requires_grad, received.grad, saved

    graph, gradient, nothing = run(freeze_text_decoder=True, freeze_image_encoder=True, freeze_image_projection=True)
    assert gradient is not None and not gradient.any(), "the first stage waits for it"
    assert not graph and nothing == 0
    graph, _, some = run(freeze_image_encoder=True)
    _, gradient, everything = run()
    assert graph and gradient is None and everything - some > 150_000


def test_frozen_component_has_no_graph(one_process: None) -> None:
    hf = make_hf("qwen2_5_vl")
    built, _ = assemble(hf, "qwen2_5_vl")
    built.freeze(freeze_image_encoder=True, freeze_image_projection=True)
    batch = make_batch(GRIDS, ROWS)
    assert not built.image_encoder(batch["pixel_values"], GRIDS)[0].requires_grad
    built.freeze(freeze_image_encoder=True)
    assert built.image_encoder(batch["pixel_values"], GRIDS)[0].requires_grad
    trainable = {name.split(".")[1] for name, p in built.image_encoder.named_parameters(prefix="image_encoder") if p.requires_grad}
    assert trainable == {"projector"}
