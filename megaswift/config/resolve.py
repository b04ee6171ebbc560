"""Resolves sources of options, the most important one last, to one checked set of sections; all mistakes of all sources
are in one ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megaswift.base.redaction import redact_problems
from megaswift.config.checks.adapter import train_type_defaults
from megaswift.config.checks.engine import engine_notices
from megaswift.config.checks.rl import missing_reward_problems
from megaswift.config.facts.generation_batch import (
    BATCH_OPTIONS,
    DefaultGradientAccumulation,
    default_rl_accumulation_steps,
)
from megaswift.config.facts.hub_ids import dataset_hubs
from megaswift.config.precedence import drop_contradicted, drop_superfluous
from megaswift.config.rules import broken_option_rules
from megaswift.config.sections import NAMES, OPTIONS, SECTIONS, Sections
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.options.given_options import LISTS_ALL, GivenOptions, Toolkits, unknown_option_problem
from megaswift.options.sources import ConfigSource, GivenOptionValue, accepted_notice, secret_values_of
from megaswift.options.spelling import problems_as_typed
from megaswift.options.tasks import ALIGNMENT, RL, TASK_NAMES, TASKS
from megaswift.options.values import option_value_text

SectionsCheck = Callable[[Sections], Iterable[Problem]]
"""Further checks of sections, which the options alone do not decide."""


class TrainingToolkits(Toolkits, Protocol):
    """The door of training, whose defaults differ from those of other toolkits."""

    def notices(self, sections: Sections, spellings: Iterable[str]) -> Iterable[str]:
        """Return lines about defaults that differ from those of the toolkit whose spellings were used."""


@dataclass(frozen=True)
class Resolver:
    """Turns sources into sections for one task."""

    toolkits: TrainingToolkits
    complete: bool = False
    """Model and dataset must be given."""
    beyond: SectionsCheck | None = None
    """Runs only if the sections are refused although each value is valid; its problems are reported with the
    others."""

    def resolve(self, task: str | None, sources: Iterable[ConfigSource]) -> Sections:
        """Return the checked sections of `task` (None: what the sources name, else sft).

        Raises:
            ConfigError: With every mistake of every source.
        """
        # Every option of every source, later ones over earlier ones
        given = GivenOptions(task=task)
        for weight, source in enumerate(self.toolkits.translate(list(sources), NAMES)):
            _take_source(given, source, weight, self.toolkits)
        # Options of earlier sources that later ones contradict, and options that change nothing
        if "task" not in given.wrong:
            drop_contradicted(given, _sections)
            drop_superfluous(given, _sections)
        sections = _sections(given)
        # All that is wrong
        problems = [*given.problems, *_check(sections, given)]
        if self.complete:
            problems += _missing(sections, given)
        if not problems:
            return replace(sections, notices=self._notices(sections, given))
        if self.beyond and not given.problems:
            reported = {p.what for p in problems}
            further = problems_as_typed(self.beyond(sections), given.typed, NAMES)
            problems += [p for p in further if p.what not in reported]
        raise _refused(problems, given)

    def _notices(self, sections: Sections, given: GivenOptions) -> tuple[str, ...]:
        """What was taken otherwise than written, then defaults that depend on other options, then other toolkits'."""
        passes = _passes(given)
        accepted = accepted_notice(given.accepted.values())
        room = _room_for_prompts(given).values()
        return (
            *given.notices,
            *([accepted] if accepted else ()),
            *(f"max_length {n}: room for prompts beside max_completion_length" for n in room),
            *_learning_rate(sections),
            *engine_notices(sections),
            *((passes.text,) if passes else ()),
            *self.toolkits.notices(sections, given.spellings),
        )


def _refused(problems: Iterable[Problem], given: GivenOptions) -> ConfigError:
    """All problems, each once: one given value may set several options. Without secrets."""
    some = f"megaswift TASK --help lists them all (TASK: {', '.join(TASKS)})"
    help_line = LISTS_ALL.format(task=given.task) if given.task else some
    complete = [replace(p, fix=help_line) if p.fix == LISTS_ALL else p for p in problems]
    return ConfigError(list(dict.fromkeys(redact_problems(complete, given.secrets))))


# ---- taking


def _take_source(given: GivenOptions, source: ConfigSource, weight: int, toolkits: TrainingToolkits) -> None:
    given.problems += source.problems
    given.notices += source.notices
    given.secrets += secret_values_of(source.givens)
    first: dict[str, GivenOptionValue] = {}
    for one in source.givens:
        if one.name in TASK_NAMES:
            _take_task(given, one, toolkits)
            continue
        option = OPTIONS.get(NAMES.get(one.name, ""))
        if option is None:
            given.problems += toolkits.explain(one, NAMES, given.task) or [unknown_option_problem(one, NAMES, SECTIONS)]
            continue
        given.spellings.append(one.name)
        given.take(option, one, first.get(option.name), toolkits)
        first.setdefault(option.name, one)
        given.weights[option.name] = weight
        for marks, holds in ((given.ambient, source.ambient), (given.compared, source.compared)):
            (marks.add if holds else marks.discard)(option.name)
    for accepted in source.accepted:
        given.spellings.append(accepted.spelling)
        given.accepted[accepted.name] = accepted


