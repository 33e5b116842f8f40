"""Groups, updates, norms and clipping of the sharded optimizer, against torch's optimizers on whole tensors in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tangram.align.reference import load_reference, loss_curve
from tangram.backends.fsdp2.muon import is_matrix_of_a_hidden_layer
from tangram.backends.fsdp2.optimizer import ShardedOptimizer
from tangram.config.fsdp2 import Fsdp2Training
from tangram.errors import ConfigError
from tests.fsdp2.media import Rows
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_optimizer.py")
sys.path.insert(0, str(CASES.parent))
from cases_optimizer import gradients, toy  # noqa: E402

STEPS = 3
SMALL = {"text_layers": 2, "vision_layers": 2, "hidden": 32, "vision_hidden": 16, "heads": 2, "kv_heads": 1, "vision_heads": 2}
ADAM: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 2.0}


def whole(groups: Callable[[dict[str, torch.nn.Parameter]], list[torch.optim.Optimizer]]) -> tuple[dict[str, torch.nn.Parameter], list[float]]:
    """The toy trained with torch's own optimizers, and the norms that torch's clipping returned."""
    model = toy()
    parameters = dict(model.named_parameters())
    optimizers, norms = groups(parameters), []
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["clip_grad"])))
        for optimizer in optimizers:
            optimizer.step()
    return parameters, norms


@pytest.mark.parametrize("world_size", [1, 4])
def test_adamw_with_groups_is_torchs_on_whole_tensors(world_size: int) -> None:
    settings = ADAM | {
        "no_decay_modules": ["LayerNorm"],
        "no_decay_params": ["bias"],
        "lr_scaling_plan": [{"match": "wide", "scale": 0.1}, {"match": "embed|wide|tall", "scale": 3.0}],
    }

    def groups(p: dict[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
        table = [
            ([p["wide.weight"]], 0.001, 0.1),
            ([p["wide.bias"]], 0.001, 0.0),
            ([p["embed.weight"], p["tall.weight"]], 0.03, 0.1),
            ([p["norm.weight"], p["norm.bias"]], 0.01, 0.0),
            ([p["one.weight"], p["head.weight"]], 0.01, 0.1),
        ]
        return [torch.optim.AdamW([{"params": params, "lr": lr, "weight_decay": decay} for params, lr, decay in table])]

    expected, norms = whole(groups)
    for found in on_ranks(world_size, CASES, "train_toy", settings, STEPS):
        assert found["norms"] == pytest.approx(norms, rel=1e-6)
        for name, value in found["parameters"].items():
            assert torch.allclose(torch.from_numpy(value), expected[name], rtol=0, atol=1e-7), name


@pytest.mark.parametrize("world_size", [2])
def test_muon_is_torchs_on_whole_tensors(world_size: int) -> None:
    def optimizers(p: dict[str, torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
        matrices = ["wide.weight", "tall.weight", "one.weight"]
        muon = torch.optim.Muon([p[n] for n in matrices], lr=0.01, weight_decay=0.1, momentum=0.9, ns_steps=4, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW([p[n] for n in p if n not in matrices], lr=0.01, weight_decay=0.1)]

    expected, _ = whole(optimizers)
    settings = ADAM | {"optimizer": "muon", "muon_momentum": 0.9, "ns_steps": 4}
    for found in on_ranks(world_size, CASES, "train_toy", settings, STEPS):
        for name, value in found["parameters"].items():
            # An orthogonalisation in bf16 has three digits.
            assert torch.allclose(torch.from_numpy(value), expected[name], rtol=0, atol=1e-5 if name.endswith("bias") else 2e-4), name


@pytest.mark.parametrize(("family", "tied"), [("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_muon_leaves_embeddings_position_tables_and_head_to_adamw(tiny_hf: Callable[..., Path], family: str, tied: bool) -> None:
    model = load_reference(tiny_hf(family, tied=tied))
    left = {name for name, p in model.named_parameters() if p.dim() == 2} - is_matrix_of_a_hidden_layer(model)
    assert left == {
        "model.language_model.embed_tokens.weight",
        *(() if tied else ("lm_head.weight",)),
        *(("model.visual.pos_embed.weight",) if family == "qwen3_vl" else ()),
    }


def test_a_norm_counts_every_element_once() -> None:
    """3 on every rank and [4 | 0] over two are 5, not sqrt(9 * 2 + 16); NeMo-RL 3788."""
    found = on_ranks(2, CASES, "norm_of_replicated_and_sharded")
    assert found == [pytest.approx(5.0)] * 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr_scaling_plan": [{"match": "visual"}]}, r"lr_scaling_plan\[0\].match 'visual': no trained parameter's name begins so"),
        ({"lr_scaling_plan": [{"match": "w"}, {"match": "wide"}]}, r"lr_scaling_plan\[1\].match 'wide': .* entries before it take all that do"),
        ({"no_decay_modules": ["RMSNorm"]}, "no module with trained parameters has 'RMSNorm' in its class name; there are Embedding"),
        ({"no_decay_params": ["gamma"]}, "no trained parameter has 'gamma' in its name"),
    ],
)
def test_an_entry_that_matches_nothing_is_an_error(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ShardedOptimizer(toy(), Fsdp2Training(train_iters=1, **settings))


def test_thirty_steps_are_those_of_a_plain_loop_and_all_moments_are_fp32(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    hf = tiny_hf("qwen2_5_vl", **SMALL)
    both = Rows(hf).batch("image", "image")
    expected = loss_curve(load_reference(hf), [both] * 30, 3e-5, (0.9, 0.999), 1e-8, 1.0)
    assert expected[-1] < expected[0] - 0.2
    for found in on_ranks(2, CASES, "curve", hf, tmp_path, 30, {"training": {"lr": 3e-5}}):
        assert found["losses"] == pytest.approx(expected, rel=1e-6)
        assert found["moments"] == ["torch.float32"]


def test_frozen_weights_are_in_no_group_and_keep_their_bits(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    changes = {"model": {"freeze": ["model.visual"]}, "training": {"weight_decay": 0.1}}
    for found in on_ranks(2, CASES, "curve", tiny_hf("qwen2_5_vl", **SMALL), tmp_path, 5, changes):
        assert found["unchanged"]
        assert all(name.startswith("model.visual.") for name in found["unchanged"])
        assert not set(found["unchanged"]) & set(found["trained"])


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    found = on_ranks(2, CASES, "poisoned", tiny_hf("qwen2_5_vl", **SMALL), tmp_path)
    assert found == [{"bad": True, "kept": True, "good": False, "moved": True}] * 2
