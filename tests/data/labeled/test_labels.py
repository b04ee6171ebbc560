"""Labels of rows: what a row may write, and one clear message for what it may not.

Covers: megaswift/data/labeled/labels.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.data.labeled.labels import Classes, words_and_tags, written_classes
from megaswift.data.untokenized_sample import RowError
from megaswift.losses.options.classification import MULTI_LABEL, REGRESSION, SINGLE_LABEL

NAMES = {"good": 0, "bad": 1, "so so": 2}
SINGLE = Classes(3, {}, SINGLE_LABEL)
NAMED = Classes(3, NAMES, SINGLE_LABEL)
SEVERAL = Classes(3, NAMES, MULTI_LABEL)
ONE = Classes(1, {}, REGRESSION)
TWO = Classes(2, {}, REGRESSION)


@pytest.mark.parametrize(
    ("classes", "written", "label"),
    [
        (SINGLE, 2, (2.0,)),
        (SINGLE, True, (1.0,)),
        (SINGLE, "1", (1.0,)),  # of a CSV file
        (SINGLE, 1.0, (1.0,)),
        (NAMED, "so so", (2.0,)),
        (NAMED, 0, (0.0,)),
        (SEVERAL, [], (0.0, 0.0, 0.0)),
        (SEVERAL, [2, "good"], (1.0, 0.0, 1.0)),
        (SEVERAL, "[0, 1]", (1.0, 1.0, 0.0)),
        (SEVERAL, [0.0, 1.0, 1.0], (0.0, 1.0, 1.0)),  # transformers' form
        (ONE, 0.8, (0.8,)),
        (ONE, -3, (-3.0,)),
        (ONE, [0.5], (0.5,)),
        (TWO, [1.2, -0.6], (1.2, -0.6)),
        (TWO, "[1.2, -0.6]", (1.2, -0.6)),
        (ONE, "0.25", (0.25,)),
    ],
)
def test_a_label(classes: Classes, written: Any, label: tuple[float, ...]) -> None:
    assert classes.label_of_text({"label": written}) == label


@pytest.mark.parametrize(
    ("classes", "written", "message"),
    [
        (SINGLE, None, "nothing; expected the number of a class, 0 to 2"),
        (SINGLE, 3, "class 3; expected the number of a class, 0 to 2"),
        (SINGLE, -1, "class -1; expected the number of a class, 0 to 2"),
        (SINGLE, 0.5, "float 0.5; expected the number of a class, 0 to 2"),
        (SINGLE, "good", 'str "good"; expected the number of a class, 0 to 2'),
        (SINGLE, [1, 2], "several of a text are for --problem_type multi_label_classification"),
        (NAMED, "awful", 'str "awful"; expected one of good, bad, so so'),
        (SEVERAL, 1, "int 1; expected a list of classes, each one of good, bad, so so"),
        (SEVERAL, [0, 3], "class 3; expected"),
        (SEVERAL, [1, 0, 1], "which names a class twice; expected a list of classes"),
        (SEVERAL, [1, 0, 1], "or 0.0 or 1.0 for each of the 3 classes"),
        (ONE, "warm", 'str "warm"; expected a number'),
        (ONE, True, "bool true; expected a number"),
        (ONE, float("nan"), "float NaN; expected a number"),
        (ONE, [1.0, 2.0], "list [1.0, 2.0]; expected a number"),
        (TWO, 1.0, "float 1.0; expected a list of 2 numbers"),
    ],
)
def test_a_label_of_another_kind(classes: Classes, written: Any, message: str) -> None:
    with pytest.raises(RowError, match="^column 'label': ") as caught:
        classes.label_of_text({"label": written})
    assert message in str(caught.value)


def test_words_and_their_tags() -> None:
    found = words_and_tags({"words": ["a", "b"], "ner_tags": [0, -100], "id": 7})
    assert (found.words, found.tags, found.column) == (["a", "b"], [0, -100], "ner_tags")
    found = words_and_tags({"tokens": '["a", "b"]', "tags": '["O", "B"]', "ner_tags": [1, 1]})
    assert (found.words, found.tags) == (["a", "b"], ["O", "B"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "tags": [0]}, "column 'tags': 1 tags for 2 words; expected as many tags as tokens"),
        ({"tokens": ["a", " "], "tags": [0, 0]}, "expected a list of words, none of them empty"),
        ({"tokens": [], "tags": []}, "expected a list of words, none of them empty"),
        ({"tokens": "a b", "tags": [0]}, "expected a list in one of the columns tokens, words"),
        ({"tokens": ["a"]}, "column 'tags': nothing; expected a list in one of the columns tags, ner_tags, labels"),
    ],
)
def test_words_without_their_tags(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as caught:
        words_and_tags(row)
    assert message in str(caught.value)


def test_classes_as_they_are_written() -> None:
    assert written_classes({"label": "good"}, False) == ["good"]
    assert written_classes({"label": ["good", 2]}, False) == ["good", 2]
    assert written_classes({"label": '["good"]'}, False) == ["good"]
    assert written_classes({}, False) == []
    assert written_classes({"tokens": ["a", "b"], "tags": ["O", -100]}, True) == ["O"]
