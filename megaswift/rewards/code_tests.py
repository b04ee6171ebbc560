"""The tests of a row for programs: parsing of the forms that data sets use, and comparison of outputs.

The forms: `input` and `output` (text, or arguments and value of a function), the lists `inputs` and `outputs` of APPS
and TACO, `test_cases` of open-r1, assertions of MBPP. Nothing is evaluated here; assertions are read as literals.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

FLOATS = 1e-6
"""Numbers this close to each other, relatively, are the same where one is a float."""


@dataclass(frozen=True)
class CodeTest:
    """What a program or a function of it gets, and what it should answer."""

    expected: Any
    input: str = ""
    function: str = ""
    arguments: Sequence[Any] = ()
    wrapped: bool = False
    """The value may be the only one of the expected list: APPS writes it so."""

    def job(self, source: str) -> dict[str, Any]:
        """For the sandbox, without the answer."""
        if self.function:
            return {"source": source, "function": self.function, "arguments": list(self.arguments)}
        return {"source": source, "input": self.input}

    def passed(self, out: str, result: str) -> bool:
        """Whether a run that ended well gave the answer."""
        if not self.function:
            return _lines(out) == _lines(str(self.expected))
        try:
            value = json.loads(result)
            return json_values_match(value, self.expected) or (
                self.wrapped and json_values_match([value], self.expected)
            )
        except (ValueError, RecursionError):
            return False


def _lines(text: str) -> list[str]:
    """Lines without white space at their end; no empty ones at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def json_values_match(one: Any, other: Any) -> bool:
    """Equal values of JSON, floats nearly."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(json_values_match, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(json_values_match(value, other[key]) for key, value in one.items())
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if (
        isinstance(one, int | float)
        and isinstance(other, int | float)
        and isinstance(one, float) | isinstance(other, float)
    ):
        return _near(one, other)
    return type(one) is type(other) and one == other


def _near(one: float, other: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=FLOATS, abs_tol=FLOATS)
    except OverflowError:  # a whole number beyond floats
        return False


def read_tests(value: Any) -> list[CodeTest]:
    """The tests of a row's column; ValueError with what is wrong."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("is a string that is not JSON") from None
    if isinstance(value, Mapping) and "test_cases" in value:
        value = value["test_cases"]
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        return _checked(
            [
                _one(i, o, value.get("fn_name"), wrapped=True)
                for i, o in zip(value["inputs"], value["outputs"], strict=True)
            ]
        )
    if not isinstance(value, list | tuple):
        raise ValueError(f"is {type(value).__name__}, not a list of tests")
    return _checked([_entry(test) for test in value])


def _checked(tests: list[CodeTest]) -> list[CodeTest]:
    if not tests:
        raise ValueError("is empty")
    return tests


def _entry(test: Any) -> CodeTest:
    if isinstance(test, str):
        return _assertion(test)
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
        raise ValueError(f"contains {str(test)[:60]!r}, which has no `input` and `output`")
    return _one(test["input"], test["output"], test.get("fn_name") or test.get("function"))


def _one(given: Any, expected: Any, function: Any, wrapped: bool = False) -> CodeTest:
    if not function:
        lines = ["\n".join(map(str, x)) if isinstance(x, list | tuple) else str(x) for x in (given, expected)]
        return CodeTest(lines[1], lines[0])
    if isinstance(given, str):  # a line for each argument, as JSON
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    if not isinstance(given, list | tuple):
        raise ValueError(f"contains the arguments {str(given)[:60]!r}, which are not a list")
    return CodeTest(_json(expected), function=str(function), arguments=_json(given), wrapped=wrapped)


def _json(value: Any) -> Any:
    """As it comes back from a program: tuples are lists, keys are texts."""
    try:
        return json.loads(json.dumps(value, default=lambda v: {"set": sorted(v, key=repr)}))
    except TypeError:
        raise ValueError(f"contains {str(value)[:60]!r}, which JSON cannot represent") from None


def _assertion(text: str) -> CodeTest:
    """`assert f(1, [2]) == 3`: a function, arguments and a value, all literals."""
    with suppress(SyntaxError, ValueError):
        match ast.parse(text.strip()).body:
            case [
                ast.Assert(
                    test=ast.Compare(
                        left=ast.Call(func=ast.Name(id=name), args=given, keywords=[]),
                        ops=[ast.Eq()],
                        comparators=[value],
                    )
                )
            ]:
                return _one([ast.literal_eval(argument) for argument in given], ast.literal_eval(value), name)
    raise ValueError(f"contains {text[:80]!r}, which is not `assert FUNCTION(VALUES) == VALUE`")
