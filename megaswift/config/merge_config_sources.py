"""Sources in order of weight to one checked set of sections; all mistakes of all sources in one ConfigError.

Owns precedence, spellings and task names. Reading is `read_config_file_and_command_line.py`, values are
`parse_option_values.py`, meaning is `check_all_option_rules.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megaswift.compat.defaults import differing_defaults_notice
from megaswift.compat.files.accelerate_file import expand_accelerate_files
from megaswift.compat.files.deepspeed_file import source_from_deepspeed_file
from megaswift.compat.files.hostfile import expand_hostfile
from megaswift.compat.names.answers import NAMES_ELSEWHERE, foreign_option_advice, foreign_value_advice
from megaswift.compat.names.neutral import NeutralOption, neutral_notice, neutral_option
from megaswift.compat.swift_rollout import translate_rollout_correction_options
from megaswift.compat.translation import KNOWN_KEYS, translated_options
from megaswift.config.adapter_rules import train_type_defaults
from megaswift.config.check_all_option_rules import (
    BATCH,
    broken_option_rules,
    ignored_option_names,
    options_contradicted_by_later_source,
    options_dropped_with_notice,
)
from megaswift.config.data import ALIGNMENT, RL
from megaswift.config.engine_rules import engine_notices
from megaswift.config.generation_batch import BATCH_OPTIONS, DefaultGradientAccumulation, default_rl_accumulation_steps
from megaswift.config.hub_dataset_ids import dataset_hubs
from megaswift.config.megatron_extra_kwargs import transformer_config_option
from megaswift.config.option import Option
from megaswift.config.parse_option_values import (
    FALSE,
    InvalidValue,
    option_value_text,
    parse_option_value,
    resets_number_to_default,
)
from megaswift.config.read_config_file_and_command_line import ConfigSource, GivenOptionValue, secret_values_of
from megaswift.config.rl_conflict_rules import missing_reward_problems
from megaswift.config.sections import NAMES, OPTIONS, SECTIONS, TASKS, Sections, names_task
from megaswift.config.user_spelling import TypedOption, problems_as_typed
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.redaction import has_url_credentials, redact_problems, redacted_urls

LISTS_ALL = "megaswift {task} --help lists them all"
"""The fix of an unknown option; the task is filled in once all sources are read, because a later one may name it."""
DEEPSPEED_FILE = 0
"""The weight of what a DeepSpeed file says: every other source counts more."""
_SAMPLING = re.compile("(vllm|sglang|lmdeploy)_")
"""Prefixes of settings of samplers."""
_FOR_DATA = "set the file system's variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
CREDENTIALS = {
    "mlflow_tracking_uri": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    "rollout_server_url": "set MEGASWIFT_ROLLOUT_API_KEY",
    **dict.fromkeys(("dataset", "val_dataset"), _FOR_DATA),
}
"""By option: the variables that replace credentials in a URL, which config.yaml, logs and checkpoints would keep."""
KEPT = frozenset({"train_type", "model", "dataset", "output_dir", "resume_from_checkpoint"})
"""Options of a file that the command line replaces by their own name only: without one the run would be another."""


@dataclass
class ResolveState:
    """What was understood so far, and what was wrong."""

    values: dict[str, Any] = field(default_factory=dict)
    typed: dict[str, TypedOption] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    """Which source each value is from; a larger number counts more."""
    wrong: set[str] = field(default_factory=set)
    ambient: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Spellings, as they were given."""
    neutral: dict[str, tuple[str, NeutralOption]] = field(default_factory=dict)
    """Accepted options of other toolkits that change nothing here: name to label and reason."""
    task: str | None = None

    @property
    def labels(self) -> dict[str, str]:
        """How the user wrote each option, with its value."""
        return {name: typed.label for name, typed in self.typed.items()}

    def forget(self, name: str) -> None:
        """As if the option had not been given."""
        for known in (self.values, self.typed, self.weights):
            known.pop(name, None)
        self.ambient.discard(name)
        self.wrong.discard(name)

    def without(self, name: str, notice: str) -> ResolveState:
        """A copy that has forgotten an option, with a notice that says so, where there is one."""
        rest = replace(
            self,
            values=dict(self.values),
            typed=dict(self.typed),
            weights=dict(self.weights),
            ambient=set(self.ambient),
            wrong=set(self.wrong),
            neutral=dict(self.neutral),
            notices=[*self.notices, *([notice] if notice else [])],
        )
        rest.forget(name)
        return rest


