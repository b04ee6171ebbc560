"""The interface of reward functions: their input, their values, and the weighted sum over several functions.

Owns the samples' form, the options of the named functions and `score_rewards`. What a value may be is
`checked_rewards`; which functions there are, `load`.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from megaswift.base.user_code import convert_user_code_errors, defined_at
from megaswift.errors import Problem, RewardError, did_you_mean_hint, without_control_characters
from megaswift.rewards.reward_input import RewardInput


class RewardFunction(Protocol):
    """Scores samples in their order."""

    @property
    def name(self) -> str:
        """For metrics: `rewards/NAME/mean`."""
        ...

    @property
    def columns(self) -> frozenset[str]:
        """Columns that every row must have."""
        ...

    @property
    def whole_groups(self) -> bool:
        """Whether completions of one prompt are compared, so that all of them must come in one call."""
        ...

    def __call__(self, samples: Sequence[RewardInput]) -> Any:
        """One number a sample, or one for each token that the model wrote in it."""
        ...


@runtime_checkable
class AsyncRewardFunction(Protocol):
    """A reward function that can wait: all of them run at once."""

    async def wait(self, samples: Sequence[RewardInput]) -> Any:
        """The same as a call."""
        ...


@dataclass(frozen=True)
class BuiltInRewardParameters:
    """Parameters of the built-in functions; but for the first, the fields are options of section `rewards`."""

    max_completion_length: int
    cosine_min_len_value_wrong: float = -0.5
    cosine_max_len_value_wrong: float = 0.0
    cosine_min_len_value_correct: float = 1.0
    cosine_max_len_value_correct: float = 0.5
    cosine_max_len: int | None = None
    """Unset: max_completion_length."""
    repetition_n_grams: int = 3
    repetition_max_penalty: float = -1.0
    soft_max_length: int | None = None
    """Unset: max_completion_length."""
    soft_cache_length: int | None = None
    """Tokens before soft_max_length over which the punishment grows to 1; soft_overlong needs it."""
    code_timeout: float = 6.0
    """Seconds for one test of a program."""
    code_memory: int = 512
    """MiB for one test of a program."""
    allow_unsafe_code: bool = False
    """Run programs where the system offers no sandbox."""


ALWAYS_PASSED = ("prompts", "completions", "completion_ids", "completion_mask")
"""What a user's function gets beside the columns; `completion_ids` as TRL has it, and which of them the model wrote: 1,
or 0 for what tools wrote."""

OF_TRL = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL 1.16 passes besides."""


@dataclass(frozen=True)
class RewardScores:
    """The scores of samples, in their order."""

    per_function: dict[str, list[float]]
    """The sum where rewards are per token; NaN where the function does not apply."""
    total: list[float]
    """The weighted sum over the functions that apply; NaN where none does."""
    tokens: list[tuple[float, ...] | None] = field(default_factory=list)
    """The same by token that the model wrote, of samples that have rewards of tokens; empty where none has."""


def is_user_function(function: RewardFunction) -> bool:
    """Whether a function is from a user's file."""
    return hasattr(function, "takes")


def reward_function_flag(function: RewardFunction) -> str:
    """The option that named a function, as typed: its name in metrics is shorter (`FILE.py:` is left out)."""
    return getattr(function, "flag", "") or f"--reward_funcs {function.name}"


def missing_reward_column_problems(functions: Sequence[RewardFunction], columns: frozenset[str]) -> list[Problem]:
    """What is wrong with a data set of these columns; to be asked before anything is built."""
    names = [without_control_characters(name) for name in sorted(columns)]
    has = f"the data has {', '.join(names)}" if columns else "the data has no further columns"
    yours = names[0] if len(names) == 1 else "YOURS"
    return [
        Problem(
            reward_function_flag(f),
            f"requires the column {name}; {has}",
            _parameter(f, name) or f"--columns {yours}={name}",
        )
        for f in functions
        for name in sorted(f.columns - columns)
    ]


def _parameter(function: RewardFunction, name: str) -> str:
    """What a mistyped parameter of a user's function should be called; the empty string where it looks like none."""
    if is_user_function(function) and name in OF_TRL:
        return f"give it a default, {name}=None: TRL passes it, and a run here has none"
    guess = did_you_mean_hint(name, ALWAYS_PASSED) if is_user_function(function) else ""
    return f"{guess} ({', '.join(ALWAYS_PASSED)} are passed without a column)" if guess else ""


