"""A sample as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING

from tangram.data.show import MediumView, Run, SampleView, Token

if TYPE_CHECKING:
    from PIL import Image

STYLE = """
:root { --ink: #1d2733; --soft: #5f6b7a; --line: #d8dee6; --paper: #fff; --learnt: #d3f2df; --learnt-ink: #0f5132; --medium: #ece6fb;
  --medium-ink: #4c2f91; --mark: #ffd75e; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: #f4f6f9; margin: 0; }
main { max-width: 1100px; margin: 0 auto; padding: 28px 20px 64px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 18px 22px; margin: 18px 0; }
h1 { margin: 0; font-size: 1.6rem; } h2 { margin: 0 0 12px; font-size: 1.1rem; } .soft { color: var(--soft); overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 14px; }
.facts div { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 8px 16px; font-size: .9rem; }
.facts b { display: block; font-size: 1.25rem; }
.switches { display: flex; flex-wrap: wrap; gap: 18px; margin: 0 0 12px; font-size: .9rem; align-items: center; }
.key { padding: 1px 8px; border-radius: 5px; } .key.learnt { background: var(--learnt); color: var(--learnt-ink); }
.key.medium { background: var(--medium); color: var(--medium-ink); } .key.plain { background: #eef1f5; }
.tokens { font: 15px/2.1 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.t { position: relative; padding: 2px 0; margin-right: 1px; background: #eef1f5; border-radius: 3px; cursor: default; }
.t.learnt { background: var(--learnt); color: var(--learnt-ink); }
.t.medium, a.chip { background: var(--medium); color: var(--medium-ink); }
a.chip { padding: 2px 8px; border-radius: 12px; text-decoration: none; font-weight: 600; white-space: nowrap; }
.t i { font-style: normal; opacity: .45; }
.t:hover { outline: 2px solid var(--mark); z-index: 2; }
.t:hover::before { content: attr(data-tip); position: absolute; left: 0; top: 2em; z-index: 3; background: var(--ink); color: #fff; font-size: 12px;
  line-height: 1.4; padding: 4px 8px; border-radius: 6px; white-space: pre; pointer-events: none; }
#ids:checked ~ .tokens .t::after { content: attr(data-id); font-size: 9px; color: var(--soft); vertical-align: super; margin: 0 3px 0 1px; }
.media { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 18px; align-items: start; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
figure:target { outline: 3px solid var(--mark); }
figcaption { padding: 10px 14px; font-size: .88rem; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; background: #eef1f5; image-rendering: auto; }
svg .lines { fill: none; stroke: #fff; stroke-opacity: .75; stroke-width: 1; vector-effect: non-scaling-stroke; mix-blend-mode: difference; }
svg rect.cell { fill: transparent; } svg rect.cell:hover { fill: var(--mark); fill-opacity: .45; }
#grid:not(:checked) ~ .media .lines { display: none; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td, th { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""
LINE_END = "\u23ce"
"""Shows where a line ends."""


def render_sample(view: SampleView) -> str:
    """The HTML."""
    media_tokens = sum(len(medium.places) for medium in view.media)
    facts = [
        (len(view.tokens), "tokens"),
        (view.learnt, f"learnt, {100 * view.learnt / len(view.tokens):.1f} %"),
        (media_tokens, f"tokens of {len(view.media)} images and videos"),
        (view.positions, "positions"),
    ]
    if view.turns_dropped:
        facts.append((view.turns_dropped, "turns dropped at the cutoff"))
    cards = "".join(f"<div><b>{number}</b>{html.escape(caption)}</div>" for number, caption in facts)
    sections = [_tokens(view)]
    if view.media:
        figures = "".join(_figure(number, medium, view.tokens) for number, medium in enumerate(view.media))
        sections.append(
            '<section><h2>What the vision encoder sees</h2><input type="checkbox" id="grid" checked> <label for="grid">grid: one cell is one token; '
            f'point at a cell for its place</label><p></p><div class="media">{figures}</div></section>'
        )
    sections.append(_runs(view))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Sample {view.id}</title><style>{STYLE}</style></head><body><main><h1>Sample {view.id}</h1>"
        f'<div class="soft">{html.escape(view.where)}</div><div class="facts">{cards}</div>{"".join(sections)}</main></body></html>\n'
    )


def _tokens(view: SampleView) -> str:
    spans = "".join(_chip(run, view) if run.tokens[0].medium is not None else _spans(run) for run in view.runs())
    return (
        '<section><h2>Tokens</h2><input type="checkbox" id="ids"> <label for="ids">ids</label> &ensp; <span class="key learnt">learnt</span> '
        '<span class="key plain">not learnt</span> <span class="key medium">image or video</span><p></p>'
        f'<div class="tokens">{spans}</div></section>'
    )


def _spans(run: Run) -> str:
    return "".join(_span(run.start + number, token) for number, token in enumerate(run.tokens))


def _span(place: int, token: Token) -> str:
    text = html.escape(token.text).replace("\n", f"<i>{LINE_END}</i>\n") or "<i>\u00b7</i>"
    learnt = " learnt" if token.learnt else ""
    tip = f"id {token.id}, place {place}, position {_position(token)}"
    return f'<span class="t{learnt}" data-id="{token.id}" data-tip="{tip}">{text}</span>'


def _position(token: Token) -> str:
    return str(token.position[0]) if len(set(token.position)) == 1 else "t {} h {} w {}".format(*token.position)


def _chip(run: Run, view: SampleView) -> str:
    number = run.tokens[0].medium
    assert number is not None
    tip = f"id {run.tokens[0].id}, places {run.places}, positions {run.positions}"
    text = f"{html.escape(run.tokens[0].text)} &times; {len(run.tokens)}"
    return f'<a class="t chip" href="#medium{number}" data-id="" data-tip="{tip}">{text}</a>'


def _figure(number: int, medium: MediumView, tokens: tuple[Token, ...]) -> str:
    steps, rows, columns = medium.grid
    width, height = medium.pictures[0].size
    down, across = height // medium.cell, width // medium.cell
    pictures = []
    for step, picture in enumerate(medium.pictures):
        lines = "".join(f"M{x * medium.cell} 0V{height}" for x in range(1, across)) + "".join(f"M0 {y * medium.cell}H{width}" for y in range(1, down))
        cells = "".join(
            f'<rect class="cell" x="{x * medium.cell}" y="{y * medium.cell}" width="{medium.cell}" height="{medium.cell}">'
            f"<title>{_cell(medium, tokens, (step * down + y) * across + x, y, x)}</title></rect>"
            for y in range(down)
            for x in range(across)
        )
        pictures.append(
            f'<svg viewBox="0 0 {width} {height}"><image width="{width}" height="{height}" href="{_embedded(picture)}"/>'
            f'<path class="lines" d="{lines}"/>{cells}</svg>'
        )
    frames = f"{steps} steps of time, " if medium.kind == "video" else ""
    grid = f"grid {steps} &times; {rows} &times; {columns} patches"
    caption = (
        f"<b>{medium.kind} {number}</b> {html.escape(medium.path)}<br>"
        f'<span class="soft">{width} &times; {height} pixels, {frames}{grid}, {len(medium.places)} tokens of '
        f"{medium.cell} &times; {medium.cell} pixels</span>"
    )
    return f'<figure id="medium{number}">{"".join(pictures)}<figcaption>{caption}</figcaption></figure>'


def _cell(medium: MediumView, tokens: tuple[Token, ...], cell: int, row: int, column: int) -> str:
    place = medium.places[cell]
    return f"row {row}, column {column}: token {place}, position {_position(tokens[place])}"


def _runs(view: SampleView) -> str:
    rows = []
    for run in view.runs():
        what = "learnt" if run.tokens[0].learnt else "" if run.tokens[0].medium is None else view.media[run.tokens[0].medium].kind
        key = "learnt" if what == "learnt" else "medium" if what else "plain"
        rows.append(
            f'<tr><td class="number">{run.places}</td><td class="number">{len(run.tokens)}</td>'
            f'<td><span class="key {key}">{what or "not learnt"}</span></td><td>{html.escape(run.positions)}</td></tr>'
        )
    head = '<tr><th class="number">places</th><th class="number">tokens</th><th></th><th>positions</th></tr>'
    return f"<section><h2>Positions</h2><table>{head}{''.join(rows)}</table></section>"


def _embedded(picture: Image.Image) -> str:
    """PNG: every pixel is what the model gets."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
