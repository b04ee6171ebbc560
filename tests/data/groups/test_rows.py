"""Rows of embedding models and rerankers: formats, the texts that are made of them, and what refuses a row.

Covers: megaswift/data/formats/retrieval_messages.py, megaswift/data/formats/retrieval_columns.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from megaswift.data.formats import FORMATS, recognize_format
from megaswift.data.groups.rows import BINARY, GRADED, PAIRED, GroupTexts, RetrievalExample, fill_template
from megaswift.data.untokenized_sample import RowError
from megaswift.options.tasks import RETRIEVAL


def said(text: str, system: str | None = None, role: str = "user") -> list[dict[str, str]]:
    """One message, after a system message where there is one."""
    return [*([{"role": "system", "content": system}] if system else []), {"role": role, "content": text}]


def example(row: dict[str, Any], task: str = "embedding") -> RetrievalExample:
    """What a row means."""
    found = recognize_format(row, task).parse(row)
    assert isinstance(found, RetrievalExample)
    return found


GOOD: list[tuple[str, dict[str, Any], tuple[str, list[str], list[float], bool]]] = [
    (
        "messages + positive_messages",
        {
            "messages": said("q"),
            "positive_messages": [said("p", role="assistant")],
            "negative_messages": [said("n1"), said("n2")],
        },
        ("q", ["p", "n1", "n2"], [1, 0, 0], False),
    ),
    (
        "messages + positive_messages",
        {"messages": said("q"), "positive_messages": [said("p")], "label": 0.8, "negative_messages": None},
        ("q", ["p"], [0.8], True),
    ),
    (
        "query + response",
        {"query": "q", "response": "p", "rejected_response": ["n1", "n2"]},
        ("q", ["p", "n1", "n2"], [1, 0, 0], False),
    ),
    ("query + response", {"query": "q", "response": "p", "label": "0"}, ("q", ["p"], [0], True)),
    ("query + answer", {"query": "q", "answer": "p"}, ("q", ["p"], [1], False)),
    ("question + answer", {"question": "q", "answer": "p"}, ("q", ["p"], [1], False)),
    ("question + positive", {"question": "q", "positive": "p"}, ("q", ["p"], [1], False)),
    ("query + document", {"query": "q", "document": "p", "score": 1}, ("q", ["p"], [1], True)),
    (
        "anchor + positive",
        {"anchor": "q", "positive": "p", "negative_1": "n1", "negative_2": "n2"},
        ("q", ["p", "n1", "n2"], [1, 0, 0], False),
    ),
    (
        "query + positive",
        {"query": "q", "positive": ["p1", "p2"], "negative": ["n"], "id": 7},
        ("q", ["p1", "p2", "n"], [1, 1, 0], False),
    ),
    ("sentence1 + sentence2", {"sentence1": "q", "sentence2": "p", "score": 0.25}, ("q", ["p"], [0.25], True)),
    ("text1 + text2", {"text1": "q", "text2": "p", "label": True}, ("q", ["p"], [1], True)),
    (
        "query + documents",
        {"query": "q", "documents": ["a", "b"], "labels": [0, 2.5]},
        ("q", ["a", "b"], [0, 2.5], True),
    ),
]


@pytest.mark.parametrize(("name", "row", "meaning"), GOOD)
def test_rows(name: str, row: dict[str, Any], meaning: Any) -> None:
    for task in RETRIEVAL:
        assert recognize_format(row, task).name == name
        found = example(row, task)
        documents = [document.text for document in found.documents]
        assert (found.query.text, documents, list(found.values), found.labeled) == meaning


def test_every_registered_format_is_tried() -> None:
    assert {f.name for f in FORMATS if set(RETRIEVAL) & set(f.tasks)} == {name for name, _, _ in GOOD}


def test_these_formats_leave_other_tasks_alone() -> None:
    row = {"query": "q", "response": "p"}
    assert recognize_format(row, "sft").name == "query_response"
    with pytest.raises(RowError, match="positive_messages is for megaswift embedding"):
        recognize_format({"messages": said("q"), "positive_messages": []}, "sft")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"anchor": "q", "positive": " "}, "positive"),
        ({"anchor": "", "positive": "p"}, "anchor"),
        ({"anchor": "q", "positive": []}, "no text"),
        ({"anchor": "q", "positive": "p", "negative": ["n", 3]}, r"negative\[1\]"),
        ({"anchor": "q", "positive": "p", "negative": "n", "label": 1}, "several documents"),
        ({"anchor": "q", "positive": "p", "label": "high"}, "expected a number"),
        ({"messages": [*said("q"), *said("r")], "positive_messages": [said("p")]}, "2 messages"),
        ({"messages": said("q"), "positive_messages": said("p")}, "positive_messages"),
        ({"query": "q", "documents": ["a", "b"], "labels": [1]}, "one for each document"),
        ({"name": "q"}, "no format has these columns"),
    ],
)
def test_bad_rows(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError, match=words):
        example(row)


def test_prompts_and_instructions() -> None:
    texts = GroupTexts(PAIRED, query_prompt="Q: ", document_prompt="D: ", max_negatives=1)
    plain = {"anchor": "q", "positive": "p", "negative": ["n1", "n2"]}
    found, values = texts.of(example(plain))
    assert found == ["Q: q", "D: p", "D: n1"] and math.isnan(values[0]) and values[1:] == [1, 0]
    own = {"messages": said("q", "Find it."), "positive_messages": [said("p", "Keep it.")]}
    assert texts.of(example(own))[0] == ["Find it. q", "Keep it. p"]
    assert texts.of(example({"anchor": "q", "positive": "p", "system": "Find it."}))[0] == ["Find it. q", "D: p"]


@pytest.mark.parametrize(
    ("wants", "row", "words"),
    [
        (PAIRED, {"query": "q", "response": "p", "label": 0}, "takes each pair as a positive"),
        (PAIRED, {"query": "q", "positive": ["p1", "p2"]}, "2 positives"),
        (GRADED, {"query": "q", "response": "p"}, "missing"),
        (GRADED, {"query": "q", "response": "p", "negative": "n"}, "missing"),
        (BINARY, {"query": "q", "response": "p", "label": 0.5}, "expected 0 or 1"),
    ],
)
def test_labels_that_a_loss_cannot_use(wants: str, row: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError, match=words):
        GroupTexts(wants).of(example(row))


def test_the_text_of_a_reranker() -> None:
    template = "<{instruction}> {query} | {document} ."
    texts = GroupTexts(template=template, instruction="judge", max_negatives=1)
    row = {
        "messages": said("{document}"),
        "positive_messages": [said("a", "own")],
        "negative_messages": [said("b")] * 2,
    }
    assert texts.of(example(row, "reranker")) == (["<own> {document} | a .", "<judge> {document} | b ."], [1.0, 0.0])
    assert fill_template("{query}", {"{query}": "{document}", "{document}": "d"}) == "{document}"