@functools.cache
def _loop() -> asyncio.Runner:
    """One for the whole run: clients that a user's function keeps belong to the loop in which they first waited."""
    return asyncio.Runner()


def score_rewards(
    functions: Sequence[RewardFunction], weights: Sequence[float], samples: Sequence[RewardInput]
) -> RewardScores:
    """Every function's values and their weighted sum; RewardError where a function fails or returns what is no
    reward."""
    assert len(functions) == len(weights), "checked with the configuration"
    waiting = [f for f in functions if isinstance(f, AsyncRewardFunction)] if samples else []
    awaited: dict[str, list[Value]] = (
        dict(zip((f.name for f in waiting), _loop().run(_all(waiting, samples)), strict=True)) if waiting else {}
    )
    for f in functions if samples else ():
        if f.name not in awaited:
            say = reward_error_from_trace_factory(reward_function_flag(f), samples)
            with convert_user_code_errors(say, timed=is_user_function(f)):
                returned = f(samples)
            awaited[f.name] = _checked_rewards_of(f, returned, samples)
    values = {f.name: awaited.get(f.name, []) for f in functions}
    sums = {name: [sum(v) if isinstance(v, tuple) else v for v in given] for name, given in values.items()}
    total = [_weighted(weights, each) for each in zip(*sums.values(), strict=True)]
    _check_sums(functions, {**sums, "": total})
    every = list(zip(*values.values(), strict=True))
    of_tokens = any(isinstance(value, tuple) for each in every for value in each)
    return RewardScores(
        sums,
        total,
        [_by_token(weights, each, s.written) for each, s in zip(every, samples, strict=True)] if of_tokens else [],
    )


def _check_sums(functions: Sequence[RewardFunction], sums: Mapping[str, Sequence[float]]) -> None:
    """RewardError for sums of rewards of tokens, by function, or weighted sums (under no name) that are too large."""
    flags = {f.name: reward_function_flag(f) for f in functions}
    for name, values in sums.items():
        for i, value in enumerate(values):
            if not math.isnan(value) and not is_usable(value):
                what = f"gave tokens rewards that add up to {value:g}" if name else f"make the reward {value:g}"
                raise RewardError(
                    Problem(
                        flags.get(name, "--reward_weights"),
                        f"{what} for sample {i} of {len(values)}",
                        f"use smaller rewards: a sum has to be {USABLE}",
                    )
                )


def _weighted(weights: Sequence[float], each: Sequence[float]) -> float:
    """The weighted sum of what is not NaN; NaN where nothing else is there (as TRL has it)."""
    known = [w * v for w, v in zip(weights, each, strict=True) if not math.isnan(v)]
    return sum(known) if known else math.nan


def _by_token(weights: Sequence[float], each: Sequence[Value], count: int) -> tuple[float, ...] | None:
    """The weighted sum at each token; a reward of the whole completion is at its last token."""
    if not any(isinstance(value, tuple) for value in each):
        return None
    sums = [0.0] * count
    for weight, value in zip(weights, each, strict=True):
        for t, one in enumerate(value) if isinstance(value, tuple) else [(count - 1, value)][:count]:
            sums[t] += 0.0 if math.isnan(one) else weight * one
    return tuple(sums)


async def _all(functions: Sequence[Any], samples: Sequence[RewardInput]) -> list[list[Value]]:
    async def one(function: Any) -> list[Value]:
        with convert_user_code_errors(reward_error_from_trace_factory(reward_function_flag(function), samples)):
            returned = await function.wait(samples)
        return _checked_rewards_of(function, returned, samples)

    return list(await asyncio.gather(*(one(f) for f in functions)))


# Checks of the values that reward functions return: a number per sample, a number per token, or None if the function
# does not apply. Errors name the function and the sample.
#
# Owns the two ways in which a user's function goes wrong: it raises, or it returns what is no reward.

