"""Encodes rows of a query and its documents as tokens, as sentence-transformers does: each text by the tokenizer with
its own special tokens, among them the end that some models expect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from megaswift.data.encode.rows import (
    BATCH,
    SHOWN,
    EncodedRows,
    EncodeSpec,
    RowEncoder,
    malformed_row_problem,
    reject_lone_surrogates,
)
from megaswift.data.formats import recognize_format
from megaswift.data.groups.rows import RetrievalExample, TextOrPair
from megaswift.data.row_counters import CUT_TEXTS
from megaswift.data.sources.files import FilePart
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.tokenizer import backend_tokenizer_from_json
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import Problem

Group = tuple[list[tuple[np.ndarray, np.ndarray]], list[float]]
"""The tokens of each text of a row (int32 [n]) with a mask (uint8 [n]), and a value for each."""


class GroupEncoder:
    """Turns located rows into groups of documents."""

    def __init__(self, spec: EncodeSpec) -> None:
        assert spec.groups is not None
        self.spec = spec
        self.texts = spec.groups
        self._rows = RowEncoder(spec)
        self._tokenizer = backend_tokenizer_from_json(spec.tokenizer)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = spec.splits_special_tokens
        _, _, behind = self.texts.template.rpartition("{document}")
        self._behind = self._tokenizer.encode(behind, add_special_tokens=False).ids + self._end()
        """The tokens behind a document, which stay where the document is cut."""

    def _end(self) -> list[int]:
        """The special tokens that the tokenizer puts behind a text."""
        encoded = self._tokenizer.encode("x")
        last = max(i for i, special in enumerate(encoded.special_tokens_mask) if not special)
        return list(encoded.ids[last + 1 :])

    def example(self, row: Any) -> tuple[list[TextOrPair], list[float]]:
        """Return the texts of a row and their values."""
        named = self._rows.named(row)
        found = recognize_format(named, self.spec.task).parse(named)
        assert isinstance(found, RetrievalExample)
        texts, values = self.texts.of(found)
        for text in texts:
            for part in (text,) if isinstance(text, str) else text:
                reject_lone_surrogates(part)
        return texts, values

    def tokens(self, text: TextOrPair) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text, int32 [n], and a mask uint8 [n], which for an encoder tells the texts of a pair
        apart."""
        if self._rows.encoder is not None:
            return self._rows.encoder.encode([text])[0]
        assert isinstance(text, str), "only encoders read pairs"
        ids = self._tokenizer.encode(text).ids
        most = self.texts.max_length
        if self.texts.cut and len(ids) > most:
            # What the tokenizer appends stays, and of a reranker's text what goes on behind the document
            ids = ids[: max(0, most - len(self._behind))] + self._behind
        return np.array(ids, dtype=np.int32), np.ones(len(ids), np.uint8)

    def read(self, rows: Iterable[tuple[str, LocatedRow]]) -> Iterator[Group | RowError]:
        """Return each row's group, in order, or what is wrong with it."""
        rows = iter(rows)
        while batch := list(islice(rows, BATCH)):
            for _, located in batch:
                try:
                    texts, values = self.example(located.row)
                    tokens = [self.tokens(text) for text in texts]
                    if not all(len(ids) for ids, _ in tokens):
                        raise RowError("(text)", "a text without tokens", "text")
                    yield tokens, values
                except RowError as error:
                    yield error

    def encode(self, rows: Iterable[tuple[str, LocatedRow]]) -> EncodedRows:
        """Encode all rows at once; those that are malformed are counted, and the first few told."""
        documents: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        lines: list[int] = []
        values: list[float] = []
        sizes: list[int] = []
        problems: list[Problem] = []
        bad = 0
        encoder = self._rows.encoder
        cut_texts = cut_rows = 0
        located_rows = list(rows)
        for (path, located), found in zip(located_rows, self.read(located_rows), strict=True):
            if isinstance(found, RowError):
                bad += 1
                if len(problems) < SHOWN:
                    problems.append(malformed_row_problem(path, located.line, found))
                continue
            tokens, labels = found
            if encoder is not None and encoder.cut > cut_texts:
                cut_texts = encoder.cut
                cut_rows += 1
            documents += [ids for ids, _ in tokens]
            masks += [mask for _, mask in tokens]
            values += labels
            lines += [located.line] * len(tokens)
            sizes.append(len(tokens))
        return EncodedRows(
            np.concatenate(documents) if documents else np.zeros(0, np.int32),
            np.concatenate(masks) if masks else np.zeros(0, np.uint8),
            np.array([len(d) for d in documents], dtype=np.int64),
            np.array(lines, dtype=np.int64),
            problems,
            bad,
            np.array(values, dtype=np.float32),
            sizes=np.array(sizes, dtype=np.int64),
            notes={CUT_TEXTS: cut_rows} if cut_rows else {},
        )

    def encode_part(self, part: FilePart) -> EncodedRows:
        """Encode the rows of a part of a file."""
        return self.encode((part.path, located) for located in part.rows())
