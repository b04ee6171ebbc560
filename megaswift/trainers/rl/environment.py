"""Environments of multi-turn rollouts: they respond to the model's turns, for example with tool results, and may give
rewards.

Owns the protocol, finding the user's class, and checks of what it returns. One object lives as long as one completion.
Its methods may be `async def`: all of a run's then share one event loop, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import reprlib
import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

from megaswift.base.named_object import NamedObject, find_object, names_module
from megaswift.base.user_code import convert_user_code_errors, defined_at, names_of_user_file
from megaswift.errors import ConfigError, Problem, RewardError, UserError, did_you_mean_hint, without_control_characters
from megaswift.options.plugins import PLUGINS
from megaswift.rewards.scoring import USABLE, float_or_none, is_usable
from megaswift.trainers.rl.adapters import adapted_environment, is_adapted

Message = dict[str, Any]
Turn = tuple[list[Message], float, bool]
"""(messages that answer the model: none ends the conversation, reward of this turn, whether it has ended)."""
Observation = str | list[Message]
"""Before the model's first turn: text for the last message of the prompt, or messages after it; empty: nothing."""
GYMNASIUM = 5
"""Values that Gymnasium's `step` returns."""
MESSAGES = '[{"role": "tool", "content": "..."}]'


class Environment(Protocol):
    """The methods of a user's environment class. Each may be `async def` too.

    Gymnasium's are accepted as well: `reset(seed, options)`, where `options` are the prompt and the columns, and a
    `step` that returns (observation, reward, terminated, truncated, info), with an observation as `reset` returns it.
    `close`, if there is one, is called at the end of a conversation.
    """

    def reset(self, prompt: Any, **columns: Any) -> Observation | None:
        """Begin a new conversation, given the row's prompt, as text or messages, and its other columns."""

    def step(self, answer: str) -> Turn:
        """Answer what the model has said, which comes without special tokens."""


class Agent(Protocol):
    """A class that leads conversations by itself, in the place of an environment. `run` may be `async def` too."""

    def run(self, prompt: Any, base_url: str, **columns: Any) -> float | None:
        """Answer a prompt with the run's model, which is at `base_url` in OpenAI's API; returns the reward."""


def load_environment_class(text: str) -> Callable[[], Environment]:
    """Load the class (or function that makes an environment) of `FILE.py:NAME` or `module:NAME`, or the one that a
    script gives or registers; ConfigError with what to do where there is none."""
    flag = f"--environment {text}"
    file, _, name = text.rpartition(":")
    names: Mapping[str, Any] = {}
    if isinstance(text, NamedObject):
        environment = text.thing
    elif text in PLUGINS.environments:
        environment = PLUGINS.environments[text]
    elif is_adapted(text):
        return adapted_environment(text)
    elif names_module(text):
        environment = find_object(text, "environment")
    else:
        names = names_of_user_file(Path(file).expanduser(), flag)
        environment = names.get(name)
    if environment is None:
        raise ConfigError(
            Problem(
                flag,
                f"{Path(file).name} has no {name}",
                did_you_mean_hint(name, [n for n in names if not n.startswith("_")]),
            )
        )
    if not callable(environment):
        kind = type(environment).__name__
        raise ConfigError(Problem(flag, f"{name} is {kind}, not a class", f"write class {name}"))
    lacking = _lacking_methods(environment) if isinstance(environment, type) else ""
    if lacking:
        raise ConfigError(Problem(flag, f"has no {lacking}", METHODS))
    return environment


METHODS = "define reset(prompt, **columns) and step(answer), or run(prompt, base_url, **columns)"


def is_agent_class(environment: Any) -> bool:
    """Return whether a class, or an object of it, has `run` in the place of `reset` and `step`."""
    if isinstance(environment, functools.partial):
        return is_agent_class(environment.func)
    return callable(getattr(environment, "run", None)) and not callable(getattr(environment, "step", None))


def missing_column_problems(flag: str, environment: Any, columns: frozenset[str]) -> list[Problem]:
    """Report the arguments of a class's `reset` or `run` that a data set of these columns does not give."""
    if not isinstance(environment, type):
        return []
    agent = is_agent_class(environment)
    method = environment.run if agent else environment.reset  # type: ignore[attr-defined]
    try:
        parameters = [*inspect.signature(method).parameters.values()][2:]  # behind self and the prompt
    except (TypeError, ValueError):
        return []
    if not agent and _takes_gymnasium(method):
        return []
    given = columns | {"base_url"} if agent else columns
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = (p.name for p in parameters if p.kind in named and p.default is inspect.Parameter.empty)
    names = [without_control_characters(name) for name in sorted(columns)]
    has = f"the data has {', '.join(names)}" if names else "the data has no further columns"
    yours = names[0] if len(names) == 1 else "YOURS"
    return [
        Problem(flag, f"{method.__name__} requires the column {name}; {has}", f"--columns {yours}={name}")
        for name in needed
        if name not in given
    ]


