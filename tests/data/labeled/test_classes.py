"""Classes that the rows name: found, sorted, and asked for where the options have to say them.

Covers: megaswift/data/labeled/classes.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.data.labeled.classes import class_names_in_rows
from megaswift.errors import DataError
from tests.data.makers import config, jsonl


def found(tmp_path: Path, labels: list[Any], tokens: bool = False, **options: Any) -> tuple[str, ...]:
    rows = [{"tokens": ["a"], "tags": [one]} if tokens else {"text": "a", "y": one} for one in labels]
    columns = {} if tokens else {"columns": {"y": "label"}}
    data = jsonl(tmp_path / "d.jsonl", rows)
    task = "token_cls" if tokens else "seq_cls"
    return class_names_in_rows(config(tmp_path, data, task, **columns, **options).data, tokens)


def test_names(tmp_path: Path) -> None:
    assert found(tmp_path, ["b", "a", "b", ["c", "a"]]) == ("a", "b", "c")
    assert found(tmp_path, ["O", "B-x", "I-x"], tokens=True) == ("B-x", "I-x", "O")
    assert found(tmp_path, ["a", "b"], num_labels=2) == ("a", "b")
    assert found(tmp_path, [1, 0], num_labels=2) == () and found(tmp_path, ["1", "0"], num_labels=2) == ()


@pytest.mark.parametrize(
    ("labels", "options", "what", "fix"),
    [
        ([0, 2, 1], {}, "the rows name classes by numbers, of which the largest is 2", "--num_labels 3"),
        (["0", "4"], {}, "of which the largest is 4", "--num_labels 5"),
        ([None], {}, "no row has a class", "--columns OTHER=label"),
        (
            ["a", "b c"],
            {"num_labels": 3},
            "is not the number of classes that the rows name, 2",
            '--class_names a "b c"',
        ),
        (["a", "b"], {"streaming": True}, "a stream is not read for them", "--class_names a b"),
        ([str(i) + "x" for i in range(10_001)], {}, "has over 10,000 different values", "--problem_type regression"),
    ],
)
def test_what_the_options_have_to_say(
    tmp_path: Path, labels: list[Any], options: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(DataError) as caught:
        found(tmp_path, labels, **options)
    (problem,) = caught.value.problems
    assert what in problem.rule and fix in problem.fix
