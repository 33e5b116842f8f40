"""Counted operations against torch's own counter, over transformers' forward and backward passes.

torch counts what is computed, so two things are added to ours, each by hand: the other half of causal attention, and CLIP's last layer, whose
output LLaVA leaves. Experts run one after the other there, for torch counts no grouped products.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tangram.align.batch import micro_batches
from tangram.align.default_batch import default_batch
from tangram.align.reference import forward_arguments, load_reference
from tangram.config.model import ModelConfig
from tangram.families import get_family
from tangram.families.flops import ModelFlops, counts_of
from tests.conftest import TinyHF

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava")
PER_TOKEN = ("input_ids", "attention_mask", "labels", "position_ids")
Names = Callable[[str], bool]
FROZEN: dict[str, tuple[str, Names]] = {
    "tower": ("qwen3_vl", lambda name: not name.startswith("model.visual.") or "merger" in name),
    "tower and mergers": ("qwen2_5_vl", lambda name: not name.startswith("model.visual.")),
    "all but the projector": ("llava", lambda name: "multi_modal_projector" in name),
    "text": ("qwen2_5_vl", lambda name: name.startswith("model.visual.")),
    "first layers": ("qwen3_vl_moe", lambda name: not ("visual" in name or "embed_tokens" in name or "layers.0." in name)),
}
"""A family, and what of it is trained."""


def everything(name: str) -> bool:
    return True


def flops_of(hf: Path, trains: Names = everything) -> tuple[ModelFlops, ModelConfig, list[dict[str, Any]]]:
    content = json.loads((hf / "config.json").read_text())
    family = get_family(content["model_type"])
    model = family.from_hf_config(content)
    table = family.tensor_table(model, model.text_decoder.vocab_size)
    batch, _ = default_batch(hf, family, model)
    rows = []
    for row in micro_batches(batch, model, 1):
        # Padding is computed too: left off.
        real = int(row["attention_mask"].sum())
        rows.append({key: value[..., :real] if key in PER_TOKEN else value for key, value in row.items()})
    return ModelFlops(model, table, lambda rule, name: trains(name)), model, rows


def reference_of(hf: Path, trains: Names = everything) -> torch.nn.Module:
    """transformers' model, whose operations all are matrix products and convolutions."""
    reference = load_reference(hf, attention="eager")
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(trains(name.replace("vision_tower.vision_model", "vision_tower")))
    if hasattr(reference, "set_experts_implementation"):
        reference.set_experts_implementation("eager")
    return reference.train()


def by_torch(reference: torch.nn.Module, batch: dict[str, Any]) -> tuple[int, int]:
    """Operations of the forward pass, and of both passes."""
    with FlopCounterMode(display=False) as forward:
        loss = reference(**forward_arguments(reference, batch)).logits.float().sum()
    with FlopCounterMode(display=False) as backward:
        if loss.requires_grad:
            loss.backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


def upper_half(model: ModelConfig, batch: dict[str, Any]) -> int:
    """Scores and values, in one layer, of the pairs that do not see each other."""
    text, n = model.text_decoder, int(batch["attention_mask"].sum())
    return 4 * text.num_attention_heads * text.head_dim * (n * (n - 1) // 2)


def last_layer(model: ModelConfig, batch: dict[str, Any]) -> int:
    """CLIP's last layer, forward."""
    assert model.image_encoder is not None
    vision, pictures = model.image_encoder.vision_encoder, len(batch.get("image_grid_thw", ()))
    places, width = (vision.image_size // vision.patch_size) ** 2 + 1, vision.hidden_size  # type: ignore[attr-defined]
    return pictures * (2 * places * (4 * width * width + 2 * width * vision.ffn_hidden_size) + 4 * width * places**2)


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_that_torch_counts(tiny_hf: TinyHF, family: str) -> None:
    """Rows without a picture, with several, and with a video or a picture; exactly."""
    hf = tiny_hf(family)
    flops, model, rows = flops_of(hf)
    reference = reference_of(hf)
    for row in (rows[1], rows[2], rows[-1]):
        forward, both = by_torch(reference, row)
        half, unused = model.text_decoder.num_layers * upper_half(model, row), last_layer(model, row) if family == "llava" else 0
        assert (flops.forward(row) + half + unused, flops(row) + 3 * half + unused) == (forward, both)


@pytest.mark.parametrize("case", FROZEN)
def test_what_is_frozen_has_no_gradient_and_what_lies_before_it_no_backward(tiny_hf: TinyHF, case: str) -> None:
    family, trains = FROZEN[case]
    hf = tiny_hf(family)
    flops, model, rows = flops_of(hf, trains)
    reference = reference_of(hf, trains)
    for row in (rows[1], rows[2]):
        forward, both = by_torch(reference, row)
        layers = model.text_decoder.num_layers
        learns = both > forward
        assert learns == (case not in ("all but the projector", "text") or row is rows[2]), "without a picture nothing of it is reached"
        reached = 0 if not learns else layers - 1 if case == "first layers" else layers
        more = (layers + 2 * reached) * upper_half(model, row) + (last_layer(model, row) if family == "llava" else 0)
        assert flops(row) + more == both


def test_padding_counts_nothing_and_packed_samples_do_not_see_each_other(tiny_hf: TinyHF) -> None:
    """Two samples of 3 and 5 tokens: 6 and 15 pairs, however they lie; a third place is empty."""
    _, model, _ = flops_of(tiny_hf("qwen2_vl"))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    rows = counts_of({"attention_mask": mask, "sample_ids": [4, 7, -1]}, model)
    packed = {"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 1]]), "cu_seqlens": torch.tensor([0, 3, 8]), "sample_ids": [4, 7]}
    assert (rows.tokens, rows.pairs) == (8, 21) and counts_of(packed, model) == rows


def test_windows_that_do_not_fill_a_side(tiny_hf: TinyHF) -> None:
    """A frame of 10 x 6 patches in windows of 4 x 4 (56 pixels of 14): sides 4, 4, 2 and 4, 2; six windows of 16, 8, 16, 8, 8, 4 patches."""
    _, model, _ = flops_of(tiny_hf("qwen2_5_vl"))
    assert model.image_encoder is not None
    vision = model.image_encoder.vision_encoder.model_copy(update={"window_attn_size": 56, "patch_size": 14, "spatial_merge_size": 2})
    model = model.model_copy(update={"image_encoder": model.image_encoder.model_copy(update={"vision_encoder": vision})})
    counts = counts_of({"attention_mask": torch.ones(1, 20), "image_grid_thw": torch.tensor([[1, 10, 6]])}, model)
    assert counts.window_pairs == 16**2 + 8**2 + 16**2 + 8**2 + 8**2 + 4**2 and counts.frame_pairs == 60**2 and counts.cells == 15


def test_the_published_size_has_six_operations_per_weight_and_token() -> None:
    """Qwen2.5-VL-7B, text alone: 28 layers of 3584 x (2 x 3584 + 2 x 512 + 3 x 18944) and a head of 152064 x 3584, and attention."""
    from tests.families.sizes import SIZES

    family = get_family("qwen2_5_vl")
    model = family.from_hf_config(SIZES["qwen2_5_vl-7b"].hf)
    flops = ModelFlops(model, family.tensor_table(model, 152064), lambda rule, name: True)
    n = 1024
    attention = 28 * 12 * 3584 * n * (n + 1) // 2
    assert flops({"attention_mask": torch.ones(1, n, dtype=torch.int64)}) - attention == 6 * 7_070_285_824 * n
