"""report.html: one page that needs no other file."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tangram.demo.evaluate import Answered, Score
from tangram.report_page import page as whole_page
from tangram.report_page import section

PICTURE_SIDE = 300
"""Longest side, pixels."""
STYLE = """
img.curve { width: 100%; height: auto; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 14px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 10px; overflow: hidden; font-size: .9rem; }
figure img { width: 100%; height: 150px; object-fit: contain; background: #eef1f5; image-rendering: auto; }
figcaption { padding: 8px 12px 12px; }
.bar { background: #e6ebf2; border-radius: 6px; height: 14px; min-width: 160px; position: relative; }
.bar i { display: block; height: 100%; border-radius: 6px; background: var(--accent); }
.bar u { position: absolute; top: -3px; height: 20px; border-left: 2px solid var(--ink); }
ul.checks { list-style: none; padding: 0; } ul.checks li { padding: 6px 0 6px 28px; position: relative; border-bottom: 1px solid var(--line); }
ul.checks li::before { content: "\\2713"; position: absolute; left: 4px; color: var(--good); font-weight: 700; }
ul.checks li.failed::before { content: "\\2717"; color: var(--bad); }
pre { background: #10161d; color: #e8edf3; padding: 14px 16px; border-radius: 10px; overflow-x: auto; }
svg.split { width: 100%; height: auto; } svg.split rect { fill: #eef4ff; stroke: var(--accent); }
svg.split line { stroke: var(--soft); stroke-width: 1.5; }
svg.split text { font: 14px system-ui, sans-serif; fill: var(--ink); }
svg.split .heading { fill: var(--soft); } svg.split .title { font-weight: 600; }
svg.split .note { text-anchor: end; fill: var(--soft); font-size: 12px; } svg.split marker path { fill: var(--soft); }
"""


@dataclass(frozen=True)
class Check:
    """One thing that was verified, in a sentence with its numbers."""

    passed: bool
    text: str


@dataclass(frozen=True)
class Page:
    """What the page shows.

    Args:
        facts: pairs of figure and caption at the top.
        split: SVG element.
        heldout, photos: answers to show; the latter about pictures that training saw.
        commands: what to run next, one a line.
    """

    facts: Sequence[tuple[str, str]]
    curve: Path
    split: str
    scores: Sequence[Score]
    heldout: Sequence[Answered]
    photos: Sequence[Answered]
    checks: Sequence[Check]
    commands: Sequence[str]


def render_page(page: Page) -> str:
    """The HTML."""
    sections = [
        section("Loss", f'<img class="curve" alt="loss per step" src="{_embedded(page.curve)}">'),
        section(
            "What the exported model answers, on pictures it has not seen",
            _score_table(page.scores) + '<p class="soft">The first held-out questions, as they come; nothing is chosen.</p>' + _figures(page.heldout),
        ),
        section(
            "Photographs",
            '<p class="soft">These pictures and questions were among the training samples.</p>' + _figures(page.photos),
        ),
        section("How the model was split", page.split + '<p class="soft">Arrows: activations. Dashed: the two halves of every matrix.</p>'),
        section("What was verified", f'<ul class="checks">{"".join(map(_check, page.checks))}</ul>'),
        section("What to run next", f"<pre>{html.escape(chr(10).join(page.commands))}</pre>"),
    ]
    lead = (
        "A small vision-language model, from random weights to answers: assembled, split over four processes, trained, "
        "exported, and read by transformers."
    )
    return whole_page("Tangram demo", lead, sections, facts=page.facts, style=STYLE)


def _check(check: Check) -> str:
    return f"<li{'' if check.passed else ' class=failed'}>{html.escape(check.text)}</li>"


def _figures(answers: Iterable[Answered]) -> str:
    cells = []
    for answer in answers:
        question = answer.question
        verdict = "right" if answer.right else "wrong"
        cells.append(
            f'<figure><img alt="" src="{_small(question.image)}"><figcaption>{html.escape(question.text)}<br>'
            f'<span class="{verdict}">{html.escape(answer.said or "(nothing)")}</span><br>'
            f'<span class="soft">truth: {html.escape(question.answer)}</span></figcaption></figure>'
        )
    return f'<div class="grid">{"".join(cells)}</div>'


def _score_table(scores: Iterable[Score]) -> str:
    rows = []
    for score in scores:
        bar = f'<div class="bar"><i style="width:{100 * score.accuracy:.1f}%"></i><u style="left:{100 * score.majority_accuracy:.1f}%"></u></div>'
        rows.append(
            f"<tr><td>{html.escape(score.kind)}</td><td>{100 * score.accuracy:.1f} % ({score.right} of {score.count})</td><td>{bar}</td>"
            f"<td>{100 * score.majority_accuracy:.1f} % (always &ldquo;{html.escape(score.majority)}&rdquo;)</td></tr>"
        )
    head = "<tr><th>question type</th><th>right</th><th></th><th>most frequent answer</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _embedded(image: Path) -> str:
    return _data_uri("png", image.read_bytes())


def _small(image: Path) -> str:
    """A picture small enough to stand on the page a dozen times."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(image) as picture:
        small = picture.convert("RGB")
        small.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
        small.save(buffer, "JPEG", quality=90)
    return _data_uri("jpeg", buffer.getvalue())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
