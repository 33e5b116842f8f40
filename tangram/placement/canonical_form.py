"""The unfused form of a tensor table, which MindSpeed-MM calls the canonical Hugging Face structure.

A parameter that fuses several canonical tensors becomes one parameter per tensor, named after the tensor's own module: ``q_proj``,
``k_proj``, ``v_proj`` beside ``linear_proj``, and ``gate_proj``, ``up_proj`` beside ``linear_fc2``. A tensor that Hugging Face keeps
packed stays one parameter: ``[q; k; v]`` of a vision encoder is not interleaved by head, and each tensor-parallel rank holds its heads'
rows of q, then of k, then of v. (Equal parts of the whole would give the first rank nothing but q.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tangram.errors import PlacementError
from tangram.placement.table import GatedSplit, GroupedQKV, Layout, PackedQKV, Rule, Run, Source, Split, even_share


@dataclass(frozen=True)
class GroupSplit:
    """Equal parts of whole groups of rows: the heads of a projection that key/value groups share."""

    groups: int
    axis: int = 0

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        per_rank = even_share(self.groups, tp_size, "number of key/value heads")
        share = per_rank * (rows[0] // self.groups)
        return [Run(0, tp_rank * share, share)]


@dataclass(frozen=True)
class PackedThirds:
    """One tensor ``[q; k; v]``; a rank holds its heads of each third: ``[q_r; k_r; v_r]``."""

    heads: int
    axis: int = 0

    def runs(self, rows: Sequence[int], tp_size: int, tp_rank: int) -> list[Run]:
        per_rank = even_share(self.heads, tp_size, "number of attention heads")
        third = rows[0] // 3
        share = per_rank * (third // self.heads)
        return [Run(0, part * third + tp_rank * share, share) for part in range(3)]


def unfuse(table: Sequence[Rule]) -> list[Rule]:
    """The table of the same canonical tensors with one local parameter per tensor.

    Raises:
        PlacementError: a layout of several sources that has no such form.
    """
    return [unfused for rule in table for unfused in _unfuse(rule)]


def _unfuse(rule: Rule) -> Iterator[Rule]:
    if isinstance(rule.layout, PackedQKV):
        yield replace(rule, layout=PackedThirds(rule.layout.heads, rule.layout.axis))
    elif len(rule.sources) == 1:
        yield rule
    else:
        for source in rule.sources:
            yield replace(rule, local=_own_name(rule.local, source), sources=(source,), layout=_own_layout(rule.layout))


def _own_name(local: str, source: Source) -> str:
    """``...mlp.linear_fc1.weight`` and ``...mlp.up_proj.weight`` -> ``...mlp.up_proj.weight``."""
    parent, _, kind = local.rsplit(".", 2)
    return f"{parent}.{source.name.split('.')[-2]}.{kind}"


def _own_layout(layout: Layout) -> Layout:
    if isinstance(layout, GroupedQKV):
        return GroupSplit(layout.groups, layout.axis)
    if isinstance(layout, GatedSplit):
        return Split(layout.axis)
    raise PlacementError(f"layout {type(layout).__name__} has no unfused form; convert without enable_canonical_hf_struct")
