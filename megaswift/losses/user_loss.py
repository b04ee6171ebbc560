"""A loss formula of the user's (`megaswift.plugins`), whose mistakes are one message with its file and lines.

Owns nothing of any loss: the caller gives the shape that the formula has to return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megaswift.base.user_code import convert_user_code_errors, defined_at
from megaswift.errors import PluginError, Problem


def checked_formula(
    name: str, formula: Callable[..., Any], like: Callable[..., Tensor], each: str
) -> Callable[..., Tensor]:
    """Return the formula with checks.

    Args:
        name: The value of `--loss_type`.
        formula: The user's.
        like: Called with the formula's arguments; returns a tensor of the shape that the loss must have.
        each: What there is one loss for, such as `pair`.

    Raises:
        PluginError: When it is called: the formula failed, or returned something else.
    """
    what = f"--loss_type {name}"
    where = f"the loss of {defined_at(formula)}" if defined_at(formula) else "the loss"

    def checked(*args: Any) -> Tensor:
        with convert_user_code_errors(lambda trace: PluginError(Problem(what, f"{where} failed\n{trace}"))):
            loss = formula(*args)
        wanted = [*like(*args).shape]
        fix = f"return a loss for each {each}, a tensor of shape {wanted}"
        if not isinstance(loss, Tensor):
            raise PluginError(Problem(what, f"{where} returned {type(loss).__name__}, not a tensor", fix))
        if [*loss.shape] != wanted:
            raise PluginError(Problem(what, f"{where} returned a tensor of shape {[*loss.shape]}", fix))
        return loss

    return checked
