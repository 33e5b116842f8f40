"""Libraries of core attention that can be asked for by name: where they run and what they take. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AUTO, TORCH = "auto", "torch"
"""The first of ``LIBRARIES`` that is installed and takes the tensors, else torch; and torch alone."""
SIXTEEN_BITS = ("float16", "bfloat16")


@dataclass(frozen=True)
class AttentionLibrary:
    """What attends to segments on one type of device.

    Args:
        package: that must be installed.
        dtypes: that it takes, as torch names them.
        widest: largest width of a head.
        unit: that divides the width of a head.
        dropout: whether it can drop scores.
        masks: whether it takes a mask in place of segments and causality.
        ring: whether it computes blocks for a ring of context-parallel ranks.
    """

    name: str
    device: str
    package: str
    dtypes: tuple[str, ...] = SIXTEEN_BITS
    widest: int = 256
    unit: int = 1
    dropout: bool = True
    masks: bool = False
    ring: bool = False

    def misfit(self, dtype: str, head_dim: int, dropout: float) -> str | None:
        """Why it does not take such tensors; None: it does."""
        if dtype not in self.dtypes:
            return f"takes {' and '.join(self.dtypes)}, not {dtype}"
        if head_dim > self.widest or head_dim % self.unit:
            multiple = f" that {self.unit} divides" if self.unit > 1 else ""
            return f"takes heads of a width of up to {self.widest}{multiple}, not {head_dim}"
        if dropout and not self.dropout:
            return f"has no dropout, and attention_dropout is {dropout:g}"
        return None


LIBRARIES: Mapping[str, AttentionLibrary] = {
    library.name: library
    for library in (
        AttentionLibrary("flash", "cuda", "flash_attn", ring=True),
        AttentionLibrary("transformer_engine", "cuda", "transformer_engine", unit=8),
        AttentionLibrary("npu", "npu", "torch_npu", dtypes=(*SIXTEEN_BITS, "float32"), widest=768, masks=True),
    )
}
TORCH_VARLEN = AttentionLibrary("varlen_attn", "cuda", "torch", unit=8, dropout=False)
"""What torch has for segments besides ``scaled_dot_product_attention``."""


def no_ring(backend: str) -> str:
    """What is said to those who ask for a library that has no blocks for a ring."""
    return f"attention_backend {backend} has no attention round a ring of ranks; set auto, flash or torch, or use ulysses_cp_algo"
