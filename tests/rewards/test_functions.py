"""From --reward_funcs to functions: names, files, and what is told of mistakes.

Covers: megaswift/rewards/user_function.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megaswift import plugins
from megaswift.base.named_object import named_object
from megaswift.errors import ConfigError, RewardError
from megaswift.rewards.functions import NAMED, SPELLINGS, load_reward_functions
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import (
    BuiltInRewardParameters,
    missing_reward_column_problems,
    score_rewards,
)
from tests.registered_plugins import kept_registrations
from tests.rewards.samples import judged

OPTIONS = BuiltInRewardParameters(max_completion_length=20)
FILE = """
from dataclasses import dataclass
from beside_it import BONUS

def everything(prompts, completions, **columns):
    return [len(c) + BONUS for c in completions]

def completions_only(completions):
    return [float(len(c)) for c in completions]

def with_column(completions, answer, tolerance=1):
    return [float(abs(len(c) - a) <= tolerance) for c, a in zip(completions, answer)]

async def later(completions, **columns):
    return [7.0 for _ in completions]

@dataclass
class Scorer:
    value: float
    def __call__(self, completions, **columns):
        return [self.value] * len(completions)

scorer = Scorer(3.0)
NUMBER = 5

def positional(completions, /):
    return []
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside_it.py").write_text("BONUS = 100\n")
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_functions_of_a_file(file: Path) -> None:
    names = ["everything", "completions_only", "with_column", "later", "scorer"]
    functions = load_reward_functions([f"{file}:{name}" for name in names], OPTIONS)
    assert [f.name for f in functions] == names
    assert [f.columns for f in functions] == [set(), set(), {"answer"}, set(), set()]
    rewards = score_rewards(functions, [1.0] * 5, [judged("abc", answer=4), judged("abc", answer=9)])
    assert [*rewards.per_function.values()] == [[103.0] * 2, [3.0] * 2, [1.0, 0.0], [7.0] * 2, [3.0] * 2]


def test_two_functions_of_one_name_are_told_apart(file: Path) -> None:
    other = file.with_name("other.py")
    other.write_text("def everything(completions):\n    return [0.0] * len(completions)\n")
    functions = load_reward_functions([f"{file}:everything", f"{other}:everything"], OPTIONS)
    assert [f.name for f in functions] == ["everything", "other.everything"]
    with pytest.raises(ConfigError, match="is given twice"):
        load_reward_functions(["format", "format"], OPTIONS)


def test_files_of_one_name_in_different_folders_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b", "c", "d/c"):
        (tmp_path / folder).mkdir(parents=True)
        text = f"def reward(completions):\n    return [{len(folder)}.0] * len(completions)\n"
        (tmp_path / folder / "score.py").write_text(text)
    names = [f"{tmp_path}/{folder}/score.py:reward" for folder in ("a", "b", "c", "d/c")]
    functions = load_reward_functions(names, OPTIONS)
    assert [f.name for f in functions] == ["reward", "score.reward", "c.score.reward", "d.c.score.reward"]
    assert score_rewards(functions, [1.0] * 4, [judged("x")]).per_function["d.c.score.reward"] == [3.0]
    with pytest.raises(ConfigError, match="is given twice"):
        load_reward_functions([names[0], f"{tmp_path}/b/../a/score.py:reward"], OPTIONS)


