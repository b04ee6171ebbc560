"""Resolves sources of options to one checked set of sections. Later sources override earlier ones, and one ConfigError
lists all mistakes of all sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megaswift.base.redaction import redact_problems
from megaswift.bridge.adapters.options.checks import train_type_defaults
from megaswift.config.precedence import drop_contradicted, drop_superfluous
from megaswift.config.rules import broken_option_rules
from megaswift.config.sections import NAMES, OPTIONS, SECTIONS, Sections
from megaswift.data.options.hub_ids import dataset_hubs
from megaswift.engine.options.engine_checks import engine_notices
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.options.given_options import LISTS_ALL, GivenOptions, Toolkits, unknown_option_problem
from megaswift.options.sources import ConfigSource, GivenOptionValue, accepted_notice, secret_values_of
from megaswift.options.spelling import problems_as_typed
from megaswift.options.tasks import ALIGNMENT, CAUSAL_LM, PREFERENCES, RL, SAMPLED, TASK_NAMES, TASK_TYPES, TASKS
from megaswift.options.values import option_value_text
from megaswift.trainers.options.schedule import FromScratchSchedule, from_scratch_defaults
from megaswift.trainers.rl.options.checks import missing_reward_problems
from megaswift.trainers.rl.options.generation_batch import (
    BATCH_OPTIONS,
    DefaultGradientAccumulation,
    default_rl_accumulation_steps,
)

SectionsCheck = Callable[[Sections], Iterable[Problem]]
"""Further checks of sections, which need more than the options, such as the model's configuration."""


class TrainingToolkits(Toolkits, Protocol):
    """Translation from other toolkits for training, including notices about defaults that differ."""

    def notices(self, sections: Sections, spellings: Iterable[str]) -> Iterable[str]:
        """Return lines about defaults that differ from those of the toolkit whose spellings were used."""


@dataclass(frozen=True)
class Resolver:
    """Turns sources into sections for one task."""

    toolkits: TrainingToolkits
    complete: bool = False
    """Whether model and dataset must be given."""
    beyond: SectionsCheck | None = None
    """Runs only if each value is valid but the sections are refused, so that one error also lists its problems."""

    def resolve(self, task: str | None, sources: Iterable[ConfigSource]) -> Sections:
        """Return the checked sections of `task` (None: the task that the sources name, else sft).

        Raises:
            ConfigError: With every mistake of every source.
        """
        # Take every option of every source; a later source overrides an earlier one.
        given = GivenOptions(task=task)
        for weight, source in enumerate(self.toolkits.translate(list(sources), NAMES)):
            _take_source(given, source, weight, self.toolkits)
        # Drop options of earlier sources that later ones contradict, and options that change nothing.
        if "task" not in given.wrong:
            drop_contradicted(given, _sections)
            drop_superfluous(given, _sections)
        sections = _sections(given)
        # Collect all problems.
        problems = [*given.problems, *_check(sections, given)]
        if self.complete:
            problems += _missing(sections, given)
        if not problems:
            return replace(sections, notices=self._notices(sections, given))
        if self.beyond and not given.problems:
            reported = {p.what for p in problems}
            further = problems_as_typed(self.beyond(sections), given.typed, NAMES)
            problems += [p for p in further if p.what not in reported]
        raise _config_error(problems, given)

    def _notices(self, sections: Sections, given: GivenOptions) -> tuple[str, ...]:
        """Return the notices: options read differently from what was written, then defaults that depend on other
        options, then defaults that differ from those of another toolkit."""
        accepted = accepted_notice(given.accepted.values())
        accumulation = _default_accumulation(given)
        return (
            *given.notices,
            *([accepted] if accepted else ()),
            *_room_notice(given),
            *_learning_rate_notice(sections),
            *engine_notices(sections),
            *((accumulation.text,) if accumulation else ()),
            *self.toolkits.notices(sections, given.spellings),
        )


def _config_error(problems: Iterable[Problem], given: GivenOptions) -> ConfigError:
    """Return one error with all problems, without secrets. A problem is listed once, although one given value may set
    several options and be wrong for each."""
    any_task = f"megaswift TASK --help all lists them (TASK: {', '.join(TASKS)})"
    help_line = LISTS_ALL.format(task=given.task) if given.task else any_task
    with_help = [replace(p, fix=help_line) if p.fix == LISTS_ALL else p for p in problems]
    return ConfigError(list(dict.fromkeys(redact_problems(with_help, given.secrets))))


# ---- taking the options of the sources


def _take_source(given: GivenOptions, source: ConfigSource, weight: int, toolkits: TrainingToolkits) -> None:
    given.problems += source.problems
    given.notices += source.notices
    given.secrets += secret_values_of(source.givens)
    first_of_source: dict[str, GivenOptionValue] = {}
    for value in source.givens:
        if value.name in TASK_NAMES:
            _take_task(given, value, toolkits)
            continue
        option = OPTIONS.get(NAMES.get(value.name, ""))
        if option is None:
            explained = toolkits.explain(value, NAMES, given.task)
            given.problems += explained or [unknown_option_problem(value, NAMES, SECTIONS)]
            continue
        given.spellings.append(value.name)
        given.take(option, value, first_of_source.get(option.name), toolkits)
        first_of_source.setdefault(option.name, value)
        given.weights[option.name] = weight
        # The marks of an option are those of the source that its value is from.
        for marked, applies in ((given.ambient, source.ambient), (given.compared, source.compared)):
            if applies:
                marked.add(option.name)
            else:
                marked.discard(option.name)
    for accepted in source.accepted:
        given.spellings.append(accepted.spelling)
        given.accepted[accepted.name] = accepted


