"""The labels of rows for classifiers: a class, several classes or numbers of a text, or a class of each word.

Owns what a row may write and what a label becomes: a class its number, several classes 0 or 1 for each, numbers
themselves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaswift.data.untokenized_sample import RowError, decode_json_cell, describe_value
from megaswift.losses.options.classification import MULTI_LABEL, REGRESSION

LABEL = "label"
TAGS = ("tags", "ner_tags", "labels")
"""Columns of words' tags; the first that a row has is read."""
WORDS = ("tokens", "words")
IGNORED = -100
"""The tag of a word without a label, as in transformers."""


@dataclass(frozen=True)
class Classes:
    """The classes of a run, and what the label of a text is."""

    count: int
    """The number of classes, or of numbers of a text."""
    names: Mapping[str, int] = field(default_factory=dict)
    """The number of each name; empty where classes have no names."""
    problem_type: str = ""

    def label_of_text(self, row: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the label of a text: a class as its number, several classes as 0 or 1 for each, or numbers.

        Raises:
            RowError: The row has no label, or one of another kind than the run's.
        """
        value = row.get(LABEL)
        if value is None:
            raise RowError(LABEL, "nothing", self._expected)
        if self.problem_type == REGRESSION:
            return self._numbers(value)
        if self.problem_type == MULTI_LABEL:
            return self._several(value)
        if isinstance(value, list | tuple):
            fix = "a single class; several of a text are for --problem_type multi_label_classification"
            raise RowError(LABEL, describe_value(value), fix)
        return (float(self.number(value, LABEL)),)

    def number(self, value: Any, column: str) -> int:
        """Return the number of a class that a row writes as its number or name."""
        if isinstance(value, str) and value in self.names:
            return self.names[value]
        number = whole_number(value)
        if number is None:
            raise RowError(column, describe_value(value), self._expected)
        if not 0 <= number < self.count:
            raise RowError(column, f"class {number}", self._expected)
        return number

    @property
    def _expected(self) -> str:
        if self.problem_type == REGRESSION:
            return "a number" if self.count == 1 else f"a list of {self.count} numbers"
        known = f"the number of a class, 0 to {self.count - 1}"
        if self.names:
            shown = [*self.names][:8]
            known = f"one of {', '.join(shown)}{', ...' if len(self.names) > len(shown) else ''}"
        return f"a list of classes, each {known}" if self.problem_type == MULTI_LABEL else known

    def _several(self, value: Any) -> tuple[float, ...]:
        """0 or 1 for each class, from a list of classes, or of 0.0 and 1.0 for each."""
        listed = decode_json_cell(value, LABEL, self._expected)
        if not isinstance(listed, list | tuple):
            raise RowError(LABEL, describe_value(value), self._expected)
        if listed and len(listed) == self.count and all(isinstance(one, float) and one in (0, 1) for one in listed):
            return tuple(listed)
        numbers = [self.number(one, LABEL) for one in listed]
        if len(set(numbers)) < len(numbers):
            rule = f"{describe_value(value)}, which names a class twice"
            raise RowError(LABEL, rule, f"{self._expected}; or 0.0 or 1.0 for each of the {self.count} classes")
        return tuple(float(number in numbers) for number in range(self.count))

    def _numbers(self, value: Any) -> tuple[float, ...]:
        listed = value
        if isinstance(value, str) and value.lstrip().startswith("["):
            listed = decode_json_cell(value, LABEL, self._expected)
        listed = listed if isinstance(listed, list | tuple) else [listed]
        numbers = [_number(one) for one in listed]
        found = [number for number in numbers if number is not None]
        if len(found) < len(numbers) or len(numbers) != self.count:
            raise RowError(LABEL, describe_value(value), self._expected)
        return tuple(found)


def whole_number(value: Any) -> int | None:
    """Return the number of a class that is written as a number, a truth value, or a number's text in a flat file; None
    for anything else."""
    if isinstance(value, str):
        text = value.strip()
        return int(text) if text.isascii() and text.removeprefix("-").isdigit() else None
    if isinstance(value, int):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class TaggedWords:
    """The words of a row and the label of each as it is written."""

    words: list[str]
    tags: list[Any]
    column: str
    """The column of the tags."""


def words_and_tags(row: Mapping[str, Any]) -> TaggedWords:
    """Return a row's words and their tags, one for each.

    Raises:
        RowError: The row has no words or tags, or not as many of both.
    """
    found = [next((name for name in names if row.get(name) is not None), names[0]) for names in (WORDS, TAGS)]
    words, tags = (_list(row, name) for name in found)
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise RowError(found[0], describe_value(words), "a list of words, none of them empty")
    if len(words) != len(tags):
        raise RowError(found[1], f"{len(tags)} tags for {len(words)} words", f"as many tags as {found[0]}")
    return TaggedWords(words, tags, found[1])


def _list(row: Mapping[str, Any], column: str) -> list[Any]:
    value = row.get(column)
    names = WORDS if column in WORDS else TAGS
    expected = f"a list in one of the columns {', '.join(names)} (--columns OTHER={names[0]} renames another)"
    listed = decode_json_cell(value, column, expected)
    if not isinstance(listed, list | tuple):
        raise RowError(column, describe_value(value), expected)
    return list(listed)


def written_classes(row: Mapping[str, Any], tokens: bool) -> Sequence[Any]:
    """Return the classes that a row writes, as they are: those of its words, or of its text."""
    if tokens:
        return [tag for tag in words_and_tags(row).tags if tag != IGNORED]
    value = row.get(LABEL)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = json.loads(value)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
