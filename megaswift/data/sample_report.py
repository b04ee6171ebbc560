"""The parts of `megaswift data show`'s report, and how they look in a terminal: samples as tokens with their loss mask,
histograms, and lines of text.

Owns the parts and their text. What is in a report belongs to `show_samples.py`, the page to `sample_report_page.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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
