"""Answers to names that no option has: accepted because nothing changes, or refused with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megaswift.base.redaction import MASK, is_secret
from megaswift.compat.names.answers import NAMES_ELSEWHERE, foreign_option_advice
from megaswift.compat.names.neutral import NeutralOption, neutral_option
from megaswift.compat.names.transformer_config import transformer_config_option
from megaswift.compat.names.translated import KNOWN_KEYS
from megaswift.config.sections import NAMES, SECTIONS
from megaswift.errors import Problem
from megaswift.options.given_options import unknown_option_problem
from megaswift.options.sources import AcceptedOption, GivenOptionValue
from megaswift.options.tasks import SAMPLED
from megaswift.options.values import FALSE, option_value_text

ENVIRONMENT_SECTION = "ENV"
_SAMPLING = re.compile("(vllm|sglang|lmdeploy)_")
"""Prefixes of settings of samplers."""


def accepted_option(given: GivenOptionValue) -> AcceptedOption | None:
    """Return the entry that accepts an option which megaswift does not have; None where there is none.

    It is accepted where it asks for what happens anyway; what the entry says of other options is checked later.
    """
    if given.name in NAMES:
        return None
    name, value, neutral = _neutral(given)
    if neutral is None or not neutral.may_accept(value):
        return None
    entry = neutral.with_value(value)
    return AcceptedOption(name, given.name, given.label, entry.reason, entry.unless, entry.true_with)


def unknown_option_problems(given: GivenOptionValue, known: Mapping[str, str], task: str | None) -> list[Problem]:
    """Return what is wrong with an option that training does not have; empty where no table has the name.

    Args:
        known: Names of options; an advice that names others is of no use.
        task: The task, where it is known.
    """
    _, _, neutral = _neutral(given)
    if _SAMPLING.match(given.name) and task is not None and task not in SAMPLED:
        return [Problem(given.label, f"has no effect in {task}, which samples nothing", "leave it out")]
    if (keys := KNOWN_KEYS.get(given.name)) is not None:
        return [Problem(given.label, "is not a known key", f"leave it out; known keys: {keys}")]
    if neutral is not None:
        return [Problem(given.label, f"is not supported: {neutral.reason}", neutral.otherwise or "leave it out")]
    if variables := variable_problems(given):
        return variables
    advice = unknown_option_advice(given, known)
    return [unknown_option_problem(given, known, SECTIONS, fix=advice)] if advice else []


def unknown_option_advice(given: GivenOptionValue, known: Mapping[str, str]) -> str:
    """Return what replaces an option of another toolkit; empty where no table has it."""
    value = None if isinstance(given.value, dict) else given.value
    positive = given.name.removeprefix("no_")
    advice = foreign_option_advice(given.name, value, known)
    if not advice and positive != given.name and positive not in known:
        advice = foreign_option_advice(positive, "false", known)
    return advice


def variable_problems(given: GivenOptionValue) -> list[Problem]:
    """Return one problem for each variable of ms-swift's section ENV; empty for any other name."""
    if given.name != ENVIRONMENT_SECTION or not isinstance(given.value, dict):
        return []
    return [_variable(given, name, value) for name, value in given.value.items()]


def _neutral(given: GivenOptionValue) -> tuple[str, object, NeutralOption | None]:
    """The entry of a name, or of the name without `no_` or `disable_`; its name and the value that it is given."""
    neutral = _entry(given.name)
    positive = given.name.removeprefix("no_").removeprefix("disable_")
    if neutral is not None or positive in NAMES:
        return given.name, given.value, neutral
    return positive, str(given.value).strip().lower() in FALSE, _entry(positive)


def _entry(name: str) -> NeutralOption | None:
    """The entry of another toolkit's option, unless it has an advice of its own."""
    return neutral_option(name) or (None if name in NAMES_ELSEWHERE else transformer_config_option(name))


def _variable(given: GivenOptionValue, name: str, value: object) -> Problem:
    text = MASK if is_secret(name.lower()) else option_value_text(value)
    place = given.spelling.rpartition(" ")[0]
    rule = "is not an option: a configuration file does not set environment variables"
    return Problem(f"{place} {name}: {text}", rule, f"export {name}={text} before the command")