def _take_task(given: GivenOptions, one: GivenOptionValue, toolkits: TrainingToolkits) -> None:
    name = str(one.value).lower()
    if name not in TASKS:
        listed = ", ".join(f"{n} ({text})" for n, text in TASKS.items())
        kinds = ALIGNMENT if one.name == "rlhf_type" else tuple(TASKS)
        known = toolkits.instead("rlhf_type", name) or did_you_mean_hint(name, kinds)
        rule = f"is not a supported task; tasks are {listed}"
        given.problems.append(Problem(one.label, rule, known or f"use one of {', '.join(kinds)}"))
        given.wrong.add("task")
    elif given.task is None:
        given.task = name
    elif name != given.task:
        rule = f"conflicts with the command, which is {given.task}"
        given.problems.append(Problem(one.label, rule, f"megaswift {name} ..."))


# ---- sections


def _values(given: GivenOptions) -> dict[str, Any]:
    """The given values over those defaults that depend on `train_type`."""
    return {**train_type_defaults(given.values.get("train_type")), **dataset_hubs(given.values, given.wrong)}


def _sections(given: GivenOptions) -> Sections:
    values = _values(given) | _room_for_prompts(given)
    names = frozenset(name for name in given.typed if values.get(name) is not None and name not in given.ambient)
    if values.get("packing") is None:
        values["packing"] = given.task in ALIGNMENT
    if values.get("add_version") is None:
        values["add_version"] = "output_dir" not in names and not values.get("overwrite_output_dir")
    if passes := _passes(given):
        values["gradient_accumulation_steps"] = passes.number
    parts = {
        key: cls(**{n: v for n, v in values.items() if OPTIONS[n].section == key}) for key, cls in SECTIONS.items()
    }
    return Sections(task=given.task or "sft", **parts, given=names, typed=dict(given.typed))


def _passes(given: GivenOptions) -> DefaultGradientAccumulation | None:
    """Forward passes of a step of reinforcement learning where no batch size was given."""
    if given.wrong & {"num_generations", *BATCH_OPTIONS}:
        return None
    return default_rl_accumulation_steps(given.task, _values(given))


def _room_for_prompts(given: GivenOptions) -> dict[str, int]:
    """`max_length` where only `max_completion_length` is given and leaves nothing of the default to prompts."""
    default = OPTIONS["max_length"].default
    completion = given.values.get("max_completion_length")
    if given.task not in RL or "max_length" in {*given.values, *given.wrong} or completion is None:
        return {}
    return {"max_length": completion + default} if completion >= default else {}


def _learning_rate(c: Sections) -> Iterator[str]:
    default = OPTIONS["learning_rate"].default
    if c.optim.learning_rate != default and "learning_rate" not in c.given:
        yield (
            f"learning_rate {option_value_text(c.optim.learning_rate)}, the default with train_type "
            f"{c.model.train_type} "
            f"(full: "
            f"{option_value_text(default)})"
        )


# ---- checks


def _check(sections: Sections, given: GivenOptions) -> list[Problem]:
    """What the options mean together; nothing where the task, on which it depends, is not known."""
    if "task" in given.wrong:
        return []
    contrary: list[Problem] = []
    for accepted in given.accepted.values():
        if accepted.unless in sections.given:
            rule = f"conflicts with {given.labels[accepted.unless]}"
            contrary.append(Problem(accepted.label, rule, "leave one of the two out"))
    for accepted in given.accepted.values():
        option, value = accepted.only_with
        if option and sections.value(option) != value:
            contrary.append(Problem(accepted.label, f"is not supported: {accepted.reason}", f"--{option} {value}"))
    return contrary + list(broken_option_rules(sections, given.labels, frozenset(given.wrong)))


def _missing(sections: Sections, given: GivenOptions) -> Iterable[Problem]:
    if sections.model.model is None and "model" not in given.wrong:
        yield Problem("--model", "is missing", "give --model DIR, a Hugging Face model folder")
    if not sections.data.dataset and "dataset" not in given.wrong:
        yield Problem("--dataset", "is missing", "--dataset data.jsonl")
    if not given.wrong & {"reward_funcs", "reward_model", "environment"}:
        yield from missing_reward_problems(sections)
