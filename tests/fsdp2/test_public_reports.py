"""Public reports of sharded training that no other test of this folder holds; docs/public-reports.md lists the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from tangram.align.reference import load_reference
from tangram.backends.fsdp2.head import put_loss_head
from tangram.backends.fsdp2.models import with_chunk_loss
from tangram.config.fsdp2 import Fsdp2Features
from tests.fsdp2.media import Rows
from tests.fsdp2.truth import truth
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_reports.py")
SIZES = {"text_layers": 2, "vision_layers": 2}
TinyHF = Callable[..., Path]


def test_a_frozen_tower_has_no_graph_and_keeps_nothing_although_it_is_recomputed(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """modelscope/ms-swift 10214: hooks for the inputs' gradients made the output of a frozen tower differentiable."""
    (found,) = on_ranks(1, CASES, "frozen_tower", tiny_hf("qwen2_5_vl", **SIZES), tmp_path)
    assert found["whole"] == {"output": False, "blocks": False, "kept of blocks": 0, "kept": 0}
    assert found["up to the merger"]["output"] and not found["up to the merger"]["blocks"]
    assert found["up to the merger"]["kept of blocks"] == 0 < found["up to the merger"]["kept"]
    assert found["nothing"]["blocks"] and found["nothing"]["kept of blocks"] > 0


def test_recomputation_leaves_frozen_what_is_frozen(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """NVlabs/VILA 244: checkpointing trained the frozen input embedding again."""
    hf = tiny_hf("qwen2_5_vl", **SIZES)
    expected = sorted(name for name, _ in load_reference(hf).named_parameters() if name.startswith("model.visual."))
    assert on_ranks(1, CASES, "frozen_text", hf, tmp_path) == [expected]


def test_a_pass_of_the_tower_for_others_sake_changes_no_bit(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """modelscope/ms-swift 9639: the dummy picture must add nothing."""
    (found,) = on_ranks(1, CASES, "dummy", tiny_hf("qwen3_vl", **SIZES), tmp_path)
    assert found["losses"][0] == found["losses"][1]
    assert found["tower"] == 0
    assert found["others equal"]


def test_no_logits_outlive_their_step(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """foundation-model-stack/fms-fsdp 152: the last iteration's logits stayed referenced."""
    ((made, alive, tensors),) = on_ranks(1, CASES, "logits_after_steps", tiny_hf("qwen2_5_vl", **SIZES), tmp_path)
    assert (made, alive) == (4, 0)
    assert len(set(tensors)) == 1


def test_sums_masters_and_moments_have_the_types_that_are_configured(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """areal-project/AReaL 1292, huggingface/accelerate 3979."""
    for found in on_ranks(2, CASES, "precisions", tiny_hf("qwen2_5_vl", **SIZES), tmp_path):
        for reduce_dtype, sums in (("fp32", "torch.float32"), ("bf16", "torch.bfloat16")):
            assert found[reduce_dtype] == {"sums": {sums}, "masters": {"torch.float32"}, "moments": {"torch.float32"}}


def test_pictures_and_text_in_opposite_orders_after_a_step_of_text(tiny_hf: TinyHF, tmp_path: Path) -> None:
    """ByteDance-Seed/VeOmni 164, 178."""
    hf = tiny_hf("qwen2_5_vl", **SIZES)
    kinds = ("image", "text", "text", "image")
    loss, gradients = truth(hf, [Rows(hf, seed).batch(kind) for seed, kind in enumerate(kinds)])
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    assert on_ranks(2, CASES, "accumulated", hf, tmp_path) == [(pytest.approx(loss, rel=2e-6), pytest.approx(norm, rel=1e-5))] * 2


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(one.numel() for one in tree_leaves(found) if isinstance(one, Tensor))])
        return found


def test_a_model_in_chunks_never_makes_all_logits() -> None:
    """NVIDIA-NeMo/Automodel 2603, with the report's sizes: 64 tokens, 1000 words, 16 tokens at a time."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model: Any = with_chunk_loss(LlamaForCausalLM)(LlamaConfig(vocab_size=1000, **sizes)).train()
    ids = torch.arange(64)[None]
    with Largest() as whole:
        model(input_ids=ids, labels=ids).loss.backward()
    put_loss_head(model, Fsdp2Features.model_validate({"enable_chunk_loss": True, "chunkloss_plan": {"chunk_size": 16}}))
    with Largest() as chunked:
        model(input_ids=ids, labels=ids).loss.backward()
    assert whole.elements >= 64 * 1000
    assert chunked.elements == 16 * 1000