_SectionsCheck = Callable[[Sections], Iterable[Problem]]
"""Further checks of sections, which the options alone do not decide."""


def checked_sections_from_sources(
    task: str | None, sources: Iterable[ConfigSource], complete: bool = False, beyond: _SectionsCheck | None = None
) -> Sections:
    """The checked sections of `task` (None: what the sources say, else sft). `complete`: model and dataset must be
    there.

    `beyond` runs only if the sections are refused although each value is valid; its problems are reported with the
    others.
    """
    state = ResolveState(task=task)
    read = expand_hostfile(expand_accelerate_files(list(sources)))
    for weight, source in enumerate([source_from_deepspeed_file(read), *translate_rollout_correction_options(read)]):
        _take(state, source, weight)
    state, sections = _without_superfluous(*_later_wins(state))
    problems = [*state.problems, *_check(sections, state), *(_missing(sections, state) if complete else ())]
    if not problems:
        return replace(sections, notices=_notices(sections, state))
    if beyond and not state.problems:
        reported = {p.what for p in problems}
        problems += [p for p in problems_as_typed(beyond(sections), state.typed, NAMES) if p.what not in reported]
    raise _refused(problems, state)


def _refused(problems: Iterable[Problem], state: ResolveState) -> ConfigError:
    """All problems, each once: one given value may set several options. Without secrets."""
    some = f"megaswift TASK --help lists them all (TASK: {', '.join(TASKS)})"
    help_line = LISTS_ALL.format(task=state.task) if state.task else some
    complete = [replace(p, fix=help_line) if p.fix == LISTS_ALL else p for p in problems]
    return ConfigError(list(dict.fromkeys(redact_problems(complete, state.secrets))))


def _notices(sections: Sections, state: ResolveState) -> tuple[str, ...]:
    """What was taken otherwise than written, then defaults that depend on other options, then other toolkits'."""
    passes = _passes(state)
    others = differing_defaults_notice(sections, state.foreign, ignored_option_names(sections))
    accepted = neutral_notice(
        ((label, name) for name, (label, _) in state.neutral.items()),
        {name: option for name, (_, option) in state.neutral.items()},
    )
    return (
        *state.notices,
        *([accepted] if accepted else ()),
        *(f"max_length {n}: room for prompts beside max_completion_length" for n in _room_for_prompts(state).values()),
        *_learning_rate(sections),
        *engine_notices(sections),
        *((passes.text,) if passes else ()),
        *others,
    )


def _values(state: ResolveState) -> dict[str, Any]:
    """The given values over those defaults that depend on `train_type`."""
    return {**train_type_defaults(state.values.get("train_type")), **dataset_hubs(state.values, state.wrong)}


def _sections(state: ResolveState) -> Sections:
    values = _values(state) | _room_for_prompts(state)
    given = frozenset(name for name in state.typed if values.get(name) is not None and name not in state.ambient)
    if values.get("packing") is None:
        values["packing"] = state.task in ALIGNMENT
    if values.get("add_version") is None:
        values["add_version"] = "output_dir" not in given and not values.get("overwrite_output_dir")
    if passes := _passes(state):
        values["gradient_accumulation_steps"] = passes.number
    parts = {
        key: cls(**{n: v for n, v in values.items() if OPTIONS[n].section == key}) for key, cls in SECTIONS.items()
    }
    return Sections(task=state.task or "sft", **parts, given=given, typed=dict(state.typed))


def _passes(state: ResolveState) -> DefaultGradientAccumulation | None:
    """Forward passes of a step of reinforcement learning where no batch size was given."""
    if state.wrong & {"num_generations", *BATCH_OPTIONS}:
        return None
    return default_rl_accumulation_steps(state.task, _values(state))


def _room_for_prompts(state: ResolveState) -> dict[str, int]:
    """`max_length` where only `max_completion_length` is given and leaves nothing of the default to prompts."""
    default, completion = OPTIONS["max_length"].default, state.values.get("max_completion_length")
    if state.task not in RL or "max_length" in {*state.values, *state.wrong} or completion is None:
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


def _check(sections: Sections, state: ResolveState) -> list[Problem]:
    """What the options mean together; nothing where the task, on which it depends, is not known."""
    if "task" in state.wrong:
        return []
    contrary = [
        Problem(label, f"conflicts with {state.labels[other]}", "leave one of the two out")
        for label, option in state.neutral.values()
        if (other := option.unless) in sections.given
    ]
    for label, entry in state.neutral.values():
        option, value = entry.true_with
        if option and sections.value(option) != value:
            contrary.append(Problem(label, f"is not supported: {entry.reason}", f"--{option} {value}"))
    return contrary + list(broken_option_rules(sections, state.labels, frozenset(state.wrong)))


