"""A user's reward: `FILE.py:function`, `module:function`, a function that a script gives or registers
(`megaswift.plugins.reward`), or an entry of ms-swift's `orms`.

A function is called as `f(prompts=..., completions=..., **columns)`: with everything where it takes `**kwargs`, else
with what its parameters name. Completions have the form of the row's prompt, text or messages, as in TRL, whichever way
the function was named: so it may move from a script to a file and stay as it is. Only entries of `orms` get texts
always, because that is ms-swift's contract and their files are run unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaswift.base.named_object import NamedObject, short_name
from megaswift.base.user_code import convert_user_code_errors, names_of_user_file
from megaswift.errors import ConfigError, Problem, did_you_mean_hint, missing_path_hint
from megaswift.options.plugins import ORM
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import ALWAYS_PASSED

MESSAGES = "messages"
"""A parameter that gets prompt and completion as one list of messages, as in ms-swift."""


@dataclass(frozen=True)
class UserFunction:
    """One call for all samples."""

    name: str
    function: Callable[..., Any]
    takes: frozenset[str] | None
    """Names of parameters; None: everything."""
    columns: frozenset[str]
    whole_groups: bool = True
    """It may compare completions: nobody knows."""
    flag: str = ""
    """As typed."""
    messages: bool = False
    """Whether a parameter has this name."""

    def arguments(self, samples: Sequence[RewardInput]) -> dict[str, list[Any]]:
        """Prompts, completions and columns, each a list over the samples; None where a row lacks a column."""
        every = dict.fromkeys(name for sample in samples for name in sample.columns)
        given: dict[str, list[Any]] = {name: [sample.columns.get(name) for sample in samples] for name in every}
        given |= {
            "prompts": [s.prompt for s in samples],
            "completions": [s.completion for s in samples],
            "completion_ids": [list(s.token_ids) for s in samples],
            "completion_mask": [[1] * len(s.token_ids) if s.own is None else [*map(int, s.own)] for s in samples],
        }
        if self.messages:
            given.setdefault(MESSAGES, [_messages(s) for s in samples])
        return given if self.takes is None else {name: value for name, value in given.items() if name in self.takes}

    def __call__(self, samples: Sequence[RewardInput]) -> Any:
        """Call the function. It gets copies: what it changes in place is not seen by the next function."""
        return self.function(**self.arguments([_copied(sample) for sample in samples]))


@dataclass(frozen=True)
class AsyncUserFunction(UserFunction):
    """A function that is `async def`."""

    async def wait(self, samples: Sequence[RewardInput]) -> Any:
        """Call the function and wait for what it returns."""
        return await self.function(**self.arguments([_copied(sample) for sample in samples]))


def _copied(sample: RewardInput) -> RewardInput:
    """The sample with a prompt, a completion and columns of its own, as deep as they go."""
    prompt, completion, columns = deepcopy((sample.prompt, sample.completion, dict(sample.columns)))
    return replace(sample, prompt=prompt, completion=completion, columns=columns)


def load_user_reward_function(text: str) -> UserFunction:
    """The function of `FILE.py:function`; ConfigError with what to do where there is none."""
    flag = f"--reward_funcs {text}"
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(Problem(flag, f"no such file: {path}", missing_path_hint(path)))
    names = names_of_user_file(path, flag)
    if name not in names:
        own = [n for n, thing in names.items() if callable(thing) and not n.startswith("_")]
        raise ConfigError(
            Problem(
                flag,
                f"{path.name} has no {name}; it has {', '.join(own) or 'no function'}",
                did_you_mean_hint(name, own),
            )
        )
    return checked_user_function(name, names[name], flag, path.name)


def checked_user_function(name: str, function: Any, flag: str, place: str) -> UserFunction:
    """The function of a file, a module or a script; ConfigError where it is none. `place`: where it is defined."""
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(
            Problem(flag, f"{name} is {kind}, not a function", f"write def {name}(prompts, completions, **columns)")
        )
    if inspect.isclass(function):
        raise ConfigError(
            Problem(flag, f"{name} is a class", f"create an instance in {place}: {name.lower()} = {name}(...)")
        )
    if hasattr(function, "parameters") and hasattr(function, "forward"):
        rule = f"is a loaded model ({type(function).__name__}), not a function"
        raise ConfigError(Problem(flag, rule, 'save it, and give its folder: reward_model=["DIR"]'))
    return describe_user_function(name, function, flag)


def given_user_function(named: NamedObject) -> UserFunction:
    """The function that a script gives as the value of `reward_funcs`."""
    flag = f"--reward_funcs {named}"
    return checked_user_function(short_name(named.thing), named.thing, flag, "the script")


def describe_user_function(name: str, function: Callable[..., Any], flag: str) -> UserFunction:
    """Describe what a function takes, by its parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function in C that says nothing
        return UserFunction(name, function, None, frozenset())
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if unnamed:
        raise ConfigError(
            Problem(
                flag,
                f"{name} takes {', '.join(unnamed)} as positional-only parameters; it is called with keywords",
                "remove the /",
            )
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in named)
    needed = frozenset(p.name for p in named if p.default is p.empty) - {*ALWAYS_PASSED, MESSAGES}
    waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    messages = any(p.name == MESSAGES for p in named)
    return (AsyncUserFunction if waits else UserFunction)(name, function, takes, needed, messages=messages)


@dataclass(frozen=True)
class SwiftReward(UserFunction):
    """An entry of ms-swift's `orms`."""

    def arguments(self, samples: Sequence[RewardInput]) -> dict[str, list[Any]]:
        """As ms-swift calls it: completions as text; `messages` are prompt and completion."""
        given = super().arguments(samples)
        if "completions" in given:
            given["completions"] = [s.text for s in samples]
        if self.takes is None or self.messages:
            given[MESSAGES] = [_messages(s) for s in samples]
        return given


@dataclass(frozen=True)
class AsyncSwiftReward(SwiftReward, AsyncUserFunction):
    """One whose `__call__` is `async def`."""


def _messages(sample: RewardInput) -> list[Any]:
    prompt = [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else [*sample.prompt]
    answer = (
        [{"role": "assistant", "content": sample.completion}]
        if isinstance(sample.completion, str)
        else [*sample.completion]
    )
    return [*prompt, *answer]


def make_registered_reward(name: str, registered: Any, of_swift: bool) -> UserFunction:
    """The reward of a class or function that is registered under `name`. `of_swift`: in ms-swift's `orms`, as are
    subclasses of its `ORM` wherever they are registered."""
    flag = f"--reward_funcs {name}"
    made: Any = registered
    if inspect.isclass(registered):
        with convert_user_code_errors(
            lambda trace: ConfigError(Problem(flag, f"its class needs ms-swift's arguments\n{trace}"))
        ):
            takes_args = "args" in inspect.signature(registered).parameters
            made = registered(**({"args": None} if takes_args else {}))
    described = checked_user_function(name, made, flag, "the script")
    if not of_swift and not isinstance(made, ORM):
        return described
    kind = AsyncSwiftReward if isinstance(described, AsyncUserFunction) else SwiftReward
    return kind(name, made, described.takes, described.columns, messages=described.messages)
