"""Configuration options: each is declared once, as a dataclass field, with its spellings, unit and range.

Owns `option(...)`, which declares an option, and the table of all options of a command, which is read from the
dataclasses. `values.py` turns text into values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypedDict, Unpack, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Wanted:
    """The condition under which an option exists: the value that a selector (such as `optimizer`) must have.

    At most one of `values`, `excluded` and `least` is given; without any, the selector must be set. `ANY` always holds.
    """

    values: tuple[Any, ...] = ()
    """The selector has one of these values."""
    excluded: tuple[Any, ...] = ()
    """The selector has any value but these."""
    least: int | None = None
    """The selector is at least this number."""
    notice: bool = False
    """If the condition fails, leave the option out with a notice instead of an error: the run is the same without
    it."""

    def holds(self, actual: Any) -> bool:
        """Return whether the selector's actual value meets the condition; if it is a tuple, whether any entry does."""
        present = actual if isinstance(actual, tuple) else (actual,)
        if ANY in present:
            return True
        if self.values:
            return any(value in self.values for value in present)
        if self.least is not None:
            return present[0] is not None and present[0] >= self.least
        if self.excluded:
            return any(value not in self.excluded for value in present)
        return bool(actual)


ANY = object()
"""The value of a selector that allows every option, such as a plugin's loss."""


def one_of(*values: Any, notice: bool = False) -> Wanted:
    """Return the condition that the selector has one of these values."""
    return Wanted(values=values, notice=notice)


def but_not(*values: Any, notice: bool = False) -> Wanted:
    """Return the condition that the selector has any value but these."""
    return Wanted(excluded=values, notice=notice)


def at_least(number: int, notice: bool = False) -> Wanted:
    """Return the condition that the selector is at least this number."""
    return Wanted(least=number, notice=notice)


def is_set(notice: bool = False) -> Wanted:
    """Return the condition that the selector is set."""
    return Wanted(notice=notice)


REGISTERED = ("loss_type", "advantage_estimator", "optimizer")
"""Options whose choices the user's own code may extend."""
PLUGIN_CHOICES: dict[str, list[str]] = {}
"""Option -> the choices that `--external_plugins` have registered."""
NEUTRAL: tuple[Any, ...] = (None, False, 0, ())
"""Values that mean that an option is not used; they are accepted where the option does not exist."""
LARGEST_SEED = 2**62
"""Below 2^64, torch's limit, because ranks and steps add to the seed."""


class OptionDetails(TypedDict, total=False):
    """What the declaration of an option may state besides default and help."""

    aliases: tuple[str, ...]
    unit: str
    choices: tuple[str, ...]
    choices_of: dict[str, tuple[str, ...]]
    """Task -> its choices, for an option whose choices depend on the task."""
    spellings: dict[str, str]
    """Other ways to write a choice: `fp32` for `float32`."""
    unset: tuple[str, ...]
    """Values that mean "not set" in other toolkits, such as -1."""
    fraction: bool
    """Whether a number of steps may also be a fraction of all steps, above 0 and below 1."""
    minimum: float
    above: float
    maximum: float
    below: float
    tasks: tuple[str, ...]
    """The tasks that have this option; absent: all tasks."""
    secret: bool
    """Whether the value must never be shown or written."""
    takes_objects: bool
    """Whether Python code may give functions or classes, which `NamedObject` names."""
    free_text: bool
    """Whether the value is prose for a model or a reader: a URL in it is not refused for the credentials it holds."""
    only_with: Mapping[str, Any]
    """Selector -> the value with which the option exists: `{"optimizer": "muon"}`, a tuple of values, or a `Wanted`. A
    selector is another option, or a fact of `variants.py`."""
    neutral: tuple[Any, ...]
    """Values that are accepted where the option does not exist, in place of `NEUTRAL`."""
    common: tuple[str, ...]
    """Commands whose first help page has this option: the thirty or fewer that most people use."""
    metavar: str
    """Placeholder for the value in `--help`, such as `DIR`, shown if there is no default."""
    example: str
    """A value for messages about a malformed one; needed where the kind does not tell the form (`map`)."""


def option(default: Any, help: str, **details: Unpack[OptionDetails]) -> Any:
    """Return a dataclass field that declares an option. `help` is one line without a full stop."""
    metadata = {"help": help, **details}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata, repr=not details.get("secret", False))


