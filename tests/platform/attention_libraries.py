"""Stand-ins for libraries of attention: each checks what it is given by its library's own rules, records it, and computes the answer from it alone.

A wrong length, scale or mask therefore gives wrong outputs and gradients, and one in a wrong form is refused, as by the library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tangram.platform import attention
from tangram.platform.operators import operator, varlen

CALLS: list[tuple[str, list[int], bool]] = []
"""Of each call: the library, where its segments end (from 0 on), and whether each is causal."""


def attend(query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], causal: bool, scale: float) -> Tensor:
    """[tokens, heads, d], one segment after the other."""
    groups, outs = query.shape[1] // key.shape[1], []
    whole = query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    lengths = [end - start for start, end in pairwise(ends)]
    for parts in zip(*(x.transpose(0, 1).split(lengths, 1) for x in whole), strict=True):
        q, k, v = parts
        scores = q @ k.transpose(-1, -2) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        outs.append(scores.softmax(-1) @ v)
    return torch.cat(outs, 1).transpose(0, 1)


def _checked_ends(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int) -> list[int]:
    assert query.dim() == key.dim() == value.dim() == 3 and key.shape == value.shape
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1 and query.dtype == key.dtype == value.dtype
    assert query.shape[1] % key.shape[1] == 0 and query.shape[2] == key.shape[2]
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.dim() == 1 and torch.equal(cu_q, cu_k)
    ends = cu_q.tolist()
    assert ends[0] == 0 and ends[-1] == len(query) == len(key) and ends == sorted(ends)
    assert type(longest_q) is int and longest_q == longest_k == max(b - a for a, b in pairwise(ends))
    return ends


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Tensor:
    """flash-attn 2.8."""
    ends = _checked_ends(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    assert (dropout_p, window_size, softcap, return_attn_probs) == (0.0, (-1, -1), 0.0, False)
    assert deterministic == torch.are_deterministic_algorithms_enabled()
    CALLS.append(("flash", ends, causal))
    return attend(q, k, v, ends, causal, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)


class DotProductAttention(nn.Module):
    """TransformerEngine's, of tokens without padding between segments."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0 and qkv_format == "thd"
        self.heads, self.channels, self.mask = num_attention_heads, kv_channels, attn_mask_type
        self.groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
    ) -> Tensor:
        assert qkv_format == "thd" and attn_mask_type == self.mask and attn_mask_type in ("padding", "padding_causal")
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None and max_seqlen_q is not None and max_seqlen_kv is not None
        assert query_layer.shape[1:] == (self.heads, self.channels) and key_layer.shape[1] == self.groups
        ends = _checked_ends(query_layer, key_layer, value_layer, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        causal = attn_mask_type == "padding_causal"
        CALLS.append(("transformer_engine", ends, causal))
        return attend(query_layer, key_layer, value_layer, ends, causal, self.scale).flatten(1)


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
) -> tuple[Any, ...]:
    """torch_npu's: ends of segments without the 0 that they begin with, at most 2048; masks are True where a query does not see a key."""
    assert keep_prob == 1.0 and key.shape == value.shape
    causal = sparse_mode == 2
    if causal:
        assert atten_mask is not None and torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    if input_layout == "TND":
        assert actual_seq_qlen == actual_seq_kvlen and actual_seq_qlen is not None and 0 < len(actual_seq_qlen) <= 2048
        assert head_num == query.shape[1] and actual_seq_qlen[-1] == len(query) == len(key) and (causal or atten_mask is None)
        CALLS.append(("npu", [0, *actual_seq_qlen], causal))
        return attend(query, key, value, [0, *actual_seq_qlen], causal, scale), None
    assert input_layout == "BNSD" and head_num == query.shape[1] and actual_seq_qlen is None
    CALLS.append(("npu rows", [0, query.shape[2]], causal))
    mask = None if atten_mask is None else ~(atten_mask[: query.shape[2], : key.shape[2]] if causal else atten_mask)
    grouped = head_num != key.shape[1]
    return nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped), None


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """torch 2.13's."""
    ends = _checked_ends(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    assert window_size in ((-1, -1), (-1, 0)) and enable_gqa == (query.shape[1] != key.shape[1]) and query.shape[2] % 8 == 0
    CALLS.append(("torch", ends, window_size == (-1, 0)))
    return attend(query, key, value, ends, window_size == (-1, 0), query.shape[-1] ** -0.5 if scale is None else scale)


DEVICES = {"flash": "cuda", "transformer_engine": "cuda", "npu": "npu", "torch": "cuda"}
_OURS = {name: f"tangram.platform.operators.{name}" for name in ("flash", "te", "npu", "torch_varlen")}


def install(patch: Any, *names: str, exact: bool = True) -> None:
    """Put stand-ins in place of libraries; those not named cannot be imported. Every tensor then counts as one on the device of ``names``.

    Args:
        patch: a ``pytest.MonkeyPatch``.
        names: libraries of one device.
        exact: let them take fp32 and fp64 too, so that results can be compared closely.
    """
    operator._load.cache_clear()
    for module in _OURS.values():
        sys.modules.pop(module, None)
    modules: dict[str, dict[str, Any]] = {
        "flash": {"flash_attn": {}, "flash_attn.flash_attn_interface": {"flash_attn_varlen_func": flash_attn_varlen_func}},
        "transformer_engine": {"transformer_engine": {}, "transformer_engine.pytorch": {"DotProductAttention": DotProductAttention}},
        "npu": {"torch_npu": {"npu_fusion_attention": npu_fusion_attention}},
    }
    for name, contents in modules.items():
        for path, functions in contents.items():
            module: Any = ModuleType(path)
            module.__path__ = []
            for function, value in functions.items():
                setattr(module, function, value)
            patch.setitem(sys.modules, path, module if name in names else None)
    if "flash" in names:
        patch.setattr(sys.modules["flash_attn"], "flash_attn_interface", sys.modules["flash_attn.flash_attn_interface"], raising=False)
    import torch.nn.attention.varlen as own

    if "torch" in names:
        patch.setattr(own, "varlen_attn", varlen_attn, raising=False)
    else:
        patch.delattr(own, "varlen_attn", raising=False)
    device = DEVICES[names[0]]
    patch.setattr(operator, "device_type", lambda tensor: device)
    if exact:
        wide = {name: replace(library, dtypes=(*library.dtypes, "float32", "float64")) for name, library in attention.LIBRARIES.items()}
        patch.setattr(varlen, "LIBRARIES", wide)
        patch.setattr(varlen, "TORCH_VARLEN", replace(attention.TORCH_VARLEN, dtypes=("bfloat16", "float32", "float64")))
    CALLS.clear()


def forget() -> None:
    """After ``install`` and the end of its patch: look everything up anew."""
    operator._load.cache_clear()
    for module in _OURS.values():
        sys.modules.pop(module, None)
