"""What a reward function returns is numbers, one a sample; anything else is told with the function and the sample.

Owns the two ways in which a user's function goes wrong: it raises, or it returns what is no reward.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.errors import Problem, RewardError, UserError

if TYPE_CHECKING:
    from megaswift.trainers.rewards.contract import Judged

SHOWN = 80
"""Characters of a sample in a message."""
FRAMES = 3
OURS = str(Path(__file__).parent)


def _flag(name: str) -> str:
    return f"--reward_funcs {name}"


def _plain(returned: Any) -> Any:
    """Tensors and arrays as lists."""
    return returned.tolist() if hasattr(returned, "tolist") and getattr(returned, "ndim", 0) != 0 else returned


def _shown(sample: Judged) -> str:
    text = sample.text
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def checked(name: str, returned: Any, judged: Sequence[Judged]) -> list[float]:
    """The values as floats; RewardError unless they are one finite number for each sample."""
    values = _plain(returned)
    if not isinstance(values, list | tuple):
        raise RewardError(Problem(_flag(name), f"returned {_kind(returned)}, not a list of {len(judged)} numbers",
                                  "return [float, ...], one for each completion"))
    if len(values) != len(judged):
        raise RewardError(Problem(_flag(name), f"returned {len(values)} values for {len(judged)} samples", "one value for each completion"))
    found = []
    for i, (value, sample) in enumerate(zip(values, judged, strict=True)):
        number = _number(value)
        if number is None or not math.isfinite(number):
            what = f"{value!r} ({type(value).__name__})" if number is None else str(number)
            fix = "float(...)" if isinstance(_item(value), bool) else "a finite number for every sample, 0.0 where there is nothing to say"
            rule = f"returned {what[:SHOWN]} for sample {i} of {len(judged)}, the completion {_shown(sample)}"
            raise RewardError(Problem(_flag(name), rule, fix))
        found.append(number)
    return found


def _item(value: Any) -> Any:
    """A tensor or array of one number as the number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _number(value: Any) -> float | None:
    value = _item(value)
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    except OverflowError:
        return math.inf


def _kind(value: Any) -> str:
    return "None" if value is None else f"{value!r}"[:SHOWN] + f" ({type(value).__name__})"


@contextmanager
def told(say: Callable[[str], UserError]) -> Iterator[None]:
    """What code of the user's raises as the error that `say` makes of its traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise say(trace(error)) from error


def failed(name: str, judged: Sequence[Judged]) -> Callable[[str], RewardError]:
    """The error of a function that raised: the function, the samples, and where in the user's code."""
    what = f"failed on samples 0 to {len(judged) - 1}, the first of them {_shown(judged[0])}"
    return lambda trace: RewardError(Problem(_flag(name), f"{what}\n{trace}", "call it on such samples by itself"))


def trace(error: BaseException) -> str:
    """The last frames outside of this package, indented, and what was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((OURS, "<frozen importlib"))]
    lines = [*traceback.format_list(frames[-FRAMES:]), *traceback.format_exception_only(error)]
    return "\n".join("    " + line for entry in lines for line in entry.rstrip().splitlines())