@dataclass(frozen=True)
class Option:
    """An option as the loader, `--help` and the JSON schema read it."""

    name: str
    section: str
    kind: str
    """text | int | float | bool | list | numbers | integers | map."""
    optional: bool
    """Whether None is allowed: not set, so that other code decides the value."""
    default: Any
    help: str
    details: OptionDetails

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the option."""
        return self.details.get("aliases", ())

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical name, then the aliases."""
        return (self.name, *self.aliases)

    @property
    def choices(self) -> tuple[str, ...]:
        """The only allowed values; empty: any value."""
        return tuple(dict.fromkeys((*self.details.get("choices", ()), *PLUGIN_CHOICES.get(self.name, ()))))

    def choices_in(self, task: str | None) -> tuple[str, ...]:
        """Return the choices of the option for a task (None: those that do not depend on the task)."""
        return self.details.get("choices_of", {}).get(task or "", self.choices)

    def of_task(self, task: str | None) -> Option:
        """Return the option with the choices of a task."""
        return dataclasses.replace(self, details={**self.details, "choices": self.choices_in(task)})

    @property
    def switches(self) -> bool:
        """Whether the option may also be written like a flag: alone, or with true or false."""
        return "true" in self.details.get("spellings", {})

    @property
    def unit(self) -> str:
        """Unit of the value, empty for pure numbers and text."""
        return self.details.get("unit", "")

    @property
    def only_with(self) -> dict[str, Wanted]:
        """Selector -> the condition that it must meet for the option to exist."""
        return {name: _as_wanted(value) for name, value in self.details.get("only_with", {}).items()}

    @property
    def neutral(self) -> tuple[Any, ...]:
        """Values that are accepted where the option does not exist."""
        return self.details.get("neutral", NEUTRAL)

    def belongs_to(self, task: str) -> bool:
        """Return whether `task` has this option."""
        return task in self.details.get("tasks", (task,))


def _as_wanted(value: Any) -> Wanted:
    if isinstance(value, Wanted):
        return value
    return Wanted(values=value if isinstance(value, tuple) else (value,))


_KINDS: dict[Any, str] = {
    tuple[float, ...]: "numbers",
    tuple[int, ...]: "integers",
    str: "text",
    int: "int",
    float: "float",
    bool: "bool",
    tuple: "list",
    dict: "map",
}


def options_of(section: str, cls: type) -> tuple[Option, ...]:
    """Return the options that a section class declares, in order."""
    hints = get_type_hints(cls)
    options = []
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        members = get_args(hint) if isinstance(hint, UnionType) else (hint,)  # `int | None` has the members int, None
        value_type = next(member for member in members if member is not type(None))
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        details = {k: v for k, v in f.metadata.items() if k != "help"}
        kind = _KINDS.get(value_type) or _KINDS[get_origin(value_type) or value_type]
        optional = type(None) in members
        options.append(Option(f.name, section, kind, optional, default, f.metadata["help"], details))  # type: ignore[arg-type]
    return tuple(options)


@dataclass(frozen=True)
class OptionTable:
    """All options of a command, and every spelling of each."""

    options: dict[str, Option]
    """By canonical name."""
    names: dict[str, str]
    """Any spelling -> the canonical name."""
    sections: Mapping[str, type]
    """Heading in a file -> the class that declares the options of this section."""
    headings: frozenset[str]
    """All headings that a file may have, including the other names of sections."""

    def opens_section(self, name: str, value: Any) -> bool:
        """Return whether `name: value` opens a section: `model: {...}` does, `model: DIR` does not."""
        return isinstance(value, dict) and name in self.headings


def build_option_table(sections: Mapping[str, type], other_headings: Iterable[str] = ()) -> OptionTable:
    """Return the table of the options that these section classes declare.

    Args:
        sections: Heading in a file -> section class.
        other_headings: Further headings that a file may have.
    """
    options = {option.name: option for heading, cls in sections.items() for option in options_of(heading, cls)}
    names: dict[str, str] = {}
    for declared in options.values():
        for name in declared.names:
            assert name not in names, f"{name} names both {names.get(name)} and {declared.name}"
            names[name] = declared.name
    return OptionTable(options, names, sections, frozenset((*sections, *other_headings)))