def test_a_function_with_the_name_of_a_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def format(completions):\n    return [0.0] * len(completions)\n")
    names = [f"{tmp_path}/mine.py:format", "format"]
    for order in (names, names[::-1]):
        assert {f.name for f in load_reward_functions(order, OPTIONS)} == {"mine.format", "format"}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("acuracy", "reward function 'acuracy': is unknown; known names are"),
        ("{file}", "names a file without a function"),
        ("{file}:everythin", "mine.py has no everythin"),
        ("{folder}/mina.py:f", "did you mean mine.py?"),
        ("{file}:NUMBER", "NUMBER is int"),
        ("{file}:Scorer", "Scorer is a class"),
        ("{file}:positional", "takes completions as positional-only parameters"),
        ("{folder}/bad.py:f", "ZeroDivisionError"),
        ("{folder}/worse.py:f", "SyntaxError"),
        ("soft_overlong", "requires --soft_cache_length"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(name: str, told: str, file: Path) -> None:
    file.with_name("bad.py").write_text("def f(): ...\n1 / 0\n")
    file.with_name("worse.py").write_text("def f(:\n")
    with pytest.raises(ConfigError) as error:
        load_reward_functions([name.format(file=file, folder=file.parent)], OPTIONS)
    assert told in str(error.value)


def test_all_mistakes_are_told_together(file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_reward_functions(["formt", f"{file}:nothing", "soft_overlong"], OPTIONS)
    assert len(error.value.problems) == 3


def test_the_names_of_trl_are_known() -> None:
    assert set(SPELLINGS.values()) <= set(NAMED.names())


@pytest.mark.wide
def test_later_messages_name_what_was_typed(file: Path) -> None:
    """A function's name in metrics is shorter than `FILE.py:function`, and TRL's names are others."""
    file.write_text("def none(completions): ...\nasync def later(completions): return [1]\ndef fails(solutio): ...\n")
    for name, rule in (("none", "returned None"), ("later", "returned 1 values for 2 samples")):
        with pytest.raises(RewardError) as error:
            score_rewards(load_reward_functions([f"{file}:{name}"], OPTIONS), [1.0], [judged("a"), judged("b")])
        assert str(error.value.problems[0]).startswith(f"--reward_funcs {file}:{name}: {rule}")
    broken, again = load_reward_functions([f"{file}:fails", "accuracy_reward"], OPTIONS)
    with pytest.raises(RewardError, match=f"--reward_funcs {file}:fails: failed on sample 0, with the completion 'a'"):
        score_rewards([broken], [1.0], [judged("a")])
    found = missing_reward_column_problems([broken, again], frozenset({"answer"}))
    assert [p.what for p in found] == [f"--reward_funcs {file}:fails", "--reward_funcs accuracy_reward"]
    with pytest.raises(RewardError, match="--reward_funcs accuracy_reward: the solution of sample 0"):
        score_rewards([again], [1.0], [judged("a")])
    with pytest.raises(ConfigError, match="--reward_funcs get_soft_overlong_punishment: requires --soft_cache_length"):
        load_reward_functions(["get_soft_overlong_punishment"], OPTIONS)


FORMS = """
seen = []

def form(completions, messages, **columns):
    seen.append((completions, messages))
    return [1.0] * len(completions)
"""
ANSWER = [{"role": "assistant", "content": "3"}]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("named", ["object", "file", "module", "registered"])
def test_the_form_of_completions_is_that_of_the_prompt(
    named: str, chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the function was named."""
    (tmp_path / "forms_of_mine.py").write_text(FORMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    module: Any = __import__("forms_of_mine")
    with kept_registrations():
        plugins.reward("registered", module.form)
        names = {"file": f"{tmp_path}/forms_of_mine.py:form", "module": "forms_of_mine:form"}
        name = named_object(module.form) if named == "object" else names.get(named, named)
        (function,) = load_reward_functions([name], OPTIONS)
    question = [{"role": "user", "content": "1+2="}]
    sample = RewardInput(question, ANSWER, [1], True) if chat else RewardInput("1+2=", "3", [1], True)
    assert score_rewards([function], [1.0], [sample]).total == [1.0]
    ((completions, messages),) = vars(sys.modules[function.function.__module__])["seen"]  # type: ignore[attr-defined]
    assert completions == ([ANSWER] if chat else ["3"]) and messages == [[*question, *ANSWER]]


def test_a_column_of_the_name_messages_is_the_row_s() -> None:
    (function,) = load_reward_functions([named_object(lambda messages: [float(m) for m in messages])], OPTIONS)
    assert score_rewards([function], [1.0], [judged("a", messages=4)]).total == [4.0]


def test_a_wrong_value_names_the_line_of_the_function(file: Path) -> None:
    file.write_text("\n\ndef short(completions):\n    return completions[1:]\n")
    functions = load_reward_functions([f"{file}:short"], OPTIONS)
    for samples in ([judged("a")], [judged("a"), judged("b")] * 2):
        with pytest.raises(RewardError, match=rf"values for .* samples \(defined at {file}:3\)"):
            score_rewards(functions, [1.0], samples)
