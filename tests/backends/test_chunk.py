"""Chunk loss on the megatron backend, over two tensor-parallel ranks, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tangram.align.reference import load_reference, observe
from tests.fsdp2.kit import real_batch
from tests.ranks import on_ranks


@pytest.mark.parametrize(("tied", "loss_type"), [(False, "per_token_loss"), (True, "per_sample_loss")])
def test_two_ranks_that_share_the_vocabulary_train_like_transformers(
    tiny_hf: Callable[..., Path], tmp_path: Path, tied: bool, loss_type: str
) -> None:
    hf = tiny_hf("qwen2_5_vl", tied=tied)
    batch, _ = real_batch(hf)
    if loss_type == "per_sample_loss":
        # The mean over samples of equal length is that over tokens; the loss function still weighs tokens itself.
        batch["labels"] = _last_labels(batch["labels"], 3)
    expected = observe(load_reference(hf), batch)
    torch.save({"batch": batch, "gradients": expected.gradients}, tmp_path / "batch.pt")
    for found in on_ranks(2, Path(__file__).with_name("cases_chunk.py"), "errors", hf, tmp_path / "batch.pt", loss_type):
        assert abs(found["loss"] - expected.loss) < 1e-6 * expected.loss
        assert found["error"] < 1e-5


def _last_labels(labels: torch.Tensor, count: int) -> torch.Tensor:
    """The last ``count`` labels of each row."""
    later = (labels != -100).flip(1).cumsum(1).flip(1)
    return torch.where(later <= count, labels, -100)
