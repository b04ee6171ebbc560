"""Rewards for programs: the forms of tests, what passes, what does not.

Covers: megaswift/rewards/code_tests.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from megaswift.errors import RewardError
from megaswift.rewards import code_reward
from megaswift.rewards.code_reward import extract_program
from megaswift.rewards.code_tests import json_values_match, read_tests
from megaswift.rewards.scoring import BuiltInRewardParameters
from tests.rewards.samples import judged, said

pytestmark = pytest.mark.wide

OPTIONS = BuiltInRewardParameters(max_completion_length=100, code_timeout=10.0, code_memory=256)
ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
SUMS = [{"input": "1 2\n", "output": "3"}, {"input": "10 -4", "output": "6\n"}]


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\nDone."


def reward(program: str, tests: Any) -> float:
    return code_reward.code_reward(OPTIONS)([judged(fenced(program), tests=tests)])[0]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (ADD, 1.0),
        ("print(3)", 0.5),
        ("print(4)", 0.0),
        ("print(3", 0.0),
        ("print(3); raise ValueError", 0.0),
        ("print(3); exit(0)", 0.5),
        ("print(3); exit(1)", 0.0),
        ("print('3  \\n')", 0.5),
        ("print(' 3')", 0.0),
        ("import sys; import json; print(sum(map(int, sys.stdin.read().split())))", 1.0),
        ("print(sum(map(int, open(0).read().split())))", 1.0),
        ("class A: pass\nif __name__ == '__main__': print(3)", 0.5),
        ("import numpy\nprint(3)", 0.0),
        ("from collections import deque, Counter\nimport heapq, math as m\nprint(m.gcd(3, 6))", 0.5),
        (
            (
                "import threading\nthreading.stack_size(1 << 26)\nt = threading.Thread(target=lambda: "
                "print(3))\nt.start()\nt.join()"
            ),
            0.5,
        ),
        ("import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1, 1))\nprint(3)", 0.5),
    ],
)
def test_the_share_of_tests_that_pass(program: str, expected: float) -> None:
    assert reward(program, SUMS) == expected


FUNCTION = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    "tests",
    [
        SUMS,
        json.dumps(SUMS),
        {"inputs": ["1 2"], "outputs": ["3\n"]},
        {"inputs": [["1 2"]], "outputs": [["3"]]},
        {
            "language": "python",
            "test_cases": [{"input": "1 2", "output": "3", "type": "stdin_stdout", "fn_name": None}],
        },
    ],
    ids=["list", "json", "apps", "lines", "open-r1"],
)
def test_forms_of_tests_on_text(tests: Any) -> None:
    assert reward(ADD, tests) == 1.0 and reward("print(0)", tests) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        [{"fn_name": "add", "input": [1, 2], "output": 3}],
        [{"function": "add", "input": "1\n2", "output": "3"}],
        {"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]},
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},
        ["assert add(1, 2) == 3", "assert add((1,), (2,)) == (1, 2)", "assert add([0.1], [0.2]) == [0.1, 0.2]"],
    ],
    ids=["values", "lines", "apps", "wrapped", "assertions"],
)
def test_forms_of_tests_on_functions(tests: Any) -> None:
    assert reward(FUNCTION, tests) == 1.0 and reward("def add(a, b):\n    return None", tests) == 0.0
    assert reward("class Solution:\n    def add(self, a, b):\n        return a + b", tests) == 1.0
    assert reward(FUNCTION + "exit()", tests) == 0.0


def test_a_program_cannot_pass_for_equal() -> None:
    """The comparison is not in its process."""
    tests = [{"fn_name": "add", "input": [1, 2], "output": 3}]
    always = (
        "class Same:\n    def __eq__(self, other): return True\n    def __repr__(self): return '3'\ndef add(a, "
        "b): return Same()"
    )
    assert reward(always, tests) == 0.0
    assert (
        reward("class Three(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Three(4)", tests)
        == 0.0
    )
    assert reward("def add(a, b): return {1, 2}", ["assert add(1, 2) == {2, 1}"]) == 1.0


def test_all_or_nothing_and_messages() -> None:
    samples = [
        said(fenced(ADD), tests=SUMS),
        said(fenced("print(3)"), tests=SUMS),
        said("no program", tests=SUMS),
        said(ADD, tests=SUMS),
    ]
    assert code_reward.code_all_reward(OPTIONS)(samples) == [1.0, 0.0, 0.0, 0.0]
    assert code_reward.code_reward(OPTIONS)(samples) == [1.0, 0.5, 0.0, 0.0]


def test_the_last_block_is_the_program() -> None:
    assert (
        extract_program("```py\na\n```\n```\nb\n```\ntext") == "b\n"
        and extract_program("```Python3 \r\na\n```") == "a\n"
    )
    assert (
        extract_program("```cpp\na\n```") is None
        and extract_program("```python\na") is None
        and extract_program("a") is None
    )


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (1.0, True, False),
        (None, 0, False),
        ([1], [1, 2], False),
        ({"a": [1.0]}, {"a": [1]}, True),
        ("1", 1, False),
        (10**400, 1.0, False),
        (float("nan"), float("nan"), False),
        (10**20, 10**20 + 1, False),
    ],
)
def test_values_that_are_the_same(one: Any, other: Any, equal: bool) -> None:
    assert json_values_match(one, other) is equal


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        (None, "is NoneType"),
        ("a test", "is a string that is not JSON"),
        ([], "is empty"),
        ([{"input": "1"}], "no `input` and `output`"),
        ("3", "is int"),
        (["assert f(x) == 1"], "which is not `assert FUNCTION"),
        (["import os"], "which is not"),
        (["assert f(1) == open('a')"], "which is not"),
        ({"inputs": ["1"], "outputs": []}, "zip"),
        ([{"fn_name": "f", "input": 3, "output": 3}], "which are not a list"),
    ],
)
def test_tests_that_are_none_are_told_with_their_sample(tests: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        read_tests(tests)
    with pytest.raises(RewardError, match="the column tests of sample 1"):
        code_reward.code_reward(OPTIONS)([judged(fenced(ADD), tests=SUMS), judged(fenced(ADD), tests=tests)])


@pytest.mark.parametrize("tests", ["[" * 99999, [{"fn_name": "f", "input": "[" * 99999, "output": "1"}]])
def test_tests_that_are_nested_too_deeply_are_told(tests: Any) -> None:
    with pytest.raises(RewardError, match="the column tests of sample 0 is nested too deeply"):
        code_reward.code_reward(OPTIONS)([judged(fenced(ADD), tests=tests)])


def test_nested_answers_do_not_harm_the_trainer() -> None:
    deep = "import os\ndef add(a, b):\n    os.write(3, b'[' * 900000)\n    os._exit(0)"
    assert reward(deep, [{"fn_name": "add", "input": [1, 2], "output": 3}]) == 0.0
    assert (
        reward("import os\ndef add(a, b):\n    os.write(3, b'9' * 9000)\n    os._exit(0)", ["assert add(1, 2) == 3"])
        == 0.0
    )
