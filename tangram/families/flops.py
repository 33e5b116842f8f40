"""Floating-point operations that training a batch takes, from a model's tensor table and the batch's real lengths and pictures.

Counted are model FLOPs, what the mathematics asks for, whatever the run does (PaLM, Chowdhery et al. 2022, appendix B):

- matrix products alone, a multiplication and an addition as two operations: linears, the patch embedding, scores and values of attention. Norms,
  activations, rotary positions, lookups, the loss and the optimizer are left out;
- tokens, not padding; the head over all tokens, although only those with a label need it;
- causal attention over the pairs that see each other, ``n (n + 1) / 2`` of a sample of ``n`` tokens; packed samples do not see each other. Vision
  attends to windows or whole frames, without a causal half;
- of experts those that a token goes to;
- in the backward pass a gradient of each trained weight, and one of each input that something trained lies before. What is frozen has the second
  alone, and a frozen tower neither;
- nothing twice: recomputation adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from tangram.config.model import ModelConfig, VisionEncoderConfig
from tangram.placement.table import Rule

Trains = Callable[[Rule, str], bool]
"""Whether the canonical tensor of that name, of that rule, is trained."""
Unit = Literal["patches", "places", "cells", "tokens"]
LOOKUPS = ("word_embeddings.weight", "pos_embed.weight", "position_embeddings.weight")
"""Ends of local names of tables whose rows are picked, not multiplied with."""
EMPTY = -1
"""Id of a sample that only fills a place."""


@dataclass(frozen=True)
class Counts:
    """What a micro-batch holds.

    Args:
        tokens: of samples.
        pairs: of tokens of a sample that see each other.
        patches: of pictures, a video's frame groups among them.
        places: patches, and class tokens where the tower has them.
        cells: tokens that patches are merged into.
        frame_pairs: pairs within whole frames.
        window_pairs: pairs within windows.
    """

    tokens: int = 0
    pairs: int = 0
    patches: int = 0
    places: int = 0
    cells: int = 0
    frame_pairs: int = 0
    window_pairs: int = 0


@dataclass(frozen=True)
class _Product:
    """Operations of one product: ``per_unit`` forward, and as many for each of ``backward`` gradients."""

    unit: str
    per_unit: int
    backward: int


class ModelFlops:
    """Counts the operations, forward and backward, of micro-batches.

    Args:
        table: the family's tensor table, at tensor-parallel size 1.
        trains: which tensors are trained.
    """

    def __init__(self, model: ModelConfig, table: Sequence[Rule], trains: Trains) -> None:
        self._model, self._table, self._trains = model, table, trains
        self._vision = list(self._walk_vision())
        tower_trains = any(trains(rule, source.name) for rule in table if rule.component == "vision" for source in rule.sources)
        self._text = {pictures: list(self._walk_text(reached=pictures and tower_trains)) for pictures in (False, True)}

    def __call__(self, batch: Mapping[str, Any]) -> int:
        """Of one micro-batch as the collator makes it."""
        counts = counts_of(batch, self._model)
        products = [*(self._vision if counts.patches else ()), *self._text[counts.patches > 0]]
        return sum(one.per_unit * (1 + one.backward) * getattr(counts, one.unit) for one in products)

    def forward(self, batch: Mapping[str, Any]) -> int:
        """Of the forward pass alone."""
        counts = counts_of(batch, self._model)
        return sum(one.per_unit * getattr(counts, one.unit) for one in [*self._vision, *self._text[True]])

    def _walk_vision(self) -> Iterator[_Product]:
        encoder = self._model.image_encoder
        if encoder is None:
            return
        vision = encoder.vision_encoder
        rules = [rule for rule in self._table if rule.component == "vision"]
        reached = False
        for rule in (rule for rule in rules if rule.place == "first"):
            # Pixels have no gradient.
            yield from self._products(rule, "patches", reached=False)
            reached |= self._trained(rule)
        width = vision.num_attention_heads * vision.head_dim
        blocks = [rule for rule in rules if rule.place == "layer" and rule.layers is None]
        for layer in range(vision.used_layers):
            windows = vision.fullatt_block_indexes is not None and layer not in vision.fullatt_block_indexes
            yield from self._layer(blocks, "places", "window_pairs" if windows else "frame_pairs", width, layer, reached)
            reached |= any(self._trained(rule, layer) for rule in blocks)
            yield from self._beside([rule for rule in rules if rule.layers is not None], layer, reached)
        for rule in (rule for rule in rules if rule.place == "last"):
            yield from self._products(rule, "cells", reached)
            reached |= self._trained(rule)

    def _beside(self, rules: Sequence[Rule], layer: int, reached: bool) -> Iterator[_Product]:
        """The merger beside a block, if it has one; what is trained in it lies before no other block."""
        for rule in rules:
            if rule.layers is not None and layer in rule.layers:
                yield from self._products(rule, "cells", reached, rule.layers.index(layer))
                reached |= self._trained(rule, rule.layers.index(layer))

    def _walk_text(self, reached: bool) -> Iterator[_Product]:
        text = self._model.text_decoder
        rules = [rule for rule in self._table if rule.component == "text"]
        layer_rules = [rule for rule in rules if rule.place in ("layer", "expert")]
        reached |= any(self._trained(rule) for rule in rules if rule.place == "first")
        for layer in range(text.num_layers):
            yield from self._layer(layer_rules, "tokens", "pairs", text.num_attention_heads * text.head_dim, layer, reached)
            reached |= any(self._trained(rule, layer) for rule in layer_rules)
        for rule in (rule for rule in rules if rule.place == "last"):
            yield from self._products(rule, "tokens", reached)
            reached |= self._trained(rule)

    def _layer(self, rules: Sequence[Rule], unit: Unit, pairs: str, width: int, layer: int, reached: bool) -> Iterator[_Product]:
        """One layer: its linears, and its attention over heads of ``width`` in all."""
        for rule in rules:
            yield from self._products(rule, unit, reached, layer)
            reached |= self._trained(rule, layer)
            if rule.local.endswith("linear_qkv.weight"):
                # Scores and values; gradients of both factors of both, or none.
                yield _Product(pairs, 4 * width, 2 if reached else 0)

    def _products(self, rule: Rule, unit: Unit, reached: bool, layer: int = 0) -> Iterator[_Product]:
        for source in rule.sources:
            if len(source.shape) < 2 or rule.local.endswith(LOOKUPS):
                continue
            elements = prod(source.shape)
            if rule.place == "expert":
                elements = elements // rule.experts * int(getattr(self._model.text_decoder, "moe_router_topk", 1))
            trained = self._trains(rule, source.name.replace("{i}", str(layer)))
            yield _Product(unit, 2 * elements, int(trained) + int(reached))

    def _trained(self, rule: Rule, layer: int = 0) -> bool:
        return any(self._trains(rule, source.name.replace("{i}", str(layer))) for source in rule.sources)


def counts_of(batch: Mapping[str, Any], model: ModelConfig) -> Counts:
    """What the micro-batch holds; places without a sample count nothing."""
    ends = batch.get("cu_seqlens")
    # Data of a plug-in may leave the mask out where all tokens are real.
    rows = batch["attention_mask"].sum(-1).tolist() if "attention_mask" in batch else [batch["labels"].shape[-1]] * len(batch["labels"])
    lengths = rows if ends is None else ends.diff().tolist()
    ids = batch.get("sample_ids", range(len(lengths)))
    lengths = [length for length, sample in zip(lengths, ids, strict=True) if sample != EMPTY]
    grids = [grid for name in ("image_grid_thw", "video_grid_thw") if name in batch for grid in batch[name].tolist()]
    found = Counts(tokens=sum(lengths), pairs=sum(n * (n + 1) // 2 for n in lengths))
    if model.image_encoder is None or not grids:
        return found
    vision = model.image_encoder.vision_encoder
    patches = sum(t * h * w for t, h, w in grids)
    frames = [(t, vision.places((1, h, w))) for t, h, w in grids]
    return Counts(
        tokens=found.tokens,
        pairs=found.pairs,
        patches=patches,
        places=sum(t * places for t, places in frames),
        cells=sum(map(vision.tokens, grids)),
        frame_pairs=sum(t * places**2 for t, places in frames),
        window_pairs=sum(t * _window_squares(h, vision) * _window_squares(w, vision) for t, h, w in grids),
    )


def _window_squares(side: int, vision: VisionEncoderConfig) -> int:
    """Sum of the squares of the windows' sides along a frame's ``side``, in patches: windows are whole cells, and the last may be short."""
    if vision.window_attn_size is None:
        return 0
    window = vision.window_attn_size // vision.patch_size // vision.spatial_merge_size * vision.spatial_merge_size
    return side // window * window**2 + (side % window) ** 2
