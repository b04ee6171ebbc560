"""`megaswift data show --html FILE`: the report as one page that needs nothing else.

Owns the page's markup. Its parts are `sample_report.py`'s. Texts of rows are escaped, and the page allows no scripts.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from megaswift.data.sample_report import Block, Histogram, TokenizedText

STYLE = """
:root { color-scheme: light dark; --loss: #0a7d2c; --back: #d8f3df; --dim: #666; --bar: #4a7bd0; --line: #ccc }
@media (prefers-color-scheme: dark) {
  :root { --loss: #7ee29a; --back: #123d20; --dim: #999; --bar: #6f9be8; --line: #444 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
.tokens { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid var(--line); border-radius: 6px; padding: .7em 1em; color: var(--dim) }
.tokens span { border-right: 1px dotted var(--line) }
.tokens .loss { color: var(--loss); background: var(--back); font-weight: 600 }
pre { white-space: pre-wrap; margin: .3em 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-bottom: 1.2em }
td { padding: 0 .6em; text-align: right; white-space: nowrap } td.bar { width: 30em; text-align: left }
td.bar div { background: var(--bar); height: .9em; border-radius: 2px }
h2 { font-size: 1em; margin: 1.4em 0 .4em } .key { color: var(--dim) }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def report_page(blocks: Iterable[Block], title: str) -> str:
    """The page with all parts of a report."""
    body = "\n".join(part for block in blocks for part in _markup(block))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{html.escape(title)}</h1>\n"
        '<p class="key"><span class="tokens" style="padding: .1em .4em"><span class="loss">Green</span></span> tokens '
        "carry loss; a number before them is their weight.</p>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _markup(block: Block) -> Iterator[str]:
    if isinstance(block, str):
        if block.strip():
            yield f"<pre>{html.escape(block.strip(chr(10)))}</pre>"
    elif isinstance(block, TokenizedText):
        yield f"<h2>{html.escape(block.title.strip('- '))}</h2>"
        yield f'<div class="tokens">{"".join(_tokens(block))}</div>'
    else:
        yield from _table(block)


def _tokens(block: TokenizedText) -> Iterator[str]:
    before = 1.0
    for text, weight in zip(block.texts, block.weights, strict=True):
        shown = html.escape(text).replace("⏎", "⏎\n")
        if weight not in (0, 1) and weight != before:
            yield f"<small>{weight:g} x </small>"
        yield f'<span class="loss">{shown}</span>' if weight else f"<span>{shown}</span>"
        before = weight


def _table(block: Histogram) -> Iterator[str]:
    largest = max(count for _, _, count in block.bars)
    yield f"<h2>{html.escape(block.title)}</h2>\n<table>"
    for first, last, count in block.bars:
        bar = f'<div style="width: {100 * count / largest:.1f}%"></div>'
        yield f'<tr><td>{first:,} - {last:,}</td><td class="bar">{bar}</td><td>{count:,}</td></tr>'
    yield "</table>"
