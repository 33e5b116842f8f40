"""Loss types by hand-worked numbers, and the split cross-entropy against torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F

from tangram.errors import ConfigError
from tangram.losses.modes import reduce_token_losses
from tangram.losses.vocab_parallel import vocab_parallel_token_losses


def combine(micro_batches: list[tuple[list[float], list[int]]], loss_type: str) -> float:
    terms = [reduce_token_losses(torch.tensor(losses), torch.tensor(rows, dtype=torch.int64), loss_type) for losses, rows in micro_batches]
    return float(sum(t.numerator for t in terms) / sum(t.denominator for t in terms))


def test_token_mean_and_mean_of_means_of_one_and_three_tokens() -> None:
    """One token of loss 4, then three of loss 1: 7 / 4 = 1.75 over tokens, (4 + 1) / 2 = 2.5 over micro-batches."""
    micro_batches = [([4.0], [0]), ([1.0, 1.0, 1.0], [0, 0, 0])]
    assert combine(micro_batches, "per_token_loss") == 1.75
    assert combine(micro_batches, "default") == 2.5
    assert combine(micro_batches, "per_sample_loss") == 2.5


def test_two_ranks_and_two_micro_batches() -> None:
    """Tokens 1, 3, 2, 2 with losses 4, 1, 2, 3: (4 + 3 + 4 + 6) / 8 = 2.125."""
    micro_batches = [([loss] * n, [0] * n) for n, loss in ((1, 4.0), (3, 1.0), (2, 2.0), (2, 3.0))]
    assert combine(micro_batches, "per_token_loss") == 2.125


def test_samples_count_alike_however_they_are_batched() -> None:
    """Samples with means 2, 6 and 1, and one without a label: (2 + 6 + 1) / 3 = 3."""
    together = [([1.0, 3.0, 6.0, 1.0], [0, 0, 1, 3])]
    apart = [([1.0, 3.0], [0, 0]), ([6.0], [0]), ([], []), ([1.0], [0])]
    assert combine(together, "per_sample_loss") == combine(apart, "per_sample_loss") == 3.0


@pytest.mark.parametrize("loss_type", ["default", "per_sample_loss", "per_token_loss"])
def test_nothing_supervised_is_zero_with_zero_gradient_and_leaves_others_alone(loss_type: str) -> None:
    losses = torch.zeros(0, requires_grad=True)
    terms = reduce_token_losses(losses, torch.zeros(0, dtype=torch.int64), loss_type)
    assert (terms.numerator.item(), terms.denominator.item()) == (0.0, 0)
    terms.numerator.backward()
    assert combine([([], []), ([1.0, 2.0, 3.0, 6.0], [0, 0, 0, 0])], loss_type) == 3.0


def test_unknown_type_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'mean' is unknown; known: default, per_sample_loss, per_token_loss"):
        reduce_token_losses(torch.zeros(1), torch.zeros(1, dtype=torch.int64), "mean")


def _data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(7, 12, generator=generator)
    logits[2, 3] = 300.0
    return logits, torch.randint(0, 8, (7,), generator=generator), torch.randn(7, generator=generator)


def _reference(vocab: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets, weights = _data()
    logits.requires_grad_()
    losses = F.cross_entropy(logits[:, :vocab], targets, reduction="none")
    (losses * weights).sum().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


def test_one_rank_equals_torch_and_padding_gets_no_probability() -> None:
    logits, targets, weights = _data()
    logits.requires_grad_()
    before = logits.detach().clone()
    losses = vocab_parallel_token_losses(logits, targets, 8, None)
    (losses * weights).sum().backward()
    expected, gradient = _reference()
    assert torch.allclose(losses, expected, atol=1e-6) and torch.allclose(logits.grad, gradient, atol=1e-6)
    assert not logits.grad[:, 8:].any()
    assert torch.equal(logits.detach(), before)


def test_no_token_gives_an_empty_loss_and_a_zero_gradient() -> None:
    weight = torch.randn(12, 4, requires_grad=True)
    losses = vocab_parallel_token_losses(torch.zeros(0, 4) @ weight.t(), torch.zeros(0, dtype=torch.int64), 8, None)
    losses.sum().backward()
    assert losses.shape == (0,) and weight.grad is not None and not weight.grad.any()


def _rank(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    logits, targets, weights = _data()
    part = logits.chunk(size, dim=1)[rank].clone().requires_grad_()
    losses = vocab_parallel_token_losses(part, targets, 8, dist.group.WORLD)
    (losses * weights).sum().backward()
    expected, gradient = _reference()
    assert torch.allclose(losses, expected, atol=1e-6)
    assert torch.allclose(part.grad, gradient.chunk(size, dim=1)[rank], atol=1e-6)
    dist.destroy_process_group()


def test_three_ranks_equal_one_although_the_last_holds_padding_alone(tmp_path: Path) -> None:
    mp.spawn(_rank, (3, str(tmp_path / "store")), nprocs=3)
