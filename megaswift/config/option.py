"""One configuration option: declared once, on the field itself, with all its spellings, its unit and its range.

Owns `option(...)` and what can be read back from a section's fields. Turning text into values is
`parse_option_values.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypedDict, Unpack, get_args, get_origin, get_type_hints

PLUGIN_CHOICES: dict[str, list[str]] = {}
"""By option, choices that `--external_plugins` have registered."""
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

    def belongs_to(self, task: str) -> bool:
        """Whether `task` has this option."""
        return task in self.details.get("tasks", (task,))


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


def build_option_table(sections: Mapping[str, type]) -> OptionTable:
    """The options of these sections; two that share a spelling are a programming error."""
    options = {o.name: o for key, cls in sections.items() for o in options_of(key, cls)}
    names: dict[str, str] = {}
    for o in options.values():
        for name in o.names:
            assert name not in names, f"{name} names both {names.get(name)} and {o.name}"
            names[name] = o.name
    return OptionTable(options, names)
