"""Checks of the CPU adaptation, in one process of their own, since it changes the process it is in. Prints "passed NAME" after each."""

from __future__ import annotations

import inspect
import logging

import torch
from torch.overrides import _get_current_function_mode_stack

FACTORIES = ("arange", "empty", "full", "ones", "rand", "tensor", "zeros")
ORIGINALS = {name: getattr(torch, name) for name in FACTORIES}
TENSOR_TYPE = torch.Tensor.type

from tangram.backends.megatron.cpu import Patch, adapt  # noqa: E402
from tangram.backends.megatron.parallel import initialize, shutdown  # noqa: E402
from tangram.config.run import ParallelConfig  # noqa: E402
from tangram.placement.topology import Topology  # noqa: E402


def leaves_torch_itself_alone() -> None:
    assert adapt()
    assert {name: getattr(torch, name) for name in FACTORIES} == ORIGINALS
    assert torch.Tensor.type is TENSOR_TYPE and torch.zeros(1).type() == "torch.FloatTensor"
    assert not torch.cuda.is_available()
    assert inspect.isclass(torch.cuda.Stream) and inspect.isclass(torch.cuda.Event)
    assert _get_current_function_mode_stack() == []


def wraps_once() -> None:
    from megatron.core.optimizer import optimizer

    once = optimizer.clip_grad_by_total_norm_fp32
    assert adapt()
    assert optimizer.clip_grad_by_total_norm_fp32 is once
    assert not hasattr(once.__wrapped__, "__wrapped__")


def tensor_type_is_itself_again_after_an_error() -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    weight.grad = torch.ones(2, dtype=torch.float64)
    try:
        clip_grad_by_total_norm_fp32([weight], 1.0, 1.0)
    except AssertionError:
        assert torch.zeros(1).type() == "torch.FloatTensor"
        return
    raise AssertionError("core clips double gradients now; the check of types may be gone")


def dropout_streams_are_megatrons() -> None:
    """Core seeds replicated regions with the seed, split ones with seed + 2718 + rank; forks of one name go on where the last stopped."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)

    def draws() -> torch.Tensor:
        initialize(ParallelConfig(), Topology(), seed=5)
        rows = []
        for _ in range(2):
            rows.append(torch.rand(2))
            with get_cuda_rng_tracker().fork():
                rows.append(torch.rand(2))
        return torch.stack(rows)

    first = draws()
    assert torch.equal(first, draws())
    assert torch.equal(first[[0, 2]].flatten(), torch.cat([torch.rand(2, generator=g) for g in [torch.Generator().manual_seed(5)] * 2]))
    assert torch.equal(first[[1, 3]].flatten(), torch.cat([torch.rand(2, generator=g) for g in [torch.Generator().manual_seed(2723)] * 2]))
    assert logged == []


def recomputation_repeats_dropout() -> None:
    from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker

    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            y = torch.nn.functional.dropout(x, 0.5)
        seen.append(y.detach().clone())
        return torch.nn.functional.dropout(y, 0.5)

    x = torch.ones(64, requires_grad=True)
    y = checkpoint(layer, False, x)
    y.sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def missing_name_of_another_core_version_is_noticed() -> None:
    try:
        Patch("megatron.core.utils", "no_such_name", lambda original: original, "").install()
    except AttributeError:
        return
    raise AssertionError("a name that core has not was accepted")


CHECKS = (
    leaves_torch_itself_alone,
    wraps_once,
    tensor_type_is_itself_again_after_an_error,
    dropout_streams_are_megatrons,
    recomputation_repeats_dropout,
    missing_name_of_another_core_version_is_noticed,
)

if __name__ == "__main__":
    for check in CHECKS:
        check()
        print(f"passed {check.__name__}", flush=True)
    shutdown()