LARGEST = 1e15
"""The largest reward, with either sign. Advantages are computed in float32, whose largest number is 3.4e38: squares of
such rewards, summed over a generation, stay below it."""
SHOWN = 80
"""Characters of a sample in a message."""
Value = float | tuple[float, ...]
"""The reward of a completion, or of each token in it that the model wrote. NaN: the function does not apply to the
completion."""


def _plain(returned: Any) -> Any:
    """Tensors and arrays as lists."""
    return returned.tolist() if hasattr(returned, "tolist") and getattr(returned, "ndim", 0) != 0 else returned


def _shown(sample: RewardInput) -> str:
    text = sample.text
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def _checked_rewards_of(function: RewardFunction, returned: Any, samples: Sequence[RewardInput]) -> list[Value]:
    """The checked values of a function; the error says where a function of the user's is defined."""
    try:
        return checked_rewards(reward_function_flag(function), returned, samples)
    except RewardError as error:
        place = defined_at(getattr(function, "function", None))
        if not place:
            raise
        raise RewardError(replace(p, rule=f"{p.rule} (defined at {place})") for p in error.problems) from None


def checked_rewards(flag: str, returned: Any, samples: Sequence[RewardInput]) -> list[Value]:
    """The values as floats, truth values as 1 and 0, None as NaN; RewardError unless they are one finite number for
    each sample, or for each token that the model wrote in it. `flag`: the option that named the function, as typed."""
    values = _plain(returned)
    if not isinstance(values, list | tuple):
        raise RewardError(
            Problem(
                flag,
                f"returned {_kind(returned)}, not a list of {len(samples)} numbers",
                "return [float, ...], one per completion",
            )
        )
    if len(values) != len(samples):
        raise RewardError(
            Problem(
                flag, f"returned {len(values)} values for {len(samples)} samples", "return one value per completion"
            )
        )
    return [_checked(flag, value, samples[i], f"sample {i} of {len(samples)}") for i, value in enumerate(values)]


def _checked(flag: str, value: Any, sample: RewardInput, where: str) -> Value:
    each = _plain(value)
    if each is None:
        return math.nan
    if not isinstance(each, list | tuple):
        return _finite(flag, value, sample, where)
    if len(each) != sample.written:
        rule = (
            f"returned {len(each)} numbers for the {sample.written} tokens of {where}, the completion {_shown(sample)}"
        )
        raise RewardError(
            Problem(flag, rule, "return one number, or one per token of completion_ids where completion_mask is 1")
        )
    return tuple(_finite(flag, one, sample, f"token {t} of {where}") for t, one in enumerate(each))


def _finite(flag: str, value: Any, sample: RewardInput, where: str) -> float:
    number = float_or_none(value)
    if number is None or not is_usable(number):
        what = f"{value!r} ({type(value).__name__})" if number is None else str(number)
        fix = f"return {USABLE} for every sample, or None for one that the function does not apply to"
        raise RewardError(Problem(flag, f"returned {what[:SHOWN]} for {where}, the completion {_shown(sample)}", fix))
    return number


USABLE = f"a finite number of at most {LARGEST:g}"


def is_usable(number: float) -> bool:
    """Whether a number can be a reward, or a sum of rewards."""
    return abs(number) <= LARGEST  # no: NaN


def _item(value: Any) -> Any:
    """A tensor or array of one number as the number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def float_or_none(value: Any) -> float | None:
    """A number or truth value of any library as a float; None where it is neither."""
    value = _item(value)
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:
        return math.inf


def _kind(value: Any) -> str:
    return "None" if value is None else f"{value!r}"[:SHOWN] + f" ({type(value).__name__})"


def reward_error_from_trace_factory(flag: str, samples: Sequence[RewardInput]) -> Callable[[str], RewardError]:
    """The error of a function that raised: the function, the samples, and where in the user's code."""
    many = f"samples 0 to {len(samples) - 1}, the first" if len(samples) > 1 else "sample 0,"
    form = ""
    if not isinstance(samples[0].completion, str):
        form = " (completions are lists of messages, as prompts are: completion[-1]['content'] is the text)"
    what = f"failed on {many} with the completion {_shown(samples[0])}"
    return lambda trace: RewardError(
        Problem(flag, f"{what}\n{trace}", f"call the function on such samples outside the run{form}")
    )
