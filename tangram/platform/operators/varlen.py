"""Attention over segments by the library that is there, or that is asked for by name.

Each library has a module beside this one with a function ``segment_attention(query, key, value, segments, dropout, causal, scale)``, which takes
and gives what the function of that name here does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tangram.errors import ConfigError
from tangram.platform.attention import AUTO, LIBRARIES, TORCH, TORCH_VARLEN, AttentionLibrary, no_ring
from tangram.platform.operators import blocks, operator, plain
from tangram.platform.operators.operator import Fused, Operator
from tangram.platform.operators.segments import Segments

_ROOM, _FLASH = "tangram.platform.operators.", "flash_attn.flash_attn_interface"


def _attention_of(device: str, module: str, library: str, function: str) -> Operator:
    return Operator("segment_attention", plain.segment_attention, {device: Fused(_ROOM + module, library, function, repeats=True)})


_OPERATORS = {
    "flash": _attention_of("cuda", "flash", _FLASH, "flash_attn_varlen_func"),
    "transformer_engine": _attention_of("cuda", "te", "transformer_engine.pytorch", "DotProductAttention"),
    "npu": _attention_of("npu", "npu", "torch_npu", "npu_fusion_attention"),
    TORCH_VARLEN.name: _attention_of("cuda", "torch_varlen", "torch.nn.attention.varlen", "varlen_attn"),
}
MASKED = Operator("attention", plain.attention, {"npu": Fused(_ROOM + "npu", "torch_npu", "npu_fusion_attention", repeats=True)})
BLOCK = Operator(
    "attention_block", blocks.attention_block, {"cuda": Fused(_ROOM + "flash", _FLASH, "_wrapped_flash_attn_varlen_forward", repeats=True)}
)
BLOCK_BACKWARD = Operator(
    "attention_block_backward",
    blocks.attention_block_backward,
    {"cuda": Fused(_ROOM + "flash", _FLASH, "_wrapped_flash_attn_varlen_backward", repeats=True)},
)


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments | None,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    backend: str = AUTO,
) -> Tensor:
    """Softmax attention in which no token sees another segment.

    Args:
        query: [s, b, heads, d].
        key, value: [s, b, groups, d]; ``groups`` divides ``heads``.
        segments: of the only row; None: each row is one.
        mask: bool [b, 1, s, s], True where a query may see a key; it replaces causality. Only without segments.
        dropout: probability.
        causal: within each segment.
        scale: of the scores; None: ``d ** -0.5``.
        backend: ``auto``: the first of ``LIBRARIES`` that is installed for this device and takes such tensors, else torch; or a name, which
            nothing else stands in for.

    Returns:
        [s, b, heads, d].

    Raises:
        ConfigError: the library asked for is not there, or does not take such tensors.
    """
    if mask is not None:
        assert segments is None, "a mask describes whole rows"
        attend = _with_mask(backend, query)
        return attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), mask, dropout, causal, scale).permute(2, 0, 1, 3)
    return _choose(backend, query, dropout)(query, key, value, segments, dropout, causal, scale)


def check_backend(backend: str, device: str) -> None:
    """Find out before training whether the library asked for is there.

    Args:
        device: type of the device that the model runs on.

    Raises:
        ConfigError: it is not, or it is for another type of device.
    """
    if backend not in (AUTO, TORCH):
        _of_device(LIBRARIES[backend], device)
        _OPERATORS[backend].needed_on(device)


def ring_blocks(backend: str, query: Tensor, masked: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``attention_block`` and its backward for a ring of ranks.

    Args:
        masked: whether some blocks have masks.

    Raises:
        ConfigError: the library asked for has none, is not there, or does not take such tensors.
    """
    if backend == TORCH:
        return BLOCK.plain, BLOCK_BACKWARD.plain
    if backend == AUTO:
        return BLOCK.chosen(query), BLOCK_BACKWARD.chosen(query)
    library = LIBRARIES[backend]
    if not library.ring:
        raise ConfigError(no_ring(backend))
    _fit(library, query, 0.0)
    if masked and not library.masks:
        raise ConfigError(_no_mask(backend))
    return BLOCK.needed_on(library.device), BLOCK_BACKWARD.needed_on(library.device)


def _with_mask(backend: str, query: Tensor) -> Callable[..., Tensor]:
    if backend == TORCH:
        return MASKED.plain
    if backend == AUTO:
        return MASKED.chosen(query)
    library = LIBRARIES[backend]
    if not library.masks:
        raise ConfigError(_no_mask(backend))
    _fit(library, query, 0.0)
    return MASKED.needed_on(library.device)


def _choose(backend: str, query: Tensor, dropout: float) -> Callable[..., Tensor]:
    if backend not in (AUTO, TORCH):
        library = LIBRARIES[backend]
        _fit(library, query, dropout)
        return _OPERATORS[backend].needed_on(library.device)
    device, dtype = operator.device_type(query), _name(query.dtype)
    for library in (*LIBRARIES.values(), TORCH_VARLEN) if backend == AUTO else (TORCH_VARLEN,):
        if library.device == device and library.misfit(dtype, query.shape[-1], dropout) is None:
            found = _OPERATORS[library.name].fused_on(device)
            if found is not None:
                return found
    return plain.segment_attention


def _fit(library: AttentionLibrary, query: Tensor, dropout: float) -> None:
    _of_device(library, operator.device_type(query))
    misfit = library.misfit(_name(query.dtype), query.shape[-1], dropout)
    if misfit is not None:
        raise ConfigError(f"attention_backend {library.name} {misfit}; set auto or torch")


def _of_device(library: AttentionLibrary, device: str) -> None:
    if device != library.device:
        raise ConfigError(f"attention_backend {library.name} needs the device {library.device}, and this one is {device}; set auto or torch")


def _no_mask(backend: str) -> str:
    return f"attention_backend {backend} takes no mask, and this batch has one (padding on the left, or a mask of its own); set auto or torch"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
