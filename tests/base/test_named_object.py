"""The text of a Python object, and the object of a text: names as TRL shows them, what cannot be found and why.

Covers: megaswift/base/named_object.py.
"""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trl.trainer.utils import get_callable_name

from megaswift.base.named_object import find_object, named_object, names_module, short_name
from megaswift.errors import ConfigError


def even(completions: list[str]) -> list[float]:
    return [float(len(c) % 2 == 0) for c in completions]


class Length:
    def __call__(self, completions: list[str]) -> list[int]:
        return [len(c) for c in completions]

    def half(self, completions: list[str]) -> list[float]:
        return [len(c) / 2 for c in completions]


HERE = __name__
FORMS: list[tuple[Any, str]] = [
    (even, f"{HERE}:even"),
    (Length, f"{HERE}:Length"),
    (Length(), f"{HERE}:Length()"),
    (Length().half, f"{HERE}:Length().half"),
    (functools.partial(even), f"{HERE}:even()"),
    (lambda completions: [], f"{HERE}:<lambda>"),
    (len, "builtins:len"),
]


@pytest.mark.parametrize(("thing", "text"), FORMS, ids=[text for _, text in FORMS])
def test_a_text_for_each_form(thing: Any, text: str) -> None:
    """The short name is TRL's; only what is importable is found again by its text."""
    named = named_object(thing)
    assert named == text and named.thing is thing and names_module(text)
    assert short_name(thing) == get_callable_name(thing)
    if text in (f"{HERE}:even", f"{HERE}:Length", "builtins:len"):
        assert find_object(text, "reward_funcs") is thing
    else:
        with pytest.raises(ConfigError, match="has no name of its own, by which another process could import it"):
            find_object(text, "reward_funcs")


def test_a_copy_for_another_process_is_text_alone() -> None:
    named = named_object(lambda completions: [])
    assert copy.deepcopy((named,))[0] is named
    assert type(pickle.loads(pickle.dumps(named))) is str and pickle.loads(pickle.dumps(named)) == str(named)


@pytest.mark.parametrize("text", ["mine.py:even", "a/mine.py:even", "./mine:even", "accuracy", "mine:", "~/m.py:f"])
def test_files_and_names_are_no_modules(text: str) -> None:
    assert not names_module(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which has modules."""
    (tmp_path / "rewards_of_mine.py").write_text("def even(completions): ...\nclass Judge:\n    def score(self): ...\n")
    (tmp_path / "needs_more.py").write_text("import nosuch_library\n")
    (tmp_path / "fails.py").write_text("raise ValueError('no key')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_modules_of_the_working_folder_are_found(folder: Path) -> None:
    assert find_object("rewards_of_mine:even", "reward_funcs").__name__ == "even"
    assert find_object("rewards_of_mine:Judge.score", "reward_funcs").__name__ == "score"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rewards_of_mine:evn", "has no evn; it has even, Judge\n    try: did you mean even"),
        ("rewards_of_me:even", "no module rewards_of_me can be imported\n    try: run this in the folder"),
        ("rewards_of_me.sub:even", "no module rewards_of_me.sub can be imported"),
        ("needs_more:even", "importing needs_more failed(.|\n)*line 1(.|\n)*No module named 'nosuch_library'"),
        ("fails:even", "importing fails failed(.|\n)*ValueError: no key"),
        ("__main__:even", "is even of a script or notebook, and this process, which is another program, has none"),
        ("__main__:make.<locals>.inner", "has no name of its own"),
    ],
)
def test_what_is_not_there_is_told_with_what_to_do(text: str, told: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        find_object(text, "reward_funcs")
    assert caught.value.problems[0].what == f"--reward_funcs {text}"


def test_a_function_of_this_script_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("__main__")
    vars(script)["even"] = even
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert find_object("__main__:even", "reward_funcs") is even