_TYPES = {CAUSAL_LM: "the language model of sft and other tasks", **{name: TASKS[name] for name in TASK_TYPES}}
"""The values of `task_type`."""


def _take_task(given: GivenOptions, value: GivenOptionValue, toolkits: TrainingToolkits) -> None:
    name = str(value.value).lower()
    typed = value.name == "task_type"
    if typed and name in ("none", CAUSAL_LM) and given.task not in TASK_TYPES:
        return
    known = _TYPES if typed else TASKS
    if name not in known:
        listed = ", ".join(f"{n} ({text})" for n, text in known.items())
        allowed = ALIGNMENT if value.name == "rlhf_type" else tuple(known)
        hint = toolkits.instead("task_type" if typed else "rlhf_type", name) or did_you_mean_hint(name, allowed)
        rule = f"is not a supported task; tasks are {listed}"
        given.problems.append(Problem(value.label, rule, hint or f"use one of {', '.join(allowed)}"))
        given.wrong.add("task")
    elif given.task is None or (given.task == "sft" and name in TASK_TYPES):
        given.task = name
    elif name != given.task:
        rule = f"conflicts with the command, which is {given.task}"
        given.problems.append(Problem(value.label, rule, f"megaswift {name} ..."))


# ---- building the sections


def _values(given: GivenOptions) -> dict[str, Any]:
    """Return the given values, data sets with their hub, and for values not given the defaults of `train_type` and
    `random_init`."""
    values = {**train_type_defaults(given.values.get("train_type")), **dataset_hubs(given.values, given.wrong)}
    return {**values, **from_scratch_defaults(given.task or "sft", values)}


def _sections(given: GivenOptions) -> Sections:
    # Values, and defaults that depend on other options.
    values = _values(given) | _default_max_length(given)
    set_by_user = frozenset(name for name in given.typed if values.get(name) is not None and name not in given.ambient)
    if values.get("packing") is None:
        values["packing"] = given.task in PREFERENCES + RL
    if values.get("add_version") is None:
        values["add_version"] = "output_dir" not in set_by_user and not values.get("overwrite_output_dir")
    if accumulation := _default_accumulation(given):
        values["gradient_accumulation_steps"] = accumulation.number

    # One object for each section.
    parts = {
        key: cls(**{n: v for n, v in values.items() if OPTIONS[n].section == key}) for key, cls in SECTIONS.items()
    }
    if "warmup_steps" in from_scratch_defaults(given.task or "sft", given.values):
        parts["schedule"] = FromScratchSchedule(**vars(parts["schedule"]))
    return Sections(task=given.task or "sft", **parts, given=set_by_user, typed=dict(given.typed))


def _default_accumulation(given: GivenOptions) -> DefaultGradientAccumulation | None:
    """Return `gradient_accumulation_steps` for reinforcement learning without a given batch size; None elsewhere."""
    if given.wrong & {"num_generations", *BATCH_OPTIONS}:
        return None
    return default_rl_accumulation_steps(given.task, _values(given))


def _default_max_length(given: GivenOptions) -> dict[str, int]:
    """Return a larger `max_length` if the given `max_completion_length` would leave no room for prompts in it; else
    nothing. ms-swift's `max_length` is the limit of prompts alone."""
    limit = given.values.get("max_length", OPTIONS["max_length"].default)
    completion = given.values.get("max_completion_length")
    if given.task not in SAMPLED or "max_length" in given.wrong or completion is None or limit is None:
        return {}
    return {"max_length": completion + limit} if completion >= limit else {}


def _room_notice(given: GivenOptions) -> Iterator[str]:
    for larger in _default_max_length(given).values():
        if given.values.get("max_length") is None:
            yield f"max_length {larger}: room for prompts beside max_completion_length"
        else:
            limit = given.values["max_length"]
            yield (
                f"max_length {limit} is read as the limit of prompts, because completions alone may be as long: rows "
                f"have up to {larger} tokens"
            )


def _learning_rate_notice(c: Sections) -> Iterator[str]:
    default = OPTIONS["learning_rate"].default
    if c.model.random_init:  # the first screen shows it
        return
    if c.optim.learning_rate != default and "learning_rate" not in c.given:
        yield (
            f"learning_rate {option_value_text(c.optim.learning_rate)}, the default with train_type "
            f"{c.model.train_type} (full: {option_value_text(default)})"
        )


# ---- checks


def _check(sections: Sections, given: GivenOptions) -> list[Problem]:
    """Return the problems of options taken together. An unknown task hides them, since they depend on the task."""
    if "task" in given.wrong:
        return []
    problems: list[Problem] = []
    # Options of other toolkits that usually change nothing, but would here.
    for accepted in given.accepted.values():
        if accepted.unless in sections.given:
            rule = f"conflicts with {given.labels[accepted.unless]}"
            problems.append(Problem(accepted.label, rule, "leave one of the two out"))
    for accepted in given.accepted.values():
        option, value = accepted.only_with
        if option and sections.value(option) != value:
            problems.append(Problem(accepted.label, f"is not supported: {accepted.reason}", f"--{option} {value}"))
    # The rules of our own options.
    return problems + list(broken_option_rules(sections, given.labels, frozenset(given.wrong)))


def _missing(sections: Sections, given: GivenOptions) -> Iterable[Problem]:
    if sections.model.model is None and "model" not in given.wrong:
        yield Problem("--model", "is missing", "give --model DIR, a Hugging Face model folder")
    if not sections.data.dataset and "dataset" not in given.wrong:
        yield Problem("--dataset", "is missing", "--dataset data.jsonl")
    if not given.wrong & {"reward_funcs", "reward_model", "environment"}:
        yield from missing_reward_problems(sections)
