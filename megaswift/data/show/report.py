"""The parts of `megaswift data show`'s report, and how they look in a terminal: samples as tokens with their loss mask,
histograms, and lines of text.

Owns the parts and their text. What is in a report belongs to `samples.py`.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import numpy as np


GREEN = "\033[1;32m"
DIM = "\033[2m"
OFF = "\033[0m"
CLASSES = 12
"""Bars of a histogram."""
WIDTH = 40
"""Characters of its longest bar."""


@dataclass(frozen=True)
class TokenizedText:
    """Some tokens as texts, with their loss weights."""

    title: str
    texts: Sequence[str]
    weights: Sequence[float]


@dataclass(frozen=True)
class Histogram:
    """Numbers in equal classes."""

    title: str
    bars: tuple[tuple[int, int, int], ...]
    """(first value, last value, how many) of each class."""


Block = str | TokenizedText | Histogram


def histogram_of(values: np.ndarray, what: str) -> Histogram:
    """Integers in at most CLASSES equal classes."""
    import numpy as np

    low = int(values.min())
    high = int(values.max())
    step = max(1, -(-(high - low + 1) // CLASSES))
    counts = np.bincount((values - low) // step).tolist()
    title = (
        f"{what}: {len(values):,} in total, {low:,} to {high:,}, mean {values.mean():,.1f}, median "
        f"{np.median(values):,.0f}"
    )
    edges = range(low, high + 1, step)
    return Histogram(title, tuple((a, min(high, a + step - 1), n) for a, n in zip(edges, counts, strict=True)))


def use_color(out: TextIO) -> bool:
    """Color only where someone looks: a terminal, and no NO_COLOR."""
    return out.isatty() and not os.environ.get("NO_COLOR")


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token's text, line ends shown as ⏎; bytes of a character that is spread over several tokens as they are
    stored."""
    texts = []
    for i in ids:
        text = tokenizer.decode([i], clean_up_tokenization_spaces=False)
        text = str(tokenizer.convert_ids_to_tokens(i)) if "\ufffd" in text else text
        texts.append(text.replace("\n", "⏎"))
    return texts


def fold_repeats(texts: Sequence[str], mask: Sequence[float]) -> tuple[list[str], list[float]]:
    """(texts, mask) with long runs of one token without loss, as images have them, as one: `<image> x 64`."""
    out: list[str] = []
    folded_mask: list[float] = []
    position = 0
    while position < len(texts):
        end = position
        while end < len(texts) and texts[end] == texts[position] and not mask[end]:
            end += 1
        run = end - position
        out += [f"{texts[position]} x {run}"] if run > 3 else texts[position : max(end, position + 1)]
        folded_mask += [0] if run > 3 else mask[position : max(end, position + 1)]
        position = max(end, position + 1)
    return out, folded_mask


def loss_highlighted_text(texts: Sequence[str], mask: Sequence[float], color: bool) -> str:
    """The tokens of one sample; runs with loss in green, or in brackets, after their weight where it is not 1."""
    out = []
    position = 0
    while position < len(texts):
        end = position
        while end < len(texts) and mask[end] == mask[position]:
            end += 1
        weight = "" if mask[position] in (0, 1) else f"{mask[position]:g} x: "
        run = weight + "|".join(texts[position:end])
        if color:
            out.append(f"{GREEN if mask[position] else DIM}{run}{OFF}")
        else:
            out.append(f"[{run}]" if mask[position] else run)
        position = end
    return ("|" if color else " ").join(out).replace("⏎", "⏎\n")


def block_lines(block: Block, color: bool) -> list[str]:
    """A part of the report as lines of a terminal."""
    if isinstance(block, str):
        return [block]
    if isinstance(block, TokenizedText):
        return [block.title, loss_highlighted_text(block.texts, block.weights, color)]
    largest = max(count for _, _, count in block.bars)
    lines = [block.title]
    for first, last, count in block.bars:
        lines.append(f"  {first:>9,} - {last:<9,} {'█' * round(WIDTH * count / largest):<{WIDTH}} {count:,}")
    return lines


# `megaswift data show --html FILE`: the report as one page that needs nothing else.
#
# Owns the page's markup. Its parts are `report.py`'s. Texts of rows are escaped, and the page allows no scripts.

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
