"""Options as they are taken from the sources: values with types, who gave them, and every mistake."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megaswift.base.redaction import has_url_credentials, redacted_urls
from megaswift.errors import Problem, did_you_mean_hint
from megaswift.options.option import Option
from megaswift.options.sources import AcceptedOption, ConfigSource, GivenOptionValue
from megaswift.options.spelling import TypedOption
from megaswift.options.values import (
    InvalidValue,
    option_value_text,
    parse_option_value,
    resets_number_to_default,
)

LISTS_ALL = "megaswift {task} --help all lists them"
"""The fix of an unknown option; the task is filled in once all sources are read, because a later one may name it."""
_FOR_DATA = "set the file system's variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
CREDENTIALS = {
    "mlflow_tracking_uri": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    "rollout_server_url": "set MEGASWIFT_ROLLOUT_API_KEY",
    **dict.fromkeys(("dataset", "val_dataset"), _FOR_DATA),
}
"""By option: the variables that replace credentials in a URL, which config.yaml, logs and checkpoints would keep."""


class Toolkits(Protocol):
    """The door to names and values of other toolkits, for the options of one command. The package behind it is
    `megaswift/compat/`, and the command hands it in."""

    def translate(self, sources: Sequence[ConfigSource], known: Mapping[str, str]) -> list[ConfigSource]:
        """Return the sources in megaswift's names and values; what nobody knows stays as it is.

        Args:
            known: Any spelling of an option of the command, and its canonical name.
        """

    def explain(self, given: GivenOptionValue, known: Mapping[str, str], task: str | None) -> list[Problem]:
        """Return what is wrong with an option that the command does not have; empty for a name that is in no table."""

    def instead(self, option: str, value: Any) -> str:
        """Return what to do in place of a value that `option` does not take; empty where that is not known."""

    def unread_variables(self, environ: Mapping[str, str]) -> Iterable[str]:
        """Return a line for variables of other toolkits that no command of megaswift reads."""


@dataclass
class GivenOptions:
    """The options that were understood so far, and the mistakes."""

    values: dict[str, Any] = field(default_factory=dict)
    typed: dict[str, TypedOption] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    """Which source each value is from; a larger number counts more."""
    wrong: set[str] = field(default_factory=set)
    """Options whose value is a mistake."""
    ambient: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)
    """Options whose value the run compares with its own later."""
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    spellings: list[str] = field(default_factory=list)
    """Names of options, as they were given."""
    accepted: dict[str, AcceptedOption] = field(default_factory=dict)
    task: str | None = None

    @property
    def labels(self) -> dict[str, str]:
        """How the user wrote each option, with its value."""
        return {name: typed.label for name, typed in self.typed.items()}

    def forget(self, name: str) -> None:
        """As if the option had not been given."""
        for known in (self.values, self.typed, self.weights):
            known.pop(name, None)
        for marks in (self.ambient, self.compared, self.wrong):
            marks.discard(name)

    def take(
        self, option: Option, given: GivenOptionValue, earlier: GivenOptionValue | None, toolkits: Toolkits
    ) -> None:
        """Take one value. `earlier`: one of the same source for the same option."""
        if resets_number_to_default(option, given.value) and not earlier:
            self.forget(option.name)
            return
        try:
            value = parse_option_value(option, given.value)
        except InvalidValue:
            error = _refusal(option.of_task(self.task), given.value)
            words = given.value if isinstance(given.value, list | tuple) else [given.value]
            fix = next((text for word in words if (text := toolkits.instead(option.name, word))), error.fix)
            self._refuse(option, TypedOption(given.spelling, given.label), error.rule, fix)
            return
        if not option.details.get("free_text") and any(map(has_url_credentials, _texts(value))):
            fix = CREDENTIALS.get(option.name, "leave them out: programs read credentials from variables or ~/.netrc")
            rule = "holds a user, password or token in a URL, which would be written into the output directory"
            self._refuse(option, TypedOption(given.spelling, redacted_urls(given.label)), rule, fix)
            return
        if earlier and option.name not in self.wrong and value != self.values[option.name]:
            several = f" (both set {option.name})" if earlier.name != given.name else ""
            if earlier.spelling != given.spelling or not given.spelling.startswith("--"):
                rule = f"conflicts with {earlier.label}{several}"
                fix = f"keep one of the two: --{option.name} {option_value_text(value)}"
                self.problems.append(Problem(given.label, rule, fix))
                return
            self.notices.append(f"{given.spelling} is given several times; its last value counts")
        self.values[option.name] = value
        self.typed[option.name] = TypedOption(given.spelling, given.label)
        self.wrong.discard(option.name)

    def _refuse(self, option: Option, typed: TypedOption, rule: str, fix: str) -> None:
        self.problems.append(Problem(typed.label, rule, fix))
        self.wrong.add(option.name)
        self.typed.setdefault(option.name, typed)


def unknown_option_problem(
    given: GivenOptionValue,
    known: Mapping[str, str],
    sections: Collection[str],
    command: str | None = None,
    fix: str = "",
) -> Problem:
    """Return the mistake of an option that is none of `known`.

    Args:
        sections: Headings that a configuration file may have.
        command: Whose options these are; None: training's.
        fix: What to do, where that is known.
    """
    if isinstance(given.value, dict):
        rule = f"is not a section of options; sections are {', '.join(sections)}"
        last = (
            "leave the mapping out; options stand at the top level or in these sections, and TASK --help all lists them"
        )
        names = [*sections, *known]
        return Problem(given.spelling.rstrip(":"), rule, fix or did_you_mean_hint(given.name, names) or last)
    if given.name in sections:
        return Problem(given.label, "is a section, and no option", fix or "options of the section, indented, below it")
    positive = given.name.removeprefix("no_")
    if not fix and positive != given.name and positive in known:
        fix = f"--{positive} false"
    of = f" of megaswift {command}" if command else ""
    lists = f"megaswift {command} --help all lists them" if command else LISTS_ALL
    return Problem(given.label, f"is not an option{of}", fix or did_you_mean_hint(given.name, known) or lists)


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
    """Return what is wrong with a value that does not parse."""
    try:
        parse_option_value(option, raw)
    except InvalidValue as error:
        return error
    raise AssertionError("the value was parsed before, with more choices")
