"""Checks of the values that reward functions return: a number per sample, a number per token, or None if the function
does not apply. Errors name the function and the sample.

Owns the two ways in which a user's function goes wrong: it raises, or it returns what is no reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from megaswift.errors import Problem, RewardError
from megaswift.rewards.reward_input import RewardInput

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
