"""Environments of multi-turn rollouts: they respond to the model's turns, for example with tool results, and may give
rewards.

Owns the protocol, finding the user's class, and checks of what it returns. One object lives as long as one completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megaswift.errors import ConfigError, Problem, RewardError, did_you_mean_hint, without_control_characters
from megaswift.rewards.reward_value_validation import float_or_none
from megaswift.user_code_errors import convert_user_code_errors, import_user_file

Message = dict[str, Any]
Turn = tuple[list[Message], float, bool]
"""(messages that answer the model: none ends the conversation, reward of this turn, whether it has ended)."""


class Environment(Protocol):
    """What a class of the user's has."""

    def reset(self, prompt: Any, **columns: Any) -> None:
        """A new conversation begins: the row's prompt, as text or messages, and its other columns."""

    def step(self, answer: str) -> Turn:
        """What the model has said, without special tokens."""


def load_environment_class(text: str) -> Callable[[], Environment]:
    """The class (or function that makes one) of `FILE.py:NAME`; ConfigError with what to do where there is none."""
    flag = f"--environment {text}"
    file, _, name = text.rpartition(":")
    names = import_user_file(Path(file).expanduser(), flag)
    environment = names.get(name)
    if environment is None:
        raise ConfigError(
            Problem(
                flag,
                f"{Path(file).name} has no {name}",
                did_you_mean_hint(name, [n for n in names if not n.startswith("_")]),
            )
        )
    lacking = [method for method in ("reset", "step") if not callable(getattr(environment, method, None))]
    if isinstance(environment, type) and lacking:
        raise ConfigError(
            Problem(flag, f"has no {' and no '.join(lacking)}", "define reset(prompt, **columns) and step(answer)")
        )
    return environment


class EnvironmentWithNamedErrors:
    """An environment whose errors carry its name."""

    def __init__(self, flag: str, inner: Environment) -> None:
        self.flag, self.inner = flag, inner

    def reset(self, prompt: Any, columns: Mapping[str, Any]) -> None:
        """Begins; RewardError where it raises."""
        names = [without_control_characters(name) for name in sorted(columns)]
        passed = f"reset gets prompt and the row's columns: {', '.join(names) or 'none'}"
        with convert_user_code_errors(lambda trace: RewardError(Problem(self.flag, f"reset failed\n{trace}", passed))):
            self.inner.reset(prompt, **columns)

    def step(self, answer: str) -> Turn:
        """One turn; RewardError where it raises or returns something else."""
        with convert_user_code_errors(
            lambda trace: RewardError(Problem(self.flag, f"step failed on {answer[:80]!r}\n{trace}"))
        ):
            returned: Any = self.inner.step(answer)
        if not isinstance(returned, Sequence) or len(returned) != 3:
            raise RewardError(Problem(self.flag, f"step returned {returned!r:.80}", "return (messages, reward, done)"))
        messages, reward, done = returned
        worth = float_or_none(reward)
        if worth is None or not math.isfinite(worth):
            raise RewardError(
                Problem(
                    self.flag, f"step returned the reward {reward!r:.80}", "return a finite number; 0.0 for no reward"
                )
            )
        if not all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and m.get("role") for m in messages):
            raise RewardError(
                Problem(
                    self.flag,
                    f"step returned the messages {messages!r:.80}",
                    'return [{"role": "tool", "content": "..."}]',
                )
            )
        return [dict(m) for m in messages], worth, bool(done)
