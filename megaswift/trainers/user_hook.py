"""Callbacks of the user's (`megaswift.plugins.callback`, `Trainer(callbacks=...)`), whose mistakes are one message with
the callback's name and the user's lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megaswift.base.user_code import convert_user_code_errors, defined_at
from megaswift.errors import PluginError, Problem
from megaswift.trainers.hook import Hook

CALLED = tuple(name for name, thing in vars(Hook).items() if callable(thing) and not name.startswith("__"))
"""Methods of a hook that a run calls."""


def make_user_hooks(makers: dict[str, Callable[[], Any]]) -> list[Hook]:
    """Make the registered hooks of a run.

    Raises:
        PluginError: Making one failed or gave no hook; later, when a method of one fails.
    """
    return [_make(name, make) for name, make in makers.items()]


def _make(name: str, make: Callable[[], Any]) -> Hook:
    what = f"callback {name}"
    with convert_user_code_errors(lambda trace: PluginError(Problem(what, f"cannot be created\n{trace}"))):
        hook = make()
    if not isinstance(hook, Hook):
        rule = f"is of type {type(hook).__name__}, not a megaswift.trainers.hook.Hook" + _place(make)
        raise PluginError(Problem(what, rule, "write class MINE(Hook) with on_step, on_log, on_evaluate or on_end"))
    for method in set(CALLED) - vars(hook).keys():  # an object that a script gives may have been in a run before
        setattr(hook, method, _with_named_errors(what, getattr(hook, method)))
    return hook


def _with_named_errors(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose exceptions name the callback. It may take as long as it likes: it may evaluate a model."""

    @wraps(method)
    def called(*args: Any) -> Any:
        say = f"{method.__name__} failed"
        with convert_user_code_errors(lambda trace: PluginError(Problem(what, f"{say}\n{trace}")), timed=False):
            return method(*args)

    return called


def _place(thing: object) -> str:
    at = defined_at(thing)
    return f" (defined at {at})" if at else ""
