"""Columns of texts for embedding models and rerankers, as in the data sets of sentence-transformers and MTEB.

A query, a document that answers it, and documents that do not: (anchor, positive, negative), (query, positive,
negative), ms-swift's (query, response, rejected_response). Two texts with a label: (sentence1, sentence2, score). A
query with a list of documents and a label for each: (query, documents, labels).
"""

from __future__ import annotations

import re
from typing import Any

from megaswift.data.formats import FORMATS, Row, RowFormat
from megaswift.data.groups.rows import (
    UNLABELED,
    RetrievalExample,
    Text,
    make_example,
    number_of,
    text_of,
    texts_of,
)
from megaswift.data.untokenized_sample import RowError, decode_json_cell, describe_value
from megaswift.options.tasks import RETRIEVAL

LABELS = ("label", "score", "similarity_score", "labels")
NEGATIVE = re.compile(r"negatives?|negative_?\d+|rejected_response")


def _label(row: Row) -> float | None:
    name = next((name for name in LABELS if row.get(name) not in UNLABELED), None)
    return None if name is None else number_of(row[name], name)


def _instructed(row: Row, text: Text) -> Text:
    system = row.get("system")
    return text if system in UNLABELED else Text(text.text, text_of(system, "system").text)


def _read(query: str, document: str) -> Any:
    def parse(row: Row) -> RetrievalExample:
        negatives = [text for name in row if NEGATIVE.fullmatch(name) for text in texts_of(row[name], name)]
        return make_example(
            _instructed(row, text_of(row[query], query)), texts_of(row[document], document), negatives, _label(row)
        )

    return parse


def parse_list(row: Row) -> RetrievalExample:
    """Return a query with a label for each of its documents."""
    documents = texts_of(decode_json_cell(row["documents"], "documents", "a list of texts"), "documents")
    labels = decode_json_cell(row["labels"], "labels", "a list of numbers")
    if not isinstance(labels, list | tuple) or len(labels) != len(documents) or not documents:
        expected = f"a list of {len(documents)} numbers, one for each document"
        raise RowError("labels", describe_value(labels), expected)
    values = tuple(number_of(value, f"labels[{i}]") for i, value in enumerate(labels))
    query = _instructed(row, text_of(row["query"], "query"))
    return RetrievalExample(query, tuple(documents), values, labeled=True)


PAIRS_OF_COLUMNS = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("question", "positive"),
    ("query", "response"),
    ("query", "answer"),
    ("question", "answer"),
    ("query", "document"),
    ("sentence1", "sentence2"),
    ("text1", "text2"),
)
for _query, _document in PAIRS_OF_COLUMNS:
    FORMATS.register(
        f"{_query} + {_document}",
        RowFormat(
            f"{_query} + {_document}",
            (_query, _document),
            _read(_query, _document),
            ("negative", "label", "system"),
            tasks=RETRIEVAL,
            rank=-50,
            common=True,
        ),
    )
FORMATS.register(
    "query + documents",
    RowFormat(
        "query + documents", ("query", "documents", "labels"), parse_list, ("system",), RETRIEVAL, rank=-60, common=True
    ),
)
