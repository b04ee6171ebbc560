"""Translates a training command of another toolkit into megaswift's options, by the tables of the command line.

Owns the order of the steps: sources, names and values, meanings, launch, defaults, the check by the loader itself. What
the loader refuses becomes a question to the user, so that the rest of the file always loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from megaswift.base.redaction import is_secret
from megaswift.compat.explanation import accepted_option, unknown_option_problems
from megaswift.compat.files.accelerate_file import named_accelerate_file
from megaswift.compat.names.answers import foreign_value_advice
from megaswift.compat.names.architecture import ARCHITECTURE
from megaswift.compat.scripts.launch import launch_of_command
from megaswift.compat.scripts.meanings import with_own_meanings, with_run_lengths
from megaswift.compat.scripts.migrated_run import NOT_SET, SECRET, MigratedOption, MigratedRun
from megaswift.compat.scripts.settle import add_differing_defaults, leave_out_idle_options, settle_options
from megaswift.compat.scripts.toolkits import MEGASWIFT, ForeignCommand, file_of_script
from megaswift.compat.swift_rollout import translate_rollout_correction_options
from megaswift.compat.translation import RENAMED, SWITCHES, TASK_SPELLINGS, translated_options
from megaswift.config.sections import NAMES, OPTIONS, SECTIONS, TRAINING
from megaswift.errors import ConfigError
from megaswift.options.command_line import read_command_line
from megaswift.options.files import read_config_file
from megaswift.options.given_options import LISTS_ALL, unknown_option_problem
from megaswift.options.sources import ConfigSource, GivenOptionValue, normalize_name
from megaswift.options.tasks import CAUSAL_LM, TASK_NAMES, TASK_TYPES, TASKS
from megaswift.options.values import (
    FALSE,
    InvalidValue,
    option_value_text,
    parse_option_value,
    resets_number_to_default,
)

NAMES_OF_TASK = frozenset({*TASK_SPELLINGS, *TASK_NAMES, "pref_loss"})
"""Options that the line `task` of the file is."""


def migrated_run(command: ForeignCommand, folder: Path) -> MigratedRun:
    """The command in megaswift's options. `folder`: of the script, for files that it names."""
    run = MigratedRun(command.toolkit, command.place, command.task)
    for note in command.notes:
        run.ask("check", note)
    unresolved = {w.text.partition("=")[2] if w.text[:2] == "--" else w.text: w.unresolved for w in command.words}
    sources = [*launch_of_command(run, command, folder), *_sources(run, command, folder)]
    for source in translate_rollout_correction_options(sources):
        run.notes += [n for n in source.notices]
        for problem in source.problems:
            run.ask_problem(problem)
        _take(run, with_own_meanings(run, source.givens, folder), {k: v for k, v in unresolved.items() if v})
    if run.task is None:
        run.ask("task", "the command does not say which", f"megaswift TASK FILE, TASK one of {', '.join(TASKS)}")
        return run
    with_run_lengths(run)
    settle_options(run)
    if run.toolkit != MEGASWIFT:
        add_differing_defaults(run)
        settle_options(run)
    leave_out_idle_options(run)
    _name_lost_options(run, command)
    return run


def _name_lost_options(run: MigratedRun, command: ForeignCommand) -> None:
    """Asks about options of the command that have left no trace in the file."""
    told = {*run.left_out, *run.notes, *run.open, *run.launch}
    for option in run.options.values():
        told |= {option.name, option.label, option.comment}
        if isinstance(option.value, Mapping):  # several options in one, such as megatron_architecture
            told |= {*option.value}
    words = {word.replace("-", "_").lower() for text in told for word in re.findall(r"[\w-]+", text)}
    typed = [w.text.partition("=")[0] for w in command.words if re.match(r"--[A-Za-z]", w.text)]
    for flag in dict.fromkeys(typed):
        name = normalize_name(flag)
        if name in NAMES_OF_TASK:
            continue
        own = NAMES.get(RENAMED.get(name, name))
        if not any(word == own or word.strip("_").endswith(name.lower()) for word in words):
            run.ask(flag, "has left no trace in the file", LISTS_ALL.format(task=run.task or "TASK"))


def _sources(run: MigratedRun, command: ForeignCommand, folder: Path) -> Iterable[ConfigSource]:
    """The file that the command reads, then its own words."""
    if command.file is not None:
        yield command.file
        return
    line = read_command_line([w.text for w in command.words], TRAINING)
    for name in line.files:
        name = name.rpartition(")/")[2] if re.search(r"BASH_SOURCE|\$0", name) else name  # the script's own folder
        place = file_of_script(folder, name) or Path(name)
        if not place.is_file() and (names := _names_in(command, name)):
            run.ask(name, NOT_SET.format(", ".join(names)))
            continue
        try:
            yield named_accelerate_file(read_config_file(str(place), TRAINING))
        except ConfigError as error:
            for problem in error.problems:
                run.ask_problem(problem)
    yield ConfigSource(tuple(line.givens), tuple(line.problems))