def _later_wins(state: ResolveState) -> tuple[ResolveState, Sections]:
    """State and sections without those options of earlier sources that contradict later ones; each is dropped with a
    notice."""
    sections = _sections(state)
    if "task" in state.wrong or len(set(state.weights.values())) < 2:
        return state, sections
    while (fewer := _with_one_dropped(state, sections)) is not None:
        state, sections = fewer
    return state, sections


def _without_superfluous(state: ResolveState, sections: Sections) -> tuple[ResolveState, Sections]:
    """State and sections without options that change nothing in this run; a notice names each."""
    if "task" in state.wrong:
        return state, sections
    for name, why in dict(options_dropped_with_notice(sections, state.wrong)).items():
        state = state.without(name, f"{state.typed[name].label} has no effect: {why}")
    return state, _sections(state)


def _with_one_dropped(state: ResolveState, sections: Sections) -> tuple[ResolveState, Sections] | None:
    """State and sections without the first contradicted option whose absence leaves fewer problems; None where there
    is none. Where both options say the same thing, as many problems are few enough."""
    count, idle = len(_check(sections, state)), _superfluous_names(sections, state)
    for old, new in options_contradicted_by_later_source(
        sections, state.weights, frozenset(state.wrong) | state.ambient
    ):
        if old in KEPT or not state.typed[old].spelling:  # accelerate's settings: its launcher follows them too
            continue
        notice = f"{state.typed[old].label} is not used because of {state.typed[new].label}"
        if state.weights[old] == DEEPSPEED_FILE and old in BATCH_OPTIONS:
            notice = ""  # the file's batch is compared with the run's: it is the same, or refused
        rest = state.without(old, notice)
        fewer = _sections(rest)
        same_thing = {old, new} == {BATCH[0], *BATCH[1]}
        depending = _superfluous_names(fewer, rest) - idle  # a notice leaves these out
        if len(_check(fewer, rest)) - len(depending) < count + same_thing:
            return rest, fewer
    return None


def _superfluous_names(sections: Sections, state: ResolveState) -> set[str]:
    return {name for name, _ in options_dropped_with_notice(sections, state.wrong)}


def _take(state: ResolveState, source: ConfigSource, weight: int) -> None:
    state.problems += source.problems
    state.notices += source.notices
    state.secrets += secret_values_of(source.givens)
    first: dict[str, GivenOptionValue] = {}
    for given in translated_options(source.givens):
        if names_task(given.name, given.value):
            _take_task(state, given)
            continue
        option = OPTIONS.get(NAMES.get(given.name, ""))
        if option is None:
            _take_unknown(state, given)
            continue
        state.foreign.append(given.name)
        set_option_value(state, option, given, first.get(option.name))
        first.setdefault(option.name, given)
        (state.ambient.add if source.ambient else state.ambient.discard)(option.name)
        state.weights[option.name] = weight


def _take_unknown(state: ResolveState, given: GivenOptionValue) -> None:
    answer = neutral_option_or_problem_of_unknown(given, state.task)
    if isinstance(answer, Problem):
        state.problems.append(answer)
        return
    state.foreign.append(given.name)
    name, entry = answer
    state.neutral[name] = (given.label, entry)


def neutral_option_or_problem_of_unknown(
    given: GivenOptionValue, task: str | None
) -> tuple[str, NeutralOption] | Problem:
    """An option that megaswift does not have: the entry that accepts it and the name it is under, or the mistake.

    It is accepted where it asks for what happens anyway; what the entry says of other options is to be checked later.
    """
    name, value, neutral = given.name, given.value, _answer(given.name)
    if neutral is None and (positive := name.removeprefix("no_").removeprefix("disable_")) not in NAMES:
        neutral = _answer(positive)
        name, value = positive, str(value).strip().lower() in FALSE
    if neutral is not None and neutral.may_accept(value):
        return name, neutral.with_value(value)
    if _SAMPLING.match(given.name) and task is not None and task not in RL:
        return Problem(given.label, f"has no effect in {task}, which samples nothing", "leave it out")
    if (keys := KNOWN_KEYS.get(given.name)) is not None:
        return Problem(given.label, "is not a known key", f"leave it out; known keys: {keys}")
    if neutral is None:
        return unknown_option_problem(given, NAMES)
    return Problem(given.label, f"is not supported: {neutral.reason}", neutral.otherwise or "leave it out")


