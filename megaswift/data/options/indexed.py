"""Megatron-LM's indexed data in `--dataset`: which entries name them, and the options that do nothing with them.

`--dataset corpus_text_document` (PREFIX.bin and PREFIX.idx), or a blend: `--dataset 0.3 first 0.7 second`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaswift.config.rule import ONE_OF, ConflictingOptions
from megaswift.config.sections import Sections
from megaswift.data.options.data import split_shares

SUFFIXES = (".idx", ".bin")
ALTERNATE = "a blend has a weight above 0 before each prefix: 0.3 first 0.7 second"


@dataclass(frozen=True)
class IndexedBlend:
    """Indexed data sets and how often each gives a sample."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """None: as many samples as each has."""


def _prefix(entry: str) -> str | None:
    """The PREFIX of an entry whose index is on this machine, or that names one of the two files."""
    path = Path(entry).expanduser()
    if path.suffix in SUFFIXES:
        return str(path.with_suffix(""))
    return str(path) if Path(f"{path}.idx").is_file() else None


def _weight(entry: str) -> float | None:
    try:
        return float(entry)
    except ValueError:
        return None


def parse_indexed_blend(entries: Sequence[str]) -> IndexedBlend | None:
    """The blend that `--dataset` names; None for other data. ValueError, with the reason, for entries of both kinds and
    for weights and prefixes that do not alternate. Where they do, the files need not be there."""
    prefixes = [_prefix(entry) for entry in entries]
    weights = [None if prefix else _weight(entry) for entry, prefix in zip(entries, prefixes, strict=True)]
    if len(entries) > 1 and len(entries) % 2 == 0 and all(w is not None for w in weights[::2]):
        named = tuple(prefix or entry for entry, prefix in zip(entries[1::2], prefixes[1::2], strict=True))
        given = tuple(w for w in weights[::2] if w is not None)
        if any(w is not None for w in weights[1::2]) or not 0 < min(given) <= max(given) < math.inf:
            raise ValueError(ALTERNATE)
        return IndexedBlend(named, given)
    if not any(prefixes):
        return None
    if any(w is not None for w in weights):
        raise ValueError(ALTERNATE)
    other = next((entry for entry, prefix in zip(entries, prefixes, strict=True) if prefix is None), None)
    if other is not None:
        raise ValueError(f"{other} is no indexed data ({other}.idx does not exist), as the other entries are")
    return IndexedBlend(tuple(prefix for prefix in prefixes if prefix), None)


def reads_indexed_data(c: Sections) -> bool:
    """Whether the run's training data are indexed."""
    return _names_indexed_data(c.data.dataset)


def _names_indexed_data(entries: Sequence[str]) -> bool:
    try:
        return parse_indexed_blend(entries) is not None
    except ValueError:
        return True


def _broken_blend(entries: Sequence[str]) -> str:
    try:
        parse_indexed_blend(entries)
    except ValueError as error:
        return str(error)
    return ""


INDEXED_DATA_CLASHES: tuple[ConflictingOptions, ...] = (
    ConflictingOptions(
        ("dataset",), lambda c: c.task != "pt" and reads_indexed_data(c), "indexed data are for pt", "megaswift pt"
    ),
    ConflictingOptions(
        ("dataset",),
        lambda c: bool(_broken_blend(c.data.dataset)),
        "names indexed data wrongly: give prefixes alone, or a weight before each: 0.3 first 0.7 second",
        "--dataset PREFIX, or --dataset WEIGHT PREFIX WEIGHT PREFIX",
    ),
    ConflictingOptions(
        ("streaming", "dataset"),
        lambda c: c.data.streaming and reads_indexed_data(c),
        "indexed data are read on demand anyway",
        "--streaming false",
    ),
    ConflictingOptions(
        ("shuffle", "dataset"),
        lambda c: not c.data.shuffle and reads_indexed_data(c),
        "Megatron-Core's order of indexed data is a shuffled one",
        "leave it out",
    ),
    ConflictingOptions(
        ("split_dataset_ratio", "dataset"),
        lambda c: c.data.split_dataset_ratio > 0 and reads_indexed_data(c),
        "indexed data are divided by data_split",
        "--data_split 99,1,0",
    ),
    ConflictingOptions(
        ("data_split",),
        lambda c: c.data.data_split is not None and split_shares(c.data.data_split) is None,
        "is not one to three shares of at least 0, the first above 0",
        "--data_split 99,1,0",
    ),
    ConflictingOptions(
        ("data_split", "val_dataset"),
        lambda c: c.data.evaluation_share > 0 and c.data.val_dataset,
        "conflicts with val_dataset: evaluation data is already given",
        ONE_OF,
    ),
    ConflictingOptions(
        ("val_dataset", "dataset"),
        lambda c: bool(c.data.val_dataset) and reads_indexed_data(c) != _names_indexed_data(c.data.val_dataset),
        "must be indexed data where dataset is, and only there",
        "--val_dataset PREFIX",
    ),
    ConflictingOptions(
        ("val_dataset",),
        lambda c: bool(_broken_blend(c.data.val_dataset)),
        "names indexed data wrongly: give prefixes alone, or a weight before each: 0.3 first 0.7 second",
        "--val_dataset PREFIX",
    ),
    ConflictingOptions(
        ("reset_position_ids", "reset_attention_mask", "dataset"),
        lambda c: reads_indexed_data(c) and c.data.reset_position_ids and not c.data.reset_attention_mask,
        "positions begin anew only where attention does",
        "--reset_attention_mask true",
    ),
    ConflictingOptions(
        ("tp_comm_overlap", "reset_attention_mask", "dataset"),
        lambda c: c.parallel.tp_comm_overlap and c.data.reset_attention_mask and reads_indexed_data(c),
        "needs rows of one length; with documents apart it differs from row to row",
        "--reset_attention_mask false",
    ),
    *(
        ConflictingOptions(
            (name, "dataset"),
            lambda c, name=name: getattr(c.data, name) is False and not reads_indexed_data(c),  # type: ignore[misc]
            "attention and positions stay within a document, except for Megatron-LM's indexed data",
            "leave it out",
        )
        for name in ("reset_position_ids", "reset_attention_mask")
    ),
    ConflictingOptions(
        ("eod_mask_loss", "dataset"),
        lambda c: c.data.eod_mask_loss and not reads_indexed_data(c),
        "the token after a document's end is trained on only in Megatron-LM's indexed data",
        "leave it out",
    ),
)
