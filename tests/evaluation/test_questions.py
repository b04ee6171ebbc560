"""Rows of files of questions; a row that cannot be used is named by its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.data.untokenized_sample import RowError
from megaswift.errors import DataError
from megaswift.evaluation.questions import question_of, read_questions
from tests.evaluation.local_tasks import write_rows

USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("row", "kind", "right"),
    [
        ({"question": "q", "answer": "a"}, "answer", ("a",)),
        ({"query": "q", "response": "a"}, "answer", ("a",)),
        ({"question": "q", "answers": ["a", "b"]}, "answer", ("a", "b")),
        ({"question": "q", "answer": 4}, "answer", ("4",)),
        ({"messages": [USER], "answer": "a"}, "answer", ("a",)),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "answer", ("a",)),
        ({"question": "q", "choices": ["x", "y"], "answer": 1}, "choice", 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "B"}, "choice", 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "y"}, "choice", 1),
        ({"question": "q", "choices": ["1", "0"], "answer": "0"}, "choice", 1),  # the text, not the number
        ({"question": "q", "A": "x", "B": "y", "C": "", "answer": "A"}, "choice", 0),
        ({"text": "t"}, "text", "t"),
    ],
)
def test_rows(row: dict[str, Any], kind: str, right: Any) -> None:
    question = question_of(row)
    assert question.kind == kind
    assert {"answer": question.references, "choice": question.label, "text": question.text}[kind] == right
    assert kind == "text" or question.messages == (USER,)


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"question": "q"}, "answer"),
        ({"question": " ", "answer": "a"}, "question"),
        ({"question": "q", "answer": {"a": 1}}, "answer"),
        ({"question": "q", "answers": []}, "answers"),
        ({"question": "q", "choices": ["x"], "answer": 0}, "choices"),
        ({"question": "q", "choices": ["x", "y"], "answer": 2}, "answer"),
        ({"question": "q", "choices": ["x", "y"], "answer": True}, "answer"),
        ({"question": "q", "A": "x", "B": "y", "answer": "C"}, "answer"),
        ({"messages": [{"role": "user"}], "answer": "a"}, "messages[0]"),
        ({"messages": [], "answer": "a"}, "messages"),
        ({"text": ""}, "row"),
        ({"other": 1}, "row"),
    ],
)
def test_rows_that_cannot_be_used(row: dict[str, Any], column: str) -> None:
    with pytest.raises(RowError) as caught:
        question_of(row)
    assert caught.value.column == column


def test_a_wrong_row_is_named_by_its_line(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a"}, {"question": "q"}, {"text": "t"}]
    file = write_rows(tmp_path / "q.jsonl", rows)
    with pytest.raises(DataError) as caught:
        read_questions(str(file))
    assert f"{file}:2: column answer: nothing" in str(caught.value)
    assert f"{file}:3: column row: a plain text; expected a question with an answer" in str(caught.value)


def test_a_table_of_letters(tmp_path: Path) -> None:
    """EvalScope's general_mcq."""
    file = tmp_path / "mcq.csv"
    file.write_text("id,question,A,B,C,D,answer\n1,two and two,3,4,5,6,B\n2,one,1,2,,,A\n")
    first, second = read_questions(str(file))
    assert (first.choices, first.label) == (("3", "4", "5", "6"), 1) and second.choices == ("1", "2")


def test_first_rows_only(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "q.jsonl", [{"text": str(i)} for i in range(9)])
    assert len(read_questions(f"{file}#4")) == 4
