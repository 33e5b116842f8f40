"""The chunked loss against torch's cross-entropy in fp64, and what it allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tangram.errors import ConfigError
from tangram.losses.chunk import chunked_loss
from tests.largest import largest

N, WIDTH, VOCAB, PADDED = 10, 8, 15, 18


def data(dtype: torch.dtype = torch.float32, n: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, targets and token weights."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((n, WIDTH), (PADDED, WIDTH), (PADDED,)))
    return hidden, weight, bias, torch.randint(0, VOCAB, (n,), generator=generator), torch.rand(n, generator=generator)


def expected(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, token_weights: Tensor) -> list[Tensor]:
    """Loss and gradients in fp64."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    logits = F.linear(inputs[0], inputs[1][:VOCAB], inputs[2][:VOCAB] if bias is not None else None)
    loss = (F.cross_entropy(logits, targets, reduction="none") * token_weights.double()).sum()
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def error(found: Tensor | None, wanted: Tensor) -> float:
    assert found is not None
    return float((found.detach().double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, N, 64])
def test_loss_and_gradients_are_those_of_whole_logits(chunk_size: int, with_bias: bool) -> None:
    hidden, weight, bias, targets, token_weights = data()
    token_weights[4] = 0.0
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if with_bias else [])]
    loss = chunked_loss(hidden, weight, targets, token_weights, chunk_size, bias=bias if with_bias else None, vocab_size=VOCAB)
    (loss * 0.3).backward()
    wanted, *gradients = expected(hidden, weight, bias if with_bias else None, targets, token_weights)
    assert error(loss, wanted) < 5e-7
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert error(leaf.grad, 0.3 * gradient) < 5e-7
    assert not weight.grad[VOCAB:].any()
    assert not hidden.grad[4].any()


def test_fp64_agrees_to_the_last_digits_although_one_logit_is_huge() -> None:
    hidden, weight, bias, targets, token_weights = data(torch.float64)
    with torch.no_grad():
        hidden[2] = 900 * weight[(targets[2] + 1) % VOCAB]
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    loss = chunked_loss(hidden, weight, targets, token_weights, 3, bias=bias, vocab_size=VOCAB)
    loss.backward()
    wanted, *gradients = expected(hidden, weight, bias, targets, token_weights)
    assert loss.dtype == torch.float64
    assert largest(error(found, one) for found, one in zip([loss, *(leaf.grad for leaf in leaves)], [wanted, *gradients], strict=True)) < 1e-14