def _names_in(command: ForeignCommand, text: str) -> tuple[str, ...]:
    """What is unresolved in the word that is this text."""
    return next((word.unresolved for word in command.words if word.text == text), ())


def _take(run: MigratedRun, givens: Iterable[GivenOptionValue], unresolved: Mapping[str, tuple[str, ...]]) -> None:
    read = list(givens)
    translated = list(translated_options(read))
    kept = {t.label for t in translated}
    for given in read:
        if given.label not in kept and given.name not in ARCHITECTURE:
            why = "switched off it means nothing" if given.name in SWITCHES else "another option of the command says so"
            run.left_out.append(f"{given.label}: {why}")
    for given in translated:
        own = NAMES.get(given.name, given.name)
        if own in OPTIONS and is_secret(own):
            run.left_out.append(f"--{given.name}: {SECRET}")
        elif names := _unresolved_in(given, unresolved):
            run.ask(f"{own}: {option_value_text(given.value)}", NOT_SET.format(", ".join(names)))
        elif given.name in TASK_NAMES:
            _take_task(run, given)
        else:
            _take_option(run, given)


def _unresolved_in(given: GivenOptionValue, unresolved: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    values = given.value if isinstance(given.value, list | tuple) else [given.value]
    return tuple(dict.fromkeys(name for v in values for name in unresolved.get(str(v), ())))


def _take_task(run: MigratedRun, given: GivenOptionValue) -> None:
    name = str(given.value).lower()
    if name in TASKS and (run.task in (None, name) or (run.task == "sft" and name in TASK_TYPES)):
        run.task = name
    elif name not in ("rlhf", "none", CAUSAL_LM):
        advice = foreign_value_advice("task_type" if given.name == "task_type" else "rlhf_type", name)
        run.ask(given.label, "is not a task here" if name not in TASKS else f"the command is {run.task}", advice)


def _take_option(run: MigratedRun, given: GivenOptionValue) -> None:
    option = OPTIONS.get(NAMES.get(given.name, ""))
    positive = given.name.removeprefix("no_")
    if option is None and positive != given.name:
        known = OPTIONS.get(NAMES.get(positive, ""))
        if known is not None and (known.kind == "bool" or known.switches):
            value = "true" if str(given.value).lower() in FALSE else "false"
            _take_option(run, replace(given, name=positive, value=value))
            return
    if option is None:
        _take_unknown(run, given)
        return
    if resets_number_to_default(option, given.value):
        run.left_out.append(f"{given.label}: the default")
        return
    try:
        value = parse_option_value(option.of_task(run.task if run.task in TASKS else None), given.value)
    except InvalidValue as error:
        words = given.value if isinstance(given.value, list | tuple) else [given.value]
        advice = next((text for w in words if (text := foreign_value_advice(option.name, str(w)))), error.fix)
        run.ask(given.label, error.rule, advice)
        return
    if option.section == "launch" and option.name != "launcher" and value is not None:
        text = option_value_text(value)
        if run.launch.setdefault(option.name, text) != text:
            run.left_out.append(f"{given.label}: the launcher sets {run.launch[option.name]}")
        return
    if value is None:
        run.replace(option.name, given.label)
        run.unset.add(option.name)
        run.left_out.append(f"{given.label}: {option.name} stays unset")
        return
    comment = _comment(option.name, value, given)
    run.add(MigratedOption(option.name, value, given.label, comment, spelling=given.spelling))


def _comment(name: str, value: object, given: GivenOptionValue) -> str:
    """What stood there, where the line does not say the same."""
    raw = given.value[0] if isinstance(given.value, list | tuple) and len(given.value) == 1 else given.value
    same = option_value_text(raw).strip().lower() == option_value_text(value).lower() or raw is value
    try:
        same = same or (not isinstance(value, bool) and isinstance(value, int | float) and float(str(raw)) == value)
    except ValueError:
        same = False
    if isinstance(value, bool) and str(raw).lower() in (option_value_text(value), "none"):
        same = True
    written = given.spelling.rstrip(":").split(" ")[-1].lstrip("-").replace("-", "_")
    return "" if same and written == name else given.label


def _take_unknown(run: MigratedRun, given: GivenOptionValue) -> None:
    accepted = accepted_option(given)
    if accepted is None:
        for problem in unknown_option_problems(given, NAMES, run.task) or [
            unknown_option_problem(given, NAMES, SECTIONS)
        ]:
            run.ask_problem(problem)
        return
    run.accepted.pop(accepted.name, None)
    run.accepted[accepted.name] = (given, accepted.reason)
