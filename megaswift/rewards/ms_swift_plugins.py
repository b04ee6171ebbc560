"""Reward classes that files written for ms-swift register: `orms["name"] = Class`, with `ORM` or `AsyncORM` as base.

Such files import `swift`. While one is read, modules of that name stand in for it: they hold `ORM`, `AsyncORM`, `orms`
and a logger; whatever else a file takes from them can be subclassed and registered, and says what it is when it is
used. Only files that the user names are run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megaswift.errors import ConfigError, Problem, missing_path_hint
from megaswift.rewards.reward_interface_and_scoring import RewardInput
from megaswift.rewards.reward_value_validation import convert_user_code_errors
from megaswift.rewards.user_reward_function import (
    AsyncUserFunction,
    UserFunction,
    describe_user_function,
    import_user_file,
)

PACKAGE = "swift"


class ORM:
    """The base of a file's reward classes; ms-swift hands them its arguments, here None."""

    def __init__(self, args: Any = None, **_: Any) -> None:
        self.args = args


class UnavailableError(Exception):
    """Use of a part of ms-swift that is not here."""


class _Elsewhere(type):
    """Classes of ms-swift that are not here, and registries: `name["x"] = y` is taken and does nothing."""

    def __setitem__(cls, name: str, value: object) -> None:
        pass

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise UnavailableError(f"{cls.__mro__[-2].__name__} is part of ms-swift; only reward classes of orms run here")


class _StandIn(ModuleType):
    """A module `swift...`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Elsewhere(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, orms: dict[str, Any]) -> None:
        self.given: dict[str, Any] = {"ORM": ORM, "AsyncORM": ORM, "orms": orms, "get_logger": logging.getLogger}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__dict__.update(self.given)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


@contextmanager
def _in_place_of_swift(orms: dict[str, Any]) -> Iterator[None]:
    """ms-swift itself, where it is installed, is left alone."""
    finder = _Finder(orms)
    own = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PACKAGE}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules.update(own)


@dataclass(frozen=True)
class PluginReward(UserFunction):
    """An instance of a file's class."""

    def arguments(self, samples: Sequence[RewardInput]) -> dict[str, list[Any]]:
        """As ms-swift calls it: completions as text; `messages` are prompt and completion."""
        given = super().arguments(samples)
        if "completions" in given:
            given["completions"] = [s.text for s in samples]
        if self.takes is None or "messages" in self.takes:
            given["messages"] = [_messages(s) for s in samples]
        return given


@dataclass(frozen=True)
class AsyncPluginReward(PluginReward, AsyncUserFunction):
    """Its `__call__` is `async def`."""


def _messages(sample: RewardInput) -> list[Any]:
    prompt = [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else [*sample.prompt]
    answer = (
        [{"role": "assistant", "content": sample.completion}]
        if isinstance(sample.completion, str)
        else [*sample.completion]
    )
    return [*prompt, *answer]


def load_plugin_rewards(files: Sequence[str]) -> dict[str, Any]:
    """What the files have put into `orms`, by name; ConfigError for one that is missing or fails."""
    orms: dict[str, Any] = {}
    for file in files:
        flag, path = f"--external_plugins {file}", Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(Problem(flag, f"no such file: {path}", missing_path_hint(path)))
        with _in_place_of_swift(orms):
            import_user_file(path, flag)
    return orms


def make_plugin_reward(name: str, registered: Any) -> UserFunction:
    """The reward of a class or function that a plugin has registered."""
    flag = f"--reward_funcs {name}"
    made: Any = registered
    if inspect.isclass(registered):
        with convert_user_code_errors(
            lambda trace: ConfigError(Problem(flag, f"its class needs ms-swift's arguments\n{trace}"))
        ):
            takes_args = "args" in inspect.signature(registered).parameters
            made = registered(**({"args": None} if takes_args else {}))
    described = describe_user_function(name, made, flag)
    kind = AsyncPluginReward if isinstance(described, AsyncUserFunction) else PluginReward
    return kind(name, made, described.takes, described.columns - {"messages"})
