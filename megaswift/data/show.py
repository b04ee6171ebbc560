"""`megaswift data show`: samples as tokens with their loss mask, lengths and packing. The first thing to look at when training goes wrong.

Owns this command's text. It reads with the very same code as training, so what it shows is what is trained.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megaswift.config import load
from megaswift.data.build import documents
from megaswift.data.collate import Shape
from megaswift.data.documents import Documents
from megaswift.data.loader import make_rows
from megaswift.errors import DataError, Problem

USAGE = """\
megaswift data show DATASET... --model DIR [options]

Samples as tokens; tokens that carry loss are green (in [brackets] where there is no colour), `|` parts tokens. Then lengths and
packing. Takes the options of the section `data` (--max_length, --packing, --columns, --chat_template, --loss_scale, ...), and

  --samples N   samples to show (default 3)
  --first N     number of the first one, from 0 (default 0)
  --task pt     plain text instead of conversations (default sft)
"""
GREEN, DIM, OFF = "\033[1;32m", "\033[2m", "\033[0m"
BARS = 12


def _own_options(argv: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """(our own options, data sets, what the configuration reads)."""
    own, datasets, rest = {"samples": "3", "first": "0", "task": "sft"}, [], []
    words = [w for a in argv for w in (a.split("=", 1) if a.startswith("--") and a.partition("=")[0].lstrip("-") in own else [a])]
    leading = True
    while words:
        word = words.pop(0)
        if word.lstrip("-") in own and word.startswith("--") and words:
            own[word[2:]] = words.pop(0)
        elif leading and not word.startswith("-") and not word.endswith((".yaml", ".yml")):
            datasets.append(word)
        else:
            leading = False
            rest.append(word)
    return own, datasets, rest


def _number(own: dict[str, str], name: str) -> int:
    if not own[name].isdigit():
        raise DataError(Problem(f"--{name} {own[name]}", "is not a whole number", f"--{name} 3"))
    return int(own[name])


def coloured(out: TextIO) -> bool:
    """Colour only where someone looks: a terminal, and no NO_COLOR."""
    return out.isatty() and not os.environ.get("NO_COLOR")


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token's text, line ends shown as ⏎; bytes of a character that is spread over several tokens as they are stored."""
    texts = []
    for i in ids:
        text = tokenizer.decode([i], clean_up_tokenization_spaces=False)
        text = str(tokenizer.convert_ids_to_tokens(i)) if "\ufffd" in text else text
        texts.append(text.replace("\n", "⏎"))
    return texts


def sample_text(texts: Sequence[str], mask: Sequence[int], colour: bool) -> str:
    """The tokens of one sample; runs with loss in green, or in brackets."""
    out, at = [], 0
    while at < len(texts):
        end = at
        while end < len(texts) and bool(mask[end]) == bool(mask[at]):
            end += 1
        run = "|".join(texts[at:end])
        if colour:
            out.append(f"{GREEN if mask[at] else DIM}{run}{OFF}")
        else:
            out.append(f"[{run}]" if mask[at] else run)
        at = end
    return ("|" if colour else " ").join(out).replace("⏎", "⏎\n")


def histogram(values: np.ndarray, title: str, width: int = 40) -> list[str]:
    """Text bars over at most BARS equal classes."""
    low, high = int(values.min()), int(values.max())
    step = max(1, -(-(high - low + 1) // BARS))
    counts = np.bincount((values - low) // step)
    lines = [f"{title}: {len(values):,} in all, {low:,} to {high:,}, mean {values.mean():,.1f}, median {np.median(values):,.0f}"]
    for i, count in enumerate(counts.tolist()):
        first = low + i * step
        lines.append(f"  {first:>9,} - {min(high, first + step - 1):<9,} {'█' * round(width * count / counts.max()):<{width}} {count:,}")
    return lines


def summary(docs: Documents, max_length: int) -> list[str]:
    """Counts, lengths, and how rows would be packed."""
    tokens, labels = int(docs.length.sum()), int(docs.labels.sum())
    happened = ", ".join(f"{v:,} {k}" for k, v in docs.counted.items() if k != "rows" and v)
    lines = [f"{docs.counted['rows']:,} rows{f' ({happened})' if happened else ''}, {tokens:,} tokens, {labels:,} carry loss "
             f"({100 * labels / tokens:.1f}%)", "", *histogram(docs.length, "tokens a sample"), ""]
    rows = make_rows(docs, True, max_length, Shape())
    assert rows.packing is not None
    filled = np.add.reduceat(docs.length[rows.packing.documents], rows.packing.offsets[:-1])
    plain = 100 * tokens / (len(docs) * int(docs.length.max()))
    lines.append(f"packed into {len(rows):,} rows of {max_length:,}: {100 * tokens / (len(rows) * max_length):.2f}% filled "
                 f"(one sample a row, padded to the longest: {plain:.1f}%)")
    return lines + histogram(np.diff(rows.packing.offsets), "samples a packed row") + histogram(filled, "tokens a packed row")


def main(argv: Sequence[str]) -> int:
    """Show samples and statistics of the data sets named in `argv`."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="")
        return 0 if argv else 2
    own, datasets, rest = _own_options(argv)
    cfg = load(own["task"], [*rest, *(["--dataset", *datasets] if datasets else [])])
    if cfg.model.model is None:
        raise DataError(Problem("--model", "is not given; its tokenizer decides what the samples become", "--model DIR"))
    from transformers import AutoTokenizer
    if not Path(cfg.model.model).is_dir():
        raise DataError(Problem(f"--model {cfg.model.model}", "is no folder here", "a folder with a tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.model, trust_remote_code=cfg.model.trust_remote_code)
    docs, _ = documents(cfg.data, cfg.train, tokenizer, cfg.task)
    out, first = sys.stdout, _number(own, "first")
    for i in range(first, min(len(docs), first + _number(own, "samples"))):
        ids, mask = docs.read(i)
        print(f"--- sample {i} (row {docs.sample[i]}): {len(ids)} tokens, {int(docs.labels[i])} carry loss", file=out)
        print(sample_text(pieces(tokenizer, ids.tolist()), mask.tolist(), coloured(out)) + "\n", file=out)
    print("\n".join(summary(docs, cfg.data.max_length)), file=out)
    return 0
