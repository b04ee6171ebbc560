"""Callbacks of the user's: each method's mistake is one message with the callback's name; nothing else changes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from megaswift.errors import ConfigError, PluginError, Problem
from megaswift.trainers.hook import Hook, Run
from megaswift.trainers.user_hook import CALLED, make_user_hooks

RUN = cast(Run, object())


class Largest(Hook):
    """Counts lines, or fails as it is asked to."""

    lines = 0

    def on_log(self, run: Run, line: Any) -> None:
        self.lines += 1
        if "wrong" in line:
            raise ConfigError(Problem("mine", "is wrong"))
        if "loss" not in line:
            raise KeyError("loss")

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.lines}


def test_a_right_one_is_as_it_was() -> None:
    (hook,) = make_user_hooks({"largest": Largest})
    hook.on_log(RUN, {"loss": 1.0})
    assert type(hook) is Largest and hook.state_dict() == {"lines": 1} and hook.part == "logging"


def test_every_method_that_a_run_calls_is_watched() -> None:
    assert {"on_start", "on_step", "on_log", "on_evaluate", "on_end", "close", "load_state_dict"} < set(CALLED)


@pytest.mark.parametrize("method", CALLED)
def test_a_method_that_fails_is_named(method: str) -> None:
    def fails(self: Hook, *values: Any) -> None:
        raise ValueError("not today")

    (hook,) = make_user_hooks({"mine": type("Mine", (Hook,), {method: fails})})
    with pytest.raises(PluginError, match=rf"callback mine: {method} failed|fails failed") as caught:
        getattr(hook, method)(RUN)
    assert "test_user_hook.py" in str(caught.value) and "ValueError: not today" in str(caught.value)


def test_errors_of_ours_pass() -> None:
    (hook,) = make_user_hooks({"largest": Largest})
    with pytest.raises(ConfigError, match="mine: is wrong"):
        hook.on_log(RUN, {"loss": 1, "wrong": 1})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: 3, "is of type int, not a megaswift.trainers.hook.Hook"),
        (lambda: [][0], "cannot be created\n(.|\n)*IndexError"),
    ],
)
def test_what_is_no_hook_is_refused(make: Any, told: str) -> None:
    with pytest.raises(PluginError, match=f"callback mine: {told}"):
        make_user_hooks({"mine": make})


def test_an_object_of_two_runs_is_wrapped_once() -> None:
    hook = Largest()
    for _ in range(3):
        make_user_hooks({"mine": lambda: hook})
    assert not hasattr(vars(hook)["on_log"].__wrapped__, "__wrapped__")
