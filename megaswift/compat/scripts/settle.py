"""Lets the loader check the translated options, and adds the other toolkit's defaults where they differ.

Owns what happens to an option that the loader refuses or leaves out: it becomes a question or a comment.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from megaswift import compat
from megaswift.compat.defaults import DifferingDefault, defaults_differing_from_toolkit
from megaswift.compat.scripts.migrated_run import MigratedOption, MigratedRun
from megaswift.config.resolve import Resolver
from megaswift.config.rules import ignored_option_names
from megaswift.config.sections import NAMES, OPTIONS, Sections
from megaswift.errors import ConfigError, Problem
from megaswift.options.tasks import RL
from megaswift.options.values import InvalidValue, parse_option_value

ROWS_PER_STEP = 16
"""What ms-swift makes of a batch without accumulation, at least."""
LARGEST_CONFIG = 1 << 20
MOST_ROUNDS = 400


def settle_options(run: MigratedRun) -> None:
    """Takes out what the loader refuses, one option after the other, until the rest loads."""
    for _ in range(MOST_ROUNDS):
        try:
            run.sections = Resolver(compat).resolve(run.task, [run.source()])
            break
        except ConfigError as error:
            _drop_one(run, error.problems)
    else:
        run.ask("the file", "does not load", "megaswift config FILE lists the problems")


def leave_out_idle_options(run: MigratedRun) -> None:
    """Takes out what the loader leaves out with a notice."""
    run.left_out += [f"{given.label}: {reason}" for given, reason in run.accepted.values()]
    run.accepted = {}
    sections = run.sections
    if sections is None:
        return
    for name in [n for n in run.options if n not in sections.typed]:
        option = run.options.pop(name)
        notice = next((n for n in sections.notices if n.startswith(option.given.label)), "")
        reason = notice.removeprefix(option.given.label).removeprefix(" has no effect: ") or "it has no effect here"
        if not option.of_default:
            run.left_out.append(f"{option.label}: {reason}")
    shown = {option.given.label for option in run.options.values()}
    run.notes += [n for n in sections.notices if n not in run.notes and any(n.startswith(label) for label in shown)]


def missing_options(run: MigratedRun) -> list[Problem]:
    """Report the required options that the migrated file lacks."""
    try:
        Resolver(compat, complete=True).resolve(run.task, [run.source()])
    except ConfigError as error:
        return error.problems
    return []


def _drop_one(run: MigratedRun, problems: list[Problem]) -> None:
    for problem in problems:
        accepted = next((n for n, (given, _) in run.accepted.items() if given.label == problem.what), None)
        if accepted is not None:
            del run.accepted[accepted]
            run.ask_problem(problem)
            return
        if (option := _culprit(run, problem)) is not None:
            del run.options[option.name]
            what = f"default of {run.toolkit}, {option.given.label}" if option.of_default else option.label
            run.ask_problem(problem, what)
            return
    if run.options:
        run.ask_problem(problems[0], run.options.popitem()[1].label)


def _culprit(run: MigratedRun, problem: Problem) -> MigratedOption | None:
    """The option to take out: a default that was written out, else the one that the message names."""
    words = {NAMES.get(w, "") for w in re.findall(r"\w+", f"{problem.what} {problem.rule}")}
    named = [o for o in run.options.values() if o.given.label in problem.what or o.name in words]
    defaults = [o for o in named if o.of_default]
    first = [
        o for o in named if problem.what.removeprefix("--").startswith((o.given.label, f"{o.name} ", f"{o.name}:"))
    ]
    return next(iter([*defaults, *first, *named]), None)


# ---- defaults


def add_differing_defaults(run: MigratedRun) -> None:
    """Writes out what the other toolkit does by default and megaswift does not."""
    sections = run.sections
    if sections is None:
        return
    idle = ignored_option_names(sections)
    for row in defaults_differing_from_toolkit(sections, run.toolkit):
        if row.option not in idle and row.option not in {*run.options, *run.unset}:
            _add_default(run, row, sections)


def _add_default(run: MigratedRun, row: DifferingDefault, sections: Sections) -> None:
    name = row.option
    text = row.value or "".join(_computed(run, row, sections))
    comment = f"default of {run.toolkit}: {row.theirs}; here: {row.ours}"
    if text == "unset":
        return
    if row.option == "importance_sampling_mode" and not row.value:
        name = "importance_sampling_correction"
        text = "false"
    try:
        value = parse_option_value(OPTIONS[name].of_task(run.task), text) if text else None
    except InvalidValue:
        value = None
    if value is None:
        run.ask(f"{name} is not given", comment, f"add {name}: VALUE")
    elif name == "use_hf" and _is_local(sections):
        return
    else:
        run.add(MigratedOption(name, value, name, comment, True))


def _is_local(sections: Sections) -> bool:
    """Whether the model is a folder, or not named: then no hub is asked for it."""
    model = sections.model.model
    return model is None or model.startswith(("/", ".", "~")) or Path(model).is_dir()


def _computed(run: MigratedRun, row: DifferingDefault, c: Sections) -> Iterator[str]:
    """The value of a default that depends on the run; `unset` where nothing needs to be written."""
    if row.option == "gradient_accumulation_steps":
        processes = run.launched_processes()
        if c.train.global_batch_size is not None or c.task in RL:
            yield "unset"
        elif processes is not None:
            yield str(max(1, math.ceil(ROWS_PER_STEP / c.train.per_device_train_batch_size / processes)))
    elif row.option == "eval_steps":
        yield str(c.checkpoint.save_steps or 500)
    elif row.option == "lora_alpha":
        yield str(2 * c.lora.lora_rank)
    elif row.option == "importance_sampling_mode":
        yield "false"
    elif row.option == "max_length" and (length := _model_length(c)):
        yield str(length)


def _model_length(c: Sections) -> int | None:
    """`max_position_embeddings` of a model that is a folder here."""
    path = Path(c.model.model or "") / "config.json"
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            return None
        length = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return length if isinstance(length, int) and length > 0 else None
