"""Tensor tables of LoRA adapters, made from the family's table of the model that they adapt.

Each adapted linear ``W [out, in]`` has a pair ``A [r, in]`` and ``B [out, r]``. A linear that is split by its output (column-parallel) has B
split as its own rows are and A on every rank; one that is split by its input (row-parallel) has A split by columns and B on every rank.
Adapters are of unfused linears: q, k, v and gate, up have pairs of their own, as in Hugging Face's modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tangram.errors import CheckpointError, suggest
from tangram.placement.canonical_form import unfuse
from tangram.placement.table import Layout, Replicated, Rule, Shape, Source, Split
from tangram.placement.topology import Chunk, Topology

PARTS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Linear:
    """One linear of one layer that can be adapted."""

    module: str
    """Canonical name, without ``.weight``."""
    layer: int | None
    """Global number; None outside the layers."""
    rule: Rule
    """Of the weight, unfused."""

    @property
    def shape(self) -> Shape:
        """``(out, in)``."""
        return self.rule.sources[0].shape

    def local(self, chunk: Chunk) -> str | None:
        """Name of the local module on a chunk; None where the chunk does not hold it."""
        vision = self.rule.component == "vision"
        name = self.rule.local.removesuffix(".weight")
        if self.layer is None:
            return name if (chunk.vision_last if vision else chunk.text_last) else None
        layers = chunk.vision if vision else chunk.text
        return name.format(i=self.layer - layers.start) if self.layer in layers else None

    def pair(self, rank: int) -> list[Rule]:
        """The rules of A and B."""
        out_size, in_size = self.shape
        axis = None if isinstance(self.rule.layout, Replicated) else self.rule.layout.axis
        return [
            self._rule("lora_A", (rank, in_size), Split(1) if axis == 1 else Replicated()),
            self._rule("lora_B", (out_size, rank), self.rule.layout if axis == 0 else Replicated()),
        ]

    def _rule(self, part: str, shape: Shape, layout: Layout) -> Rule:
        return replace(
            self.rule,
            local=f"{self.rule.local.removesuffix('.weight')}.{part}.default.weight",
            sources=(Source(f"{self.module}.{part}.weight", shape),),
            layout=layout,
            layers=None if self.layer is None else (self.layer,),
        )


def linears(table: Sequence[Rule], topology: Topology) -> dict[str, Linear]:
    """Every linear of a model that an adapter can change, by canonical module name.

    Embeddings, convolutions, a tied head and stacked experts are none.
    """
    found: dict[str, Linear] = {}
    counts = {"vision": topology.vision_layers, "text": topology.text_layers}
    for rule in unfuse(table):
        source = rule.sources[0]
        known_place = rule.place in ("layer", "last") and counts[rule.component] > 0
        if rule.tied or not known_place or not source.name.endswith(".weight") or len(source.shape) != 2:
            continue
        layers = [None] if rule.place == "last" else list(rule.layers if rule.layers is not None else range(counts[rule.component]))
        for number, layer in enumerate(layers):
            module = source.name.format(i=number).removesuffix(".weight")
            found[module] = Linear(module, layer, rule)
    return found


def lora_table(known: Mapping[str, Linear], ranks: Mapping[str, int], where: str) -> list[Rule]:
    """The table of an adapter.

    Args:
        ranks: rank of the pair of every adapted module.
        where: the adapter, for messages.

    Raises:
        CheckpointError: a module that is no linear of the model.
    """
    unknown = sorted(set(ranks) - set(known))
    if unknown:
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise CheckpointError(
            f"{where}: adapts {len(unknown)} modules that are no linears of this model: {', '.join(unknown[:4])}{more}{suggest(unknown[0], known)}; "
            "the adapter is of another model"
        )
    return [rule for module, rank in ranks.items() for rule in known[module].pair(rank)]


def local_modules(known: Mapping[str, Linear], chunk: Chunk) -> dict[str, str]:
    """Local name of every linear that a chunk holds -> canonical module name."""
    pairs = ((linear.local(chunk), linear.module) for linear in known.values())
    return {local: module for local, module in pairs if local is not None}
