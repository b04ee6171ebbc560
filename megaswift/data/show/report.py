"""The parts of `megaswift data show`'s report, and how they look in a terminal: samples as tokens with their loss mask,
histograms, and lines of text.

Owns the parts and their text. What is in a report belongs to `samples.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from megaswift.data.token_bytes import bytes_of_stored_token

if TYPE_CHECKING:
    import numpy as np


GREEN = "\033[1;32m"
DIM = "\033[2m"
OFF = "\033[0m"
CLASSES = 12
"""Bars of a histogram."""
WIDTH = 40
"""Characters of its longest bar."""


BROKEN = "\ufffd"
"""What stands in a decoded text for bytes that are no character."""


@dataclass(frozen=True)
class TokenText:
    """A token as text, or several tokens that share a character."""

    text: str
    weight: float
    """Loss weight of the token, or of each."""
    tokens: int = 1


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a document."""

    title: str
    tokens: Sequence[TokenText]


@dataclass(frozen=True)
class Histogram:
    """Numbers in equal classes."""

    title: str
    bars: tuple[tuple[int, int, int], ...]
    """(first value, last value, how many) of each class."""


@dataclass(frozen=True)
class Sample:
    """All that the report has of one sample."""

    parts: tuple[str | TokenizedText, ...]


Block = str | Sample | Histogram


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


def token_texts(tokenizer: Any, ids: Sequence[int], weights: Sequence[float]) -> list[TokenText]:
    """Return tokens as texts, line ends shown as ⏎.

    Tokens that share a character and have equal weights are one text: a character of several bytes may be split over
    tokens. Bytes of a character that is cut off, and of one whose tokens differ in weight, are written as \\xe4.

    Args:
        tokenizer: A tokenizer of transformers.
        ids: Numbers of the tokens.
        weights: Their loss weights.
    """
    shown: list[TokenText] = []
    position = 0
    while position < len(ids):
        text = tokenizer.decode([ids[position]], clean_up_tokenization_spaces=False)
        count = 1
        if BROKEN in text:
            text, count = _shared_characters(tokenizer, ids, weights, position)
        shown.append(TokenText(text.replace("\n", "⏎"), weights[position], count))
        position += count
    return shown


def _shared_characters(tokenizer: Any, ids: Sequence[int], weights: Sequence[float], begin: int) -> tuple[str, int]:
    """The text of the token at `begin` with those behind it that its last character needs, and their number; of a
    character that is not whole, the token alone."""
    raw = b""
    for end in range(begin, len(ids)):
        part = bytes_of_stored_token(tokenizer.convert_ids_to_tokens(ids[end]))
        if part is None or weights[end] != weights[begin]:
            break
        raw += part
        try:
            return raw.decode(), end + 1 - begin
        except UnicodeDecodeError as error:
            if error.end < len(raw) or error.reason != "unexpected end of data":
                break
    stored = tokenizer.convert_ids_to_tokens(ids[begin])
    alone = bytes_of_stored_token(stored)
    return (str(stored) if alone is None else alone.decode(errors="backslashreplace")), 1


def fold_repeats(tokens: Sequence[TokenText]) -> list[TokenText]:
    """Return the tokens with long runs of one token without loss, as images have them, as one: `<image> x 64`."""
    folded: list[TokenText] = []
    for _, group in groupby(tokens):
        run = list(group)
        many = len(run) > 3 and not run[0].weight
        folded += [TokenText(f"{run[0].text} x {len(run)}", 0)] if many else run
    return folded


def loss_highlighted_text(tokens: Sequence[TokenText], color: bool) -> str:
    """Return the tokens of one sample for a terminal.

    Runs with loss are green, or in brackets, after their weight where it is not 1; a text of several tokens has their
    number behind it: `你(2)`.
    """
    out = []
    for weight, group in groupby(tokens, key=lambda token: token.weight):
        before = "" if weight in (0, 1) else f"{weight:g} x: "
        texts = [f"{token.text}({token.tokens})" if token.tokens > 1 else token.text for token in group]
        run = before + "|".join(texts)
        if color:
            out.append(f"{GREEN if weight else DIM}{run}{OFF}")
        else:
            out.append(f"[{run}]" if weight else run)
    return ("|" if color else " ").join(out).replace("⏎", "⏎\n")


def block_lines(block: Block, color: bool) -> list[str]:
    """A part of the report as lines of a terminal."""
    if isinstance(block, str):
        return [block]
    if isinstance(block, Sample):
        return [line for part in block.parts for line in _part_lines(part, color)]
    largest = max(count for _, _, count in block.bars)
    lines = [block.title]
    for first, last, count in block.bars:
        lines.append(f"  {first:>9,} - {last:<9,} {'█' * round(WIDTH * count / largest):<{WIDTH}} {count:,}")
    return lines


def _part_lines(part: str | TokenizedText, color: bool) -> list[str]:
    return [part] if isinstance(part, str) else [part.title, loss_highlighted_text(part.tokens, color)]
