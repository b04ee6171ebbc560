"""Rewards that `--external_plugins` register: classes and functions of ms-swift's `orms`, and of
`megaswift.plugins.reward`, called as ms-swift calls them. Reading the files belongs to
`options/plugins.py`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megaswift.base.user_code import convert_user_code_errors
from megaswift.errors import ConfigError, Problem
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.user_function import (
    AsyncUserFunction,
    UserFunction,
    describe_user_function,
)


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