def test_sixteen_bits_are_summed_in_fp32_over_any_number_of_chunks() -> None:
    """2,048 tokens push one row of the weight by as much each; a sum in bf16 stops growing at 256 of them."""
    hidden = torch.ones(2048, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    chunked_loss(hidden, weight, torch.zeros(2048, dtype=torch.int64), torch.ones(2048), 1).backward()
    assert weight.grad.tolist() == [[-1024.0], [1024.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_token_weights_are_not_lost_in_sixteen_bits(dtype: torch.dtype) -> None:
    """Of 2e7 tokens each counts 5e-8: fp16 has nothing below 6e-8. A loss scale brings the gradient back into range."""
    hidden, weight, _, targets, token_weights = data(dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = chunked_loss(hidden, weight, targets, token_weights * 5e-8, 3, vocab_size=VOCAB)
    (loss * 2**20).backward()
    wanted, *gradients = expected(hidden, weight, None, targets, token_weights * 5e-8)
    assert error(loss, wanted) < 2e-3
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert leaf.grad.dtype == dtype
        assert error(leaf.grad, gradient * 2**20) < 1e-2


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_parts_that_are_frozen_get_nothing_and_the_others_what_they_would(trained: tuple[bool, ...]) -> None:
    hidden, weight, bias, targets, token_weights = data()
    leaves = [tensor.requires_grad_(on) for tensor, on in zip((hidden, weight, bias), trained, strict=True)]
    chunked_loss(hidden, weight, targets, token_weights, 4, bias=bias, vocab_size=VOCAB).backward()
    for leaf, on, gradient in zip(leaves, trained, expected(hidden, weight, bias, targets, token_weights)[1:], strict=True):
        assert (leaf.grad is not None) == on
        assert not on or error(leaf.grad, gradient) < 5e-7


def test_without_tokens_the_loss_is_zero_and_so_are_the_gradients() -> None:
    hidden, weight, bias, targets, token_weights = data(n=0)
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    loss = chunked_loss(hidden, weight, targets, token_weights, 4, bias=bias)
    loss.backward()
    assert loss.item() == 0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_gradients_are_handed_out_once() -> None:
    hidden, weight, _, targets, token_weights = data()
    loss = chunked_loss(hidden.requires_grad_(), weight, targets, token_weights, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out already"):
        loss.backward()


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor that an operation gave, and how many operations were matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.largest = max(
            [self.largest, *(leaf.untyped_storage().nbytes() // leaf.itemsize for leaf in tree_leaves(found) if isinstance(leaf, Tensor))]
        )
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_as_large_as_all_logits_is_ever_made(dtype: torch.dtype) -> None:
    n, vocab, chunk = 512, 300, 16
    hidden, weight = torch.randn(n, WIDTH).to(dtype).requires_grad_(), torch.randn(vocab, WIDTH).to(dtype).requires_grad_()
    with Allocations() as made:
        chunked_loss(hidden, weight, torch.randint(0, vocab, (n,)), torch.ones(n), chunk).backward()
    assert made.largest == max(chunk * vocab, n * WIDTH, vocab * WIDTH)
    assert made.products == 3 * n // chunk


def test_evaluation_computes_no_gradient() -> None:
    hidden, weight, _, targets, token_weights = data()
    hidden.requires_grad_()
    weight.requires_grad_()
    with Allocations() as made, torch.no_grad():
        loss = chunked_loss(hidden, weight, targets, token_weights, 5, vocab_size=VOCAB)
    assert made.products == 2
    assert not loss.requires_grad
    assert error(loss, expected(hidden, weight, None, targets, token_weights)[0]) < 5e-7


def test_sizes_that_do_not_fit_are_refused() -> None:
    hidden, weight, _, targets, token_weights = data()
    with pytest.raises(ConfigError, match=r"10 hidden states, targets \[9\] and weights \[10\] differ in length"):
        chunked_loss(hidden, weight, targets[1:], token_weights, 4)
    with pytest.raises(ConfigError, match=r"hidden states \[10, 8\] do not fit the head's weight \[18, 7\]"):
        chunked_loss(hidden, weight[:, 1:], targets, token_weights, 4)
    with pytest.raises(ConfigError, match="torch.bfloat16, the head is torch.float32"):
        chunked_loss(hidden.bfloat16(), weight, targets, token_weights, 4)
    targets[3] = -100
    with pytest.raises(ConfigError, match="targets reach from -100 to .*; leave ignored positions out"):
        chunked_loss(hidden, weight, targets, token_weights, 4)
    with pytest.raises(ConfigError, match="chunk size 0 is not positive"):
        chunked_loss(hidden, weight, targets, token_weights, 0)


def _rank(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    # The second rank has some of the vocabulary, then nothing but padding.
    for share in (10, 15):
        _check_share(rank, share)
    dist.destroy_process_group()


def _check_share(rank: int, share: int) -> None:
    hidden, weight, bias, targets, token_weights = data()
    wanted, *gradients = expected(hidden, weight, bias, targets, token_weights)
    rows = slice(share * rank, share * (rank + 1))
    weight, bias = (torch.cat([tensor, torch.ones(2 * share - PADDED, *tensor.shape[1:])])[rows].clone() for tensor in (weight, bias))
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    loss = chunked_loss(hidden, weight, targets, token_weights, 4, bias=bias, vocab_size=VOCAB, tp_group=dist.group.WORLD)
    loss.backward()
    dist.all_reduce(hidden.grad)
    assert error(loss, wanted) < 5e-7
    assert error(hidden.grad, gradients[0]) < 5e-7
    for leaf, gradient in zip(leaves[1:], gradients[1:], strict=True):
        whole = torch.cat([gradient, gradient.new_zeros(2 * share - PADDED, *gradient.shape[1:])])[rows]
        assert torch.allclose(leaf.grad.double(), whole, atol=1e-6)


def test_two_ranks_that_share_the_vocabulary_equal_one(tmp_path: Path) -> None:
    mp.spawn(_rank, (2, str(tmp_path / "store")), nprocs=2)
