"""The form of a new run: the options of a task's first help page, and the command line that their values make.

Nothing of Gradio. A value is what its widget holds: a text, or a list of texts where several choices may be selected.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megaswift.config.help import GROUPS, HelpPages, default_text, section_title, task_pages
from megaswift.config.sections import NAMES, SECTIONS, TRAINING
from megaswift.config.swift_config import config_yaml_text
from megaswift.errors import Problem
from megaswift.options.command_line import read_command_line
from megaswift.options.option import Option
from megaswift.options.sources import normalize_name
from megaswift.options.tasks import TASKS
from megaswift.options.values import InvalidValue, parse_option_value

MORE = "more"
"""The name of the text field for all other options."""
SWITCH = ("true", "false")
LISTS = ("list", "numbers", "integers", "map")
"""Kinds of options that take several words."""
TYPED = ("int", "float", "bool")
"""Kinds whose values a YAML file holds as such, not as text."""
OBJECTIVE = "Preferences, rewards, completions"
"""The heading for the options of all alignment tasks, which `--help` has under two headings."""

Value = str | Sequence[str] | None


@cache
def pages(task: str) -> HelpPages:
    """Return the help of a task."""
    return task_pages(task)


def fields(task: str) -> list[Option]:
    """Return the options of a task's form, in the order of `--help`."""
    return pages(task).common


@cache
def all_fields() -> dict[str, list[Option]]:
    """Return the options that the form of any task has, by heading."""
    heading_of = {key: heading for heading, keys in GROUPS.items() for key in keys}
    heading_of |= dict.fromkeys(("preference", "rl", "rewards", "rollout", "placement", "critic"), OBJECTIVE)
    found = {option.name: option for task in TASKS for option in fields(task)}
    grouped: dict[str, list[Option]] = {}
    for key in SECTIONS:
        own = [option for option in found.values() if option.section == key]
        if own:
            grouped.setdefault(heading_of.get(key, section_title(SECTIONS[key])), []).extend(own)
    return grouped


def default_of(task: str, option: Option) -> str:
    """Return the default of an option as `--help` shows it; in capitals where nothing is set."""
    return default_text(option, pages(task).defaults.get(option.name, option.default))


def choices_of(task: str, option: Option) -> tuple[str, ...]:
    """Return the values to choose from; empty for free text."""
    return SWITCH if option.kind == "bool" else option.choices_in(task)


def command_words(task: str, values: Mapping[str, Value], more: str) -> tuple[list[str], list[Problem]]:
    """Return the words of a command line behind `megaswift TASK`, and what cannot be read.

    Args:
        values: What the fields hold, by option; those that the form of the task does not have are left out.
        more: Further options as on a command line.
    """
    words: list[str] = []
    problems: list[Problem] = []
    for option in fields(task):
        value = values.get(option.name) or ""
        try:
            given = _given_words(option, value)
        except ValueError as error:  # of a quote that is not closed
            rule = f"cannot be read: {error}"
            problems.append(Problem(f"--{option.name} {value}", rule, "quote paths with spaces, on both sides"))
            continue
        words += _flag_words(option.name, given)
    try:
        further = shlex.split(more)
    except ValueError as error:
        return words, [*problems, Problem(MORE, f"cannot be read: {error}", "close the quotes")]
    if further and not further[0].startswith("--"):
        fix = "begin with the name of an option: --name value"
        return words, [*problems, Problem(MORE, f"{further[0]} is not an option", fix)]
    line = read_command_line(further, TRAINING)
    if line.files:
        return words, [*problems, Problem(MORE, "the form takes no --config", "megaswift submit FILE in a terminal")]
    return [*words, *further], problems


def _given_words(option: Option, value: str | Sequence[str]) -> list[str]:
    if not isinstance(value, str):
        return [str(each) for each in value]
    text = value.strip()
    if option.kind in LISTS:
        return shlex.split(text)
    return [text] if text else []


def _flag_words(name: str, values: Sequence[str]) -> list[str]:
    """A value that begins with a dash must not be read as an option."""
    if any(value.startswith("-") for value in values):
        return [f"--{name}={value}" for value in values]
    return [f"--{name}", *values] if values else []


def command_text(task: str, words: Sequence[str]) -> str:
    """Return the command line of the run as one would type it."""
    return shlex.join(["megaswift", task, *words])


def run_file_text(task: str, words: Sequence[str], output_dir: str) -> str:
    """Return the configuration file with the options of a command line that has no mistake.

    Args:
        output_dir: The folder that was checked; it takes the place of that of the words.
    """
    values: dict[str, Any] = {}
    for given in read_command_line(list(words), TRAINING).givens:
        name = NAMES.get(given.name, given.name)
        option = TRAINING.options.get(name)
        values[name] = given.value
        if option is not None and option.kind in TYPED:
            values[name] = _typed(option, given.value)
    return config_yaml_text({"task": task, **values, "output_dir": output_dir})


def _typed(option: Option, raw: Any) -> Any:
    try:
        return parse_option_value(option, raw)
    except InvalidValue:
        return raw  # a spelling that another toolkit's translation reads


def field_of(problem: Problem, task: str, values: Mapping[str, Value]) -> str:
    """Return the name of the field that a problem belongs to; `more` for other options, empty for none."""
    first = problem.what.split(maxsplit=1)[0] if problem.what.strip() else ""
    if first == MORE:
        return MORE
    own = [option.name for option in fields(task)]
    if first.startswith("--"):
        flag = normalize_name(first.partition("=")[0])
        name = NAMES.get(flag, flag)
        return name if name in own else MORE
    for name in own:  # `data.jsonl:7`, `DIR/config.json`
        value = values.get(name) or ""
        given = [value] if isinstance(value, str) else value
        paths = [path.partition("#")[0] for text in given for path in text.split() if "/" in path or "." in path]
        if any(problem.what.startswith(path) for path in paths):
            return name
    return ""


def suggested_folder(root: Path, task: str) -> str:
    """Return a folder below `root` that does not exist, `sft-1`, as one would type it here."""
    number = 1
    while (folder := root / f"{task}-{number}").exists():
        number += 1
    here = Path.cwd()
    return os.fspath(folder.relative_to(here) if folder.is_relative_to(here) else folder)
