"""One configuration option: declared once, on the field itself, with all its spellings, its unit and its range.

Owns `option(...)`, and the table of all options of a command, which is read back from its parts. `values.py` turns text
into values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypedDict, Unpack, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Wanted:
    """Values of a selector with which an option exists."""

    values: tuple[Any, ...] = ()
    """One of these; empty: see the other fields."""
    excluded: tuple[Any, ...] = ()
    """Any value but these."""
    least: int | None = None
    """At least this number."""
    notice: bool = False
    """Elsewhere the option is left out with a notice, because the run is the same without it."""

    def holds(self, actual: Any) -> bool:
        """Returns whether the selector's value is a wanted one; of several values, any."""
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
    """The selector has one of these values."""
    return Wanted(values=values, notice=notice)


def but_not(*values: Any, notice: bool = False) -> Wanted:
    """The selector has any value but these."""
    return Wanted(excluded=values, notice=notice)


def at_least(number: int, notice: bool = False) -> Wanted:
    """The selector is this number or a larger one."""
    return Wanted(least=number, notice=notice)


def is_set(notice: bool = False) -> Wanted:
    """The selector has a value."""
    return Wanted(notice=notice)


PLUGIN_CHOICES: dict[str, list[str]] = {}
"""By option, choices that `--external_plugins` have registered."""
NEUTRAL: tuple[Any, ...] = (None, False, 0, ())
"""Values that say by themselves that an option is not used."""
LARGEST_SEED = 2**62
"""Room below 2^64, torch's limit, for what is added for ranks and steps."""


class OptionDetails(TypedDict, total=False):
    """What an option may say about itself besides default and help."""

    aliases: tuple[str, ...]
    unit: str
    choices: tuple[str, ...]
    choices_of: dict[str, tuple[str, ...]]
    """By task, where each has choices of its own."""
    spellings: dict[str, str]
    """Other ways to write a choice: `fp32` for `float32`."""
    unset: tuple[str, ...]
    """Other toolkits' values for "not set": -1."""
    fraction: bool
    """A number of steps that may also be a fraction of all steps, above 0 and below 1."""
    minimum: float
    above: float
    maximum: float
    below: float
    tasks: tuple[str, ...]
    """The tasks that have this option; none named: all."""
    secret: bool
    """Never shown or written."""
    free_text: bool
    """Words for a model or a reader, in which a URL is part of the text and no address of the run."""
    only_with: Mapping[str, Any]
    """Selectors and their values with which the option exists: `{"optimizer": "muon"}`, a tuple for several values, or
    a `Wanted`. A selector is an option, or a fact of `variants.py`."""
    neutral: tuple[Any, ...]
    """Values that change nothing and are accepted where the option does not exist."""
    metavar: str
    """What `--help` shows in place of a default that is not set."""


def option(default: Any, help: str, **details: Unpack[OptionDetails]) -> Any:
    """A dataclass field that is an option. `help` is one line without a full stop."""
    metadata = {"help": help, **details}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata, repr=not details.get("secret", False))


@dataclass(frozen=True)
class Option:
    """An option as the loader, the help and the schema see it."""

    name: str
    section: str
    kind: str
    """text | int | float | bool | list | numbers | integers | map."""
    optional: bool
    """None is a value: not set, decided elsewhere."""
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
        """The only values allowed; empty when any will do."""
        return (*self.details.get("choices", ()), *PLUGIN_CHOICES.get(self.name, ()))

    def choices_in(self, task: str | None) -> tuple[str, ...]:
        """The choices that a task has (None: whichever)."""
        return self.details.get("choices_of", {}).get(task or "", self.choices)

    def of_task(self, task: str | None) -> Option:
        """The option with the choices of a task."""
        return dataclasses.replace(self, details={**self.details, "choices": self.choices_in(task)})

    @property
    def switches(self) -> bool:
        """Whether it may also be written as a switch: alone, or with true and false."""
        return "true" in self.details.get("spellings", {})

    @property
    def unit(self) -> str:
        """Unit of the value, empty for pure numbers and text."""
        return self.details.get("unit", "")

    @property
    def only_with(self) -> dict[str, Wanted]:
        """The selectors that decide whether the option exists."""
        return {name: _as_wanted(value) for name, value in self.details.get("only_with", {}).items()}

    @property
    def neutral(self) -> tuple[Any, ...]:
        """Values that are accepted where the option does not exist."""
        return self.details.get("neutral", NEUTRAL)

    def belongs_to(self, task: str) -> bool:
        """Whether `task` has this option."""
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
    """The options of a section class, in order."""
    hints = get_type_hints(cls)
    options = []
    for f in dataclasses.fields(cls):
        arms = get_args(hints[f.name]) if isinstance(hints[f.name], UnionType) else (hints[f.name],)
        inner = next(a for a in arms if a is not type(None))
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        details = {k: v for k, v in f.metadata.items() if k != "help"}
        kind = _KINDS.get(inner) or _KINDS[get_origin(inner) or inner]
        options.append(Option(f.name, section, kind, type(None) in arms, default, f.metadata["help"], details))  # type: ignore[arg-type]
    return tuple(options)


@dataclass(frozen=True)
class OptionTable:
    """All options of a command, and every spelling of each."""

    options: dict[str, Option]
    """By canonical name."""
    names: dict[str, str]
    """Any spelling to the canonical name."""
    sections: Mapping[str, type]
    """The parts that declare them, by the heading in a file."""
    headings: frozenset[str]
    """Headings that a file may have, other names of the parts included."""

    def opens_section(self, name: str, value: Any) -> bool:
        """Returns whether `name: value` opens a section: `model: {...}` does, `model: DIR` does not."""
        return isinstance(value, dict) and name in self.headings


def build_option_table(sections: Mapping[str, type], other_headings: Iterable[str] = ()) -> OptionTable:
    """Returns the options of these parts; two that share a spelling are a programming error."""
    options = {o.name: o for key, cls in sections.items() for o in options_of(key, cls)}
    names: dict[str, str] = {}
    for o in options.values():
        for name in o.names:
            assert name not in names, f"{name} names both {names.get(name)} and {o.name}"
            names[name] = o.name
    return OptionTable(options, names, sections, frozenset((*sections, *other_headings)))
