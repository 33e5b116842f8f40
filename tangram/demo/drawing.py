"""The split of a model as an SVG drawing: one box per process."""

from __future__ import annotations

import html
from collections.abc import Sequence

from tangram.config.model import ModelConfig
from tangram.families.base import get_family
from tangram.placement.blocks import Placement, place
from tangram.placement.table import padded_vocabulary
from tangram.placement.topology import Chunk, Topology

BOX_WIDTH, BOX_HEIGHT, GAP, MARGIN, LINE = 250, 132, 70, 30, 20


def contents(chunk: Chunk) -> list[str]:
    """What a chunk holds, in words, in order of execution."""
    lines = []
    if chunk.vision_first:
        lines.append("patch embedding")
    if chunk.has_vision:
        lines.append(f"vision blocks {_numbers(chunk.vision)}")
    if chunk.vision_last:
        lines.append("projector")
    if chunk.text_first:
        lines.append("word embedding")
    if chunk.has_text:
        lines.append(f"text layers {_numbers(chunk.text)}")
    if chunk.text_last:
        lines.append("final norm, head, loss")
    return lines


def _numbers(layers: range) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"


def elements(placement: Placement) -> int:
    """Elements of the chunk's parameters, padding included."""
    return sum(block.numel for block in placement.blocks)


def draw_split(model: ModelConfig, topology: Topology) -> str:
    """The SVG element. Columns are pipeline stages in order of execution, rows tensor-parallel ranks.

    Ranks are numbered as Megatron does for one copy of the model: tensor-parallel first.
    """
    table = get_family(model.model_id).tensor_table(model, padded_vocabulary(model.text_decoder.vocab_size, topology.tensor))
    columns, rows = len(topology.order), topology.tensor
    width = 2 * MARGIN + columns * BOX_WIDTH + (columns - 1) * GAP
    height = 2 * MARGIN + rows * BOX_HEIGHT + (rows - 1) * MARGIN + LINE
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="the split of the model over processes" class="split">']
    parts.append('<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">')
    parts.append('<path d="M0 0 L8 4 L0 8 z"/></marker></defs>')
    for column, chunk in enumerate(topology.order):
        left = MARGIN + column * (BOX_WIDTH + GAP)
        stage = f"pipeline stage {chunk.pp_rank}" + (f", virtual {chunk.vp_rank}" if topology.virtual > 1 else "")
        parts.append(_text(left, MARGIN, stage, "heading"))
        for tp_rank in range(rows):
            top = MARGIN + LINE + tp_rank * (BOX_HEIGHT + MARGIN)
            held = elements(place(table, topology, tp_rank, chunk))
            title = f"process {chunk.pp_rank * topology.tensor + tp_rank}: {held:,} weights"
            parts += _box(left, top, title, contents(chunk), f"slice {tp_rank + 1} of {rows}" if rows > 1 else "")
            if column < columns - 1:
                right, middle = left + BOX_WIDTH, top + BOX_HEIGHT // 2
                parts.append(_line(right + 4, middle, right + GAP - 4, middle, ' marker-end="url(#tip)"'))
            if tp_rank < rows - 1:
                middle, bottom = left + BOX_WIDTH // 2, top + BOX_HEIGHT
                parts.append(_line(middle, bottom + 2, middle, bottom + MARGIN - 2, ' stroke-dasharray="4 3"'))
    parts.append("</svg>")
    return "".join(parts)


def _box(left: int, top: int, title: str, lines: Sequence[str], note: str) -> list[str]:
    parts = [f'<rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="10"/>']
    parts.append(_text(left + 14, top + 24, title, "title"))
    parts += [_text(left + 14, top + 24 + LINE * (number + 1) - 2, line, "") for number, line in enumerate(lines)]
    if note:
        parts.append(_text(left + BOX_WIDTH - 14, top + BOX_HEIGHT - 10, note, "note"))
    return parts


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{html.escape(text)}</text>'


def _line(x1: int, y1: int, x2: int, y2: int, extra: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"{extra}/>'
