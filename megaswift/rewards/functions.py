"""Resolves `--reward_funcs`: built-in names, `FILE.py:function`, `module:function`, functions that a script gives, or
names that a script or a file registers. All problems are reported before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from megaswift.base.named_object import NamedObject, find_object, names_module, short_name
from megaswift.base.registry import Registry
from megaswift.errors import ConfigError, Problem
from megaswift.options.plugins import PLUGINS, load_external_plugins
from megaswift.rewards import accuracy, code_reward, format_and_length_rewards
from megaswift.rewards.scoring import BuiltInRewardParameters, RewardFunction
from megaswift.rewards.user_function import (
    UserFunction,
    checked_user_function,
    given_user_function,
    load_user_reward_function,
    make_registered_reward,
)

NAMED: Registry[Callable[[BuiltInRewardParameters], RewardFunction]] = Registry("reward function")
NAMED.register("accuracy", accuracy.accuracy_reward)
NAMED.register("reasoning_accuracy", accuracy.reasoning_accuracy_reward)
NAMED.register("cosine", accuracy.cosine_reward)
NAMED.register("length", accuracy.length_reward)
NAMED.register("code", code_reward.code_reward)
NAMED.register("code_all", code_reward.code_all_reward)
NAMED.register("format", format_and_length_rewards.answer_format)
NAMED.register("think_format", format_and_length_rewards.think_format)
NAMED.register("repetition", format_and_length_rewards.repetition)
NAMED.register("soft_overlong", format_and_length_rewards.soft_overlong)
SPELLINGS = {
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "reasoning_accuracy",
    "cosine_scaled_reward": "cosine",
    "code_reward": "code",
    "binary_code_reward": "code_all",
    "think_format_reward": "think_format",
    "repetition_penalty_reward": "repetition",
    "soft_overlong_punishment_reward": "soft_overlong",
    "get_soft_overlong_punishment": "soft_overlong",
}
"""Names of TRL and open-r1."""


def is_file_function(name: str) -> bool:
    """Whether a name is FILE.py:function."""
    return ":" in name or name.endswith(".py")


def _one(name: str, options: BuiltInRewardParameters, orms: Mapping[str, Any]) -> RewardFunction:
    if isinstance(name, NamedObject):
        return given_user_function(name)
    if name in PLUGINS.rewards:
        return make_registered_reward(name, PLUGINS.rewards[name], of_swift=False)
    if name in orms:
        return make_registered_reward(name, orms[name], of_swift=True)
    if names_module(name):
        found = find_object(name, "reward_funcs")
        return checked_user_function(name.rpartition(":")[2], found, f"--reward_funcs {name}", "the module")
    if not is_file_function(name):
        return NAMED.get(SPELLINGS.get(name, name))(options)
    if name.endswith(".py"):
        raise ConfigError(Problem(f"--reward_funcs {name}", "names a file without a function", f"{name}:FUNCTION"))
    return load_user_reward_function(name)


def _file_and_function(name: str) -> tuple[Path, str]:
    file, _, function = name.rpartition(":")
    return Path(file).expanduser().resolve(), function


def _is_given(name: str, others: Sequence[str]) -> bool:
    """Whether one of the other names is the same function of the same file, or the same object."""
    if isinstance(name, NamedObject):
        return any(isinstance(other, NamedObject) and other.thing is name.thing for other in others)
    return _file_and_function(name) in [_file_and_function(other) for other in others if is_file_function(other)]


def _names_in_metrics(name: str) -> Iterator[str]:
    """Names for `FILE.py:function` or `module:function`: the function, then with the file and more and more of its
    folders, or with the module."""
    if names_module(name):
        module, _, qualified = name.rpartition(":")
        function = short_name(name.thing) if isinstance(name, NamedObject) else qualified.rpartition(".")[2]
        parts = [function, *reversed(module.split("."))]
    else:
        file, function = _file_and_function(name)
        parts = [function, file.stem, *(part for part in reversed(file.parent.parts) if part != file.anchor)]
    yield from (".".join(reversed(parts[:size])) for size in range(1, len(parts) + 1))
    yield from (f"{function}.{number}" for number in count(2))


def load_reward_functions(
    names: Sequence[str], options: BuiltInRewardParameters, plugin_files: Sequence[str] = ()
) -> list[RewardFunction]:
    """The functions in their order, each under a name of its own; ConfigError with all that is wrong."""
    load_external_plugins(plugin_files)
    orms = PLUGINS.orms if plugin_files else {}
    taken = {SPELLINGS.get(name, name) for name in names if not is_file_function(name)}
    functions: dict[str, RewardFunction] = {}
    problems: list[Problem] = []
    for place, name in enumerate(names):
        flag = f"--reward_funcs {name}"
        try:
            function = _one(name, options, orms)
        except ConfigError as error:
            problems += [replace(p, what=flag) if p.what.startswith("--reward_funcs ") else p for p in error.problems]
            continue
        assert is_dataclass(function) and not isinstance(function, type), "as all that are registered"
        function = replace(function, flag=flag)
        if isinstance(function, UserFunction) and is_file_function(name) and not _is_given(name, names[:place]):
            function = replace(function, name=next(n for n in _names_in_metrics(name) if n not in {*functions, *taken}))
        if function.name in functions:
            problems.append(Problem(flag, "is given twice", "give it once, with a larger weight in --reward_weights"))
        functions[function.name] = function
    if problems:
        raise ConfigError(problems)
    return list(functions.values())