def _takes_gymnasium(reset: Any) -> bool:
    """Whether `reset` takes what Gymnasium's takes."""
    try:
        parameters = inspect.signature(reset).parameters
    except (TypeError, ValueError):
        return False
    return {"seed", "options"} <= parameters.keys() and "prompt" not in parameters


def _lacking_methods(environment: Any) -> str:
    if is_agent_class(environment):
        return ""
    missing = (method for method in ("reset", "step") if not callable(getattr(environment, method, None)))
    return " and no ".join(missing)


def _ignore(renew: Callable[[bool], None]) -> None:
    """Do nothing with what renews the time of a call."""


class EnvironmentWithNamedErrors:
    """An environment whose errors carry its name."""

    _closed = False

    def __init__(self, flag: str, inner: Environment) -> None:
        self.flag = flag
        self.inner = inner

    @classmethod
    def make(cls, flag: str, environment: Callable[[], Environment]) -> EnvironmentWithNamedErrors:
        """Create an environment; RewardError where that fails."""
        fix = "it is called without arguments, once for each completion"
        with convert_user_code_errors(lambda trace: RewardError(Problem(flag, f"cannot be created\n{trace}", fix))):
            inner = environment()
        if lacking := _lacking_methods(inner):
            raise RewardError(Problem(flag, f"made {_shown(inner)}, which has no {lacking}", METHODS))
        return cls(flag, inner)

    def reset(self, prompt: Any, columns: Mapping[str, Any], row: int = 0) -> Observation:
        """Begin a conversation, and return the first observation; empty if there is none. RewardError if the user's
        method raises or returns something else. `row`: the number of the prompt's row, Gymnasium's seed unless there is
        a column `seed`."""
        names = [without_control_characters(name) for name in sorted(columns)]
        passed = f"reset gets prompt and the row's columns: {', '.join(names) or 'none'}"
        given = deepcopy(dict(columns))
        method = functools.partial(self.inner.reset, deepcopy(prompt), **given)
        if _takes_gymnasium(self.inner.reset):
            seed = given.get("seed", row)
            method = functools.partial(self.inner.reset, seed=seed, options={"prompt": deepcopy(prompt), **given})
            passed = "it is called with Gymnasium's seed and options, the prompt and the row's columns"
        returned = self._call(
            method,
            lambda trace: RewardError(Problem(self.flag, f"reset failed\n{trace}", passed)),
            getattr(self.inner, "begin_reset", _ignore),
        )
        if isinstance(returned, tuple) and len(returned) == 2 and _is_info(returned[1]):
            returned = returned[0]  # as Gymnasium has it: (observation, info)
        fix = f"return the first observation as text or as messages, {MESSAGES}, or None"
        return self._checked_observation(returned, "reset", fix)

    def _checked_observation(self, returned: Any, method: str, fix: str) -> Observation:
        if returned is None:
            return ""
        if isinstance(returned, str):
            return self._checked_text(returned, f"{method} returned text")
        return self._checked_messages(returned, method, fix)

    def step(self, answer: str) -> Turn:
        """Take one turn. RewardError if the user's method raises or returns something else."""
        returned = self._call(
            functools.partial(self.inner.step, answer),
            lambda trace: RewardError(Problem(self.flag, f"step failed on {answer[:80]!r}\n{trace}")),
        )
        if isinstance(returned, tuple) and len(returned) == GYMNASIUM:
            observation, reward, *ends, _ = returned
            done: Any = any(map(float_or_none, ends)) if None not in map(float_or_none, ends) else None
            fix = "return the observation as text, for example by a gymnasium.ObservationWrapper"
            seen = self._checked_observation(observation, "step", fix)
            returned = ([{"role": "user", "content": seen}] if isinstance(seen, str) else seen, reward, done)
        if not isinstance(returned, tuple | list) or len(returned) != 3:
            rule = f"step returned {_shown(returned)}{self._place('step')}"
            raise RewardError(Problem(self.flag, rule, "return (messages, reward, done)"))
        messages, reward, done = returned
        worth = float_or_none(reward)
        if worth is None or not is_usable(worth):
            fix = f"return {USABLE}; 0.0 for no reward"
            rule = f"step returned the reward {_shown(reward)}{self._place('step')}"
            raise RewardError(Problem(self.flag, rule, fix))
        ended = float_or_none(done)
        if ended is None:
            fix = "return whether the conversation is over, True or False, as the third value"
            raise RewardError(Problem(self.flag, f"step returned done as {_shown(done)}{self._place('step')}", fix))
        fix = f"return {MESSAGES}, or [] to end the conversation"
        return self._checked_messages(messages, "step", fix), worth, bool(ended)

    @property
    def is_agent(self) -> bool:
        """Whether it is an agent: it has `run` in the place of `reset` and `step`."""
        return is_agent_class(self.inner)

    def run(
        self, prompt: Any, base_url: str, columns: Mapping[str, Any], began: Callable[[Callable[[bool], None]], None]
    ) -> float:
        """Let an agent answer a prompt, and return the reward. RewardError if it raises or returns something else.
        `began` gets what renews the time of the call (`UserCodeClock.renew`)."""
        method: Any = getattr(self.inner, "run")  # noqa: B009
        returned = self._call(
            functools.partial(method, deepcopy(prompt), base_url, **deepcopy(dict(columns))),
            lambda trace: RewardError(Problem(self.flag, f"run failed\n{trace}")),
            began,
        )
        worth = 0.0 if returned is None else float_or_none(returned)
        if worth is None or not is_usable(worth):
            rule = f"run returned the reward {_shown(returned)}{self._place('run')}"
            raise RewardError(Problem(self.flag, rule, f"return {USABLE}, or None for no reward"))
        return worth

    @property
    def closes(self) -> bool:
        """Whether it has a method `close`."""
        return callable(getattr(self.inner, "close", None))

    def close(self) -> None:
        """End a conversation, once. RewardError if the user's method raises."""
        if self.closes and not self._closed:
            self._closed = True
            method: Any = getattr(self.inner, "close")  # noqa: B009
            self._call(
                functools.partial(method), lambda trace: RewardError(Problem(self.flag, f"close failed\n{trace}"))
            )

    def _call(
        self,
        method: functools.partial[Any],
        say: Callable[[str], UserError],
        began: Callable[[Callable[[bool], None]], None] = _ignore,
    ) -> Any:
        """Call a method, await it where it is `async def`, and return its result."""
        if not inspect.iscoroutinefunction(inspect.unwrap(method.func)):
            with convert_user_code_errors(say) as renew:
                began(renew)
                return method()

        async def awaited() -> Any:
            with convert_user_code_errors(say) as renew:
                began(renew)
                return await method()

        return asyncio.run_coroutine_threadsafe(awaited(), _loop()).result()

    def _place(self, method: str) -> str:
        """Return the place of a method in its file, for messages."""
        at = defined_at(getattr(self.inner, method))
        return f" (defined at {at})" if at else ""

    def _checked_messages(self, messages: Any, method: str, fix: str) -> list[Message]:
        """The messages as plain values of their own; RewardError for anything else."""
        rule = f"{method} returned the messages {_shown(messages)}"
        if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
            raise RewardError(Problem(self.flag, rule + self._place(method), fix))
        try:
            text = json.dumps([dict(m) for m in messages], ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise RewardError(Problem(self.flag, f"{rule}, which JSON cannot hold", fix)) from None
        return json.loads(self._checked_text(text, f"{method} returned messages"))

    def _checked_text(self, text: str, what: str) -> str:
        """The text; RewardError for half of a character, which no tokenizer takes: rows with it are refused too."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"an unpaired surrogate (\\u{ord(text[error.start]):04x}, an incomplete character)"
            before = text[max(error.start - 40, 0) : error.start]
            fix = 'replace it: text.encode("utf-8", "replace").decode()'
            raise RewardError(Problem(self.flag, f"{what} with {half} after {before!r}", fix)) from None
        return str(text)


_ONE_LOOP = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all environments: clients that a class keeps belong to the loop in which they first waited."""
    with _ONE_LOOP:  # conversations begin at the same time
        return _started_loop()


@functools.cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def _is_info(value: Any) -> bool:
    """Whether it is the second value of Gymnasium's `reset`, and no message."""
    return isinstance(value, Mapping) and "role" not in value


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and bool(message["role"])
        and isinstance(message.get("content"), str)
    )


_REPR = reprlib.Repr()
_REPR.maxstring = 80
_REPR.maxother = 80


def _shown(value: Any) -> str:
    """A value in a few words, also where its `__repr__` fails."""
    return _REPR.repr(value)
