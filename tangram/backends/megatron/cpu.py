"""megatron-core 0.16.1 on a machine without an accelerator.

megatron-core names CUDA where it makes buffers, keeps random states and checks types. ``adapt`` replaces exactly the names of ``PATCHES``,
each with the places of megatron-core that need it. ``torch.cuda.is_available()`` keeps saying False, the ``torch`` namespace itself is left
alone, and nothing intercepts tensor operations, so a step costs what it costs without the adaptation (``bench/cpu_adaptation.py``).

"CUDA" random states become those of the default CPU generator: it is the one that dropout draws from here.
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_CPU = torch.device("cpu")


def _current_device() -> torch.device:
    return _CPU


def _synchronize(device: object = None) -> None:
    """Nothing runs behind the caller's back on a CPU."""


def _get_rng_state(device: object = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _stay(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return self


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``factory`` with ``device="cuda"`` read as the CPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


class _TorchOnCpu(types.ModuleType):
    """torch as one module of megatron-core sees it: the same names, but tensors asked for on "cuda" come on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__.update(torch.__dict__)
        for name in ("empty", "ones", "tensor", "zeros"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)  # what torch loads on first use


_TYPE_OF = torch.Tensor.type


def _type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    answer = _TYPE_OF(self, *args, **kwargs)
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer


def _accepts_cpu_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, during which ``tensor.type()`` gives the name of the CUDA type that it insists on."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch.Tensor.type = _type_as_on_cuda  # type: ignore[method-assign, assignment]
        try:
            return function(*args, **kwargs)
        finally:
            torch.Tensor.type = _TYPE_OF  # type: ignore[method-assign]

    return call


@dataclass(frozen=True)
class Patch:
    """One replaced name.

    Args:
        owner: module, or ``module:Class``.
        name: attribute of it.
        make: given the original, returns what stands in for it.
        serves: the places in megatron-core that need it.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    serves: str

    def install(self) -> None:
        module, _, inner = self.owner.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, inner) if inner else owner
        setattr(owner, self.name, self.make(getattr(owner, self.name)))


def _instead(replacement: object) -> Callable[[Any], Any]:
    return lambda original: replacement


def _splits_as_arrays(dispatcher: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """At the point where the sizes of the parts that ranks exchange come to the CPU on a side stream, they are there: as arrays, as then."""
    if point == dispatcher.cuda_dtoh_point:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            splits = getattr(dispatcher, name)
            setattr(dispatcher, name, splits.numpy() if isinstance(splits, torch.Tensor) else splits)
    return tokens_per_expert


def _filled(part: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(part, (0, 0) * (part.dim() - 1) + (0, length - len(part)))


def _gather_unequal(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``gather`` also of parts that differ in length, which gloo does not gather: they are filled up to the longest and cut."""

    @functools.wraps(gather)
    def call(part: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(part, group, None, use_global_buffer)
        parts = gather(_filled(part, max(sizes)), group).chunk(group.size())
        return torch.cat([one[:size] for one, size in zip(parts, sizes, strict=True)])

    return call


def _scatter_unequal(scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``scatter``, a sum of which each rank gets a part, also of parts that differ in length; as ``_gather_unequal``."""

    @functools.wraps(scatter)
    def call(whole: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return scatter(whole, group, None, use_global_buffer)
        filled = torch.cat([_filled(part, max(sizes)) for part in whole.split(list(sizes))])
        return scatter(filled, group)[: sizes[group.rank()]]

    return call


_CORE = "megatron.core"
_ALL_TO_ALL = f"{_CORE}.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher"
_torch = _TorchOnCpu()

PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.cuda", "current_device", _instead(_current_device), "device= of buffers: param_and_grad_buffer 783-806, mappings 91-181, rotary 297"
    ),
    Patch("torch.cuda", "synchronize", _instead(_synchronize), "timers 152, 165; core's own P2PCommunicator 242, 398"),
    Patch("torch.cuda", "get_rng_state", _instead(_get_rng_state), "tensor_parallel.random 235, 238"),
    Patch("torch.cuda.random", "get_rng_state", _instead(_get_rng_state), "tensor_parallel.random 55"),
    Patch("torch.cuda", "manual_seed", _instead(_manual_seed), "tensor_parallel.random 237, 422"),
    Patch(f"{_CORE}.tensor_parallel.random", "_set_cuda_rng_state", _instead(_set_rng_state), "tensor_parallel.random 240, fork, checkpoint"),
    Patch("torch:Tensor", "cuda", _instead(_stay), "tensor_parallel.data 84, optimizer.grad_scaler 140, language_module 244"),
    Patch(f"{_CORE}.pipeline_parallel.schedules", "torch", _instead(_torch), "token counters 596, 983, 2138"),
    Patch(f"{_CORE}.optimizer.clip_grads", "torch", _instead(_torch), "gradient norm 103-115, clipping 174"),
    Patch(f"{_CORE}.optimizer.optimizer", "torch", _instead(_torch), "loss scales and overflow flags 473-485, 907"),
    Patch(f"{_CORE}.optimizer.grad_scaler", "torch", _instead(_torch), "loss scale 15, 88-94"),
    Patch(f"{_CORE}.utils", "torch", _instead(_torch), "gradient norm without fused kernels 1207"),
    Patch(f"{_CORE}.transformer.utils", "torch", _instead(_torch), "causal masks of core's own attention 35, 40"),
    Patch(f"{_CORE}.tensor_parallel.data", "torch", _instead(_torch), "broadcast_data 37"),
    Patch(f"{_CORE}.tensor_parallel.mappings", "_gather_along_first_dim", _gather_unequal, "tokens of tensor-parallel experts 150"),
    Patch(f"{_CORE}.tensor_parallel.mappings", "_reduce_scatter_along_first_dim", _scatter_unequal, "the same back 192"),
    Patch(_ALL_TO_ALL, "cuda_dtoh_stream", _instead("no stream"), "side stream of the sizes of parts 442"),
    Patch(_ALL_TO_ALL, "_maybe_dtoh_and_synchronize", _instead(_splits_as_arrays), "copies and waits on it, all points of the dispatcher"),
    Patch(f"{_CORE}.optimizer.clip_grads", "clip_grad_by_total_norm_fp32", _accepts_cpu_tensors, "type check 167"),
    Patch(f"{_CORE}.optimizer.optimizer", "clip_grad_by_total_norm_fp32", _accepts_cpu_tensors, "the same, imported by name"),
    Patch(f"{_CORE}.optimizer.optimizer:Float16OptimizerWithFloat16Params", "__init__", _accepts_cpu_tensors, "type checks 671, 690"),
    Patch(f"{_CORE}.optimizer.distrib_optimizer:DistributedOptimizer", "__init__", _accepts_cpu_tensors, "type checks 361, 420, 582"),
)

_adapted = False


def adapt() -> bool:
    """Install ``PATCHES`` where there is no accelerator. Does so once, however often it is called.

    Returns:
        Whether megatron-core runs adapted in this process.
    """
    global _adapted
    from tangram.platform import current

    if _adapted or current().name != "cpu":
        return _adapted
    for patch in PATCHES:
        patch.install()
    # The tracker warns when a fork of the "CUDA" state moves the CPU's; here they are one.
    logging.getLogger(f"{_CORE}.tensor_parallel.random").addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    _adapted = True
    return True
