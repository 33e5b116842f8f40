"""The engine on one rank against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tangram.align.reference import load_reference, observe
from tests.ranks import on_ranks

CASES = Path(__file__).with_name("cases_engine.py")


def test_loss_and_every_gradient_are_those_of_transformers(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    hf = tiny_hf("qwen2_5_vl")
    (found,) = on_ranks(1, CASES, "forward_backward", hf, tmp_path)
    batch = torch.load(tmp_path / "batch.pt")
    expected = observe(load_reference(hf), batch)
    assert abs(found["loss"] - expected.loss) < 1e-6 * expected.loss
    assert found["names"] == sorted(expected.gradients)
    gradients = torch.load(tmp_path / "gradients_0.pt")
    # A key's bias shifts all scores of a softmax: its gradient is rounding alone, of terms as large as the others.
    least = 1e-3 * float(torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm())
    for name, (start, local) in gradients.items():
        part = expected.gradients[name][tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True))]
        assert (local - part).norm() <= 1e-5 * expected.gradients[name].norm().clamp(min=least), name
