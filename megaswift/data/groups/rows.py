"""A query and its documents before tokens, and how their texts are made.

Owns `RetrievalExample` and what a task asks of a row's labels. Which columns a file has belongs to `formats/`, tokens
to `encode.py`. Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaswift.data.untokenized_sample import RowError, decode_json_cell, describe_value

ANY = "any"
PAIRED = "paired"
GRADED = "graded"
BINARY = "binary"
"""What a loss asks of a row: for rerankers documents with any labels; for embeddings a positive (and negatives), or two
texts with a number, or with 0 or 1."""
UNLABELED = (None, "")
TextOrPair = str | tuple[str, str]


@dataclass(frozen=True)
class Text:
    """One text, with an instruction of its own where the row has one."""

    text: str
    instruction: str | None = None


@dataclass(frozen=True)
class RetrievalExample:
    """A query with its documents: those that answer it first."""

    query: Text
    documents: tuple[Text, ...]
    values: tuple[float, ...]
    """How relevant each document is: 1 or 0, or the row's label."""
    labeled: bool = False
    """Whether the row itself has labels."""


@dataclass(frozen=True)
class GroupTexts:
    """Settings that turn rows into the texts that the model reads; plain values that travel to worker processes."""

    wants: str = ANY
    query_prompt: str = ""
    document_prompt: str = ""
    template: str = ""
    """For rerankers: the text of a query and a document, with {query}, {document} and {instruction}."""
    instruction: str = ""
    """The instruction of rows that have none, in `template`."""
    max_negatives: int | None = None
    """Negatives of a row that are read: the first ones."""
    cut: str = ""
    """`left` or `right`: the side on which texts beyond `max_length` tokens are cut; empty: they stay whole."""
    max_length: int = 0
    pairs: bool = False
    """For rerankers that are encoders: a query and a document are a pair of texts, without `template`."""

    def of(self, example: RetrievalExample) -> tuple[list[TextOrPair], list[float]]:
        """Return the texts of a row, or pairs of them, and a value for each; RowError where the loss cannot use it."""
        positives = sum(value > 0.5 for value in example.values)
        documents = list(zip(example.documents, example.values, strict=True))
        if self.max_negatives is not None and not example.labeled:
            documents = documents[: positives + self.max_negatives]
        if self.pairs:
            query = _prefixed(example.query, "")
            return [(query, _prefixed(d, "")) for d, _ in documents], [value for _, value in documents]
        if self.template:
            return [self._joined(example.query, d) for d, _ in documents], [value for _, value in documents]
        _check_labels(example, self.wants)
        texts: list[TextOrPair] = [_prefixed(example.query, self.query_prompt)]
        texts += [_prefixed(document, self.document_prompt) for document, _ in documents]
        return texts, [math.nan, *(value for _, value in documents)]

    def _joined(self, query: Text, document: Text) -> str:
        instruction = document.instruction or query.instruction or self.instruction
        words = {"{query}": query.text, "{document}": document.text, "{instruction}": instruction}
        return fill_template(self.template, words)


def fill_template(template: str, words: Mapping[str, str]) -> str:
    """Return the template with each placeholder replaced; what is filled in is not looked at again."""
    text = ""
    while template:
        found = min((n for n in words if n in template), key=template.index, default=None)
        if found is None:
            return text + template
        before, _, template = template.partition(found)
        text += before + words[found]
    return text


def _prefixed(text: Text, prompt: str) -> str:
    return f"{text.instruction} {text.text}" if text.instruction else prompt + text.text


def _check_labels(example: RetrievalExample, wants: str) -> None:
    count = len(example.documents)
    if wants == PAIRED:
        if example.labeled and example.values[0] != 1:
            raise RowError("label", f"{example.values[0]:g}", "1, or no label: this loss takes each pair as a positive")
        if sum(value > 0.5 for value in example.values) != 1:
            expected = "one; give a row for each"
            raise RowError("positive", f"{sum(value > 0.5 for value in example.values)} positives", expected)
    elif wants in (GRADED, BINARY):
        if not example.labeled:
            raise RowError("label", "missing", "a number: how similar the two texts are")
        if count != 1:
            raise RowError("negative", f"{count - 1} more texts", "two texts with a label, without negatives")
        if wants == BINARY and example.values[0] not in (0, 1):
            raise RowError("label", f"{example.values[0]:g}", "0 or 1")


def text_of(value: Any, column: str) -> Text:
    """Return the text in a cell; RowError where it is empty or none."""
    if not isinstance(value, str) or not value.strip():
        raise RowError(column, describe_value(value), "text")
    return Text(value)


def texts_of(value: Any, column: str) -> list[Text]:
    """Return the texts in a cell that holds one or a list of them; none where it is empty."""
    if value in (None, "", []):
        return []
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [text_of(one, f"{column}[{i}]") for i, one in enumerate(value)]
    return [text_of(value, column)]


def text_of_messages(value: Any, column: str) -> Text:
    """Return the text of a list of messages: one message, after a system message at most, which is the
    instruction."""
    if isinstance(value, str):
        value = decode_json_cell(value, column, "a list of messages")
    if not isinstance(value, Sequence) or not all(isinstance(m, Mapping) for m in value):
        raise RowError(column, describe_value(value), "a list of messages with role and content")
    system = [m for m in value if m.get("role") == "system"]
    others = [m for m in value if m.get("role") != "system"]
    if len(others) != 1 or len(system) > 1 or (system and value[0] is not system[0]):
        raise RowError(column, f"{len(value)} messages", "one message, or a system message and one")
    text = text_of(others[0].get("content"), f"{column}, content")
    return Text(text.text, text_of(system[0].get("content"), f"{column}, system").text if system else None)


def number_of(value: Any, column: str) -> float:
    """Return the number in a cell; RowError where it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RowError(column, describe_value(value), "a number")
    return number


def make_example(
    query: Text, positives: Sequence[Text], negatives: Sequence[Text], label: float | None = None
) -> RetrievalExample:
    """Return a row of positives and negatives, or of one document with a label."""
    if not positives:
        raise RowError("positive", "no text", "a text that answers the query")
    if label is not None and len(positives) + len(negatives) > 1:
        raise RowError("label", "a label of a row with several documents", "one document, or no label")
    values = (1.0,) * len(positives) + (0.0,) * len(negatives)
    if label is not None:
        values = (label,)
    return RetrievalExample(query, (*positives, *negatives), values, label is not None)
