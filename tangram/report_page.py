"""The frame that reports share: one HTML page that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

STYLE = """
:root { --ink: #1d2733; --soft: #5f6b7a; --line: #d8dee6; --paper: #ffffff; --good: #18794e; --bad: #b42318; --accent: #2f6fde; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: #f4f6f9; margin: 0; }
main { max-width: 1000px; margin: 0 auto; padding: 32px 20px 64px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 20px 24px; margin: 20px 0; }
h1 { margin: 0 0 4px; } h2 { margin: 0 0 12px; font-size: 1.15rem; } p { margin: 8px 0; } .soft { color: var(--soft); }
.facts { display: flex; flex-wrap: wrap; gap: 12px; margin-top: 16px; }
.facts div { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px; }
.facts b { display: block; font-size: 1.3rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--line); }
.right { color: var(--good); font-weight: 600; } .wrong { color: var(--bad); font-weight: 600; }
"""


def section(title: str, body: str) -> str:
    """A box with a heading; ``body`` is HTML."""
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>"


def page(title: str, lead: str, sections: Iterable[str], *, facts: Sequence[tuple[str, str]] = (), style: str = "") -> str:
    """The whole page.

    Args:
        lead: a sentence below the title.
        facts: pairs of figure and caption.
        style: CSS on top of ``STYLE``.
    """
    cards = "".join(f"<div><b>{html.escape(figure)}</b>{html.escape(caption)}</div>" for figure, caption in facts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}{style}</style></head><body><main><h1>{html.escape(title)}</h1>"
        f'<p class="soft">{html.escape(lead)}</p><div class="facts">{cards}</div>{"".join(sections)}</main></body></html>\n'
    )