def _answer(name: str) -> NeutralOption | None:
    """The entry of another toolkit's option, unless it has an advice of its own."""
    return neutral_option(name) or (None if name in NAMES_ELSEWHERE else transformer_config_option(name))


def set_option_value(
    state: ResolveState, option: Option, given: GivenOptionValue, earlier: GivenOptionValue | None
) -> None:
    """One value; `earlier`: one of the same source for the same option."""
    if resets_number_to_default(option, given.value) and not earlier:
        state.forget(option.name)
        return
    try:
        value = parse_option_value(option, given.value)
    except InvalidValue:
        error = _refusal(option.of_task(state.task), given.value)
        words = given.value if isinstance(given.value, list | tuple) else [given.value]
        fix = next((text for word in words if (text := foreign_value_advice(option.name, str(word)))), error.fix)
        state.problems.append(Problem(given.label, error.rule, fix))
        state.wrong.add(option.name)
        state.typed.setdefault(option.name, TypedOption(given.spelling, given.label))
        return
    if not option.details.get("free_text") and any(map(has_url_credentials, _texts(value))):
        fix = CREDENTIALS.get(option.name, "leave them out: programs read credentials from variables or ~/.netrc")
        rule = "holds a user, password or token in a URL, which would be written into the output directory"
        state.problems.append(Problem(redacted_urls(given.label), rule, fix))
        state.wrong.add(option.name)
        state.typed.setdefault(option.name, TypedOption(given.spelling, redacted_urls(given.label)))
        return
    if earlier and option.name not in state.wrong and value != state.values[option.name]:
        rule = f"conflicts with {earlier.label}" + (f" (both set {option.name})" if earlier.name != given.name else "")
        state.problems.append(
            Problem(given.label, rule, f"keep one of the two: --{option.name} {option_value_text(value)}")
        )
        return
    state.values[option.name], state.typed[option.name] = value, TypedOption(given.spelling, given.label)
    state.wrong.discard(option.name)


def _texts(value: Any) -> Iterator[str]:
    """The texts in an option's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _refusal(option: Option, raw: Any) -> InvalidValue:
    """What is wrong with a value that does not parse."""
    try:
        parse_option_value(option, raw)
    except InvalidValue as error:
        return error
    raise AssertionError("the value was parsed before, with more choices")


def _take_task(state: ResolveState, given: GivenOptionValue) -> None:
    name = str(given.value).lower()
    if given.name not in ("task", "rlhf_type"):
        state.notices.append(f"{given.label}: {name} is a task, so it is used as rlhf_type; train_type stays full")
    if name not in TASKS:
        listed = ", ".join(f"{n} ({text})" for n, text in TASKS.items())
        kinds = ALIGNMENT if given.name == "rlhf_type" else tuple(TASKS)
        fix = (
            foreign_value_advice("rlhf_type", name)
            or did_you_mean_hint(name, kinds)
            or f"use one of {', '.join(kinds)}"
        )
        state.problems.append(Problem(given.label, f"is not a supported task; tasks are {listed}", fix))
        state.wrong.add("task")
    elif state.task is None:
        state.task = name
    elif name != state.task:
        state.problems.append(
            Problem(given.label, f"conflicts with the command, which is {state.task}", f"megaswift {name} ...")
        )


def unknown_option_problem(given: GivenOptionValue, known: Mapping[str, str], command: str | None = None) -> Problem:
    """The mistake of an option that is none of `known`. `command`: whose options these are; None: training's."""
    fix = foreign_option_advice(given.name, given.value, known)
    positive = given.name.removeprefix("no_")
    if not fix and positive != given.name and positive in known:
        fix = f"--{positive} false"
    elif not fix and positive != given.name:
        fix = foreign_option_advice(positive, "false", known)
    of = f" of megaswift {command}" if command else ""
    lists = f"megaswift {command} --help lists all options" if command else LISTS_ALL
    return Problem(given.label, f"is not an option{of}", fix or did_you_mean_hint(given.name, known) or lists)


def _missing(sections: Sections, state: ResolveState) -> Iterable[Problem]:
    if sections.model.model is None and "model" not in state.wrong:
        yield Problem("--model", "is missing", "give --model DIR, a Hugging Face model folder")
    if not sections.data.dataset and "dataset" not in state.wrong:
        yield Problem("--dataset", "is missing", "--dataset data.jsonl")
    if not state.wrong & {"reward_funcs", "reward_model", "environment"}:
        yield from missing_reward_problems(sections)
