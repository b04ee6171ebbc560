"""Sources of option values: a file, the command line, the environment, Python. Each gives a list of
`GivenOptionValue`, as the user wrote them: values have no type yet.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.base.named_object import named_object
from megaswift.base.redaction import MASK, is_secret
from megaswift.errors import Problem
from megaswift.options.option import OptionTable

ENVIRONMENT = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
LONGEST = 200
"""Characters of a value of the Python API in a message."""


@dataclass(frozen=True)
class GivenOptionValue:
    """One value from the user, and what to call it when it is wrong."""

    name: str
    """As written, dashes turned to underscores; any spelling."""
    value: Any  # None: an empty entry of a file; a flag without a value is True
    label: str
    """`--lr 3`, `run.yaml:7 lr: 3`."""
    spelling: str = ""
    """The label without its value: `--lr`, `run.yaml:7 lr:`."""


@dataclass(frozen=True)
class AcceptedOption:
    """An option of another toolkit that asks for what happens anyway."""

    name: str
    spelling: str
    """The name as it was given, such as `no_name`."""
    label: str
    """With its value."""
    reason: str
    """Why it changes nothing."""
    unless: str = ""
    """An option of megaswift beside which it would have an effect."""
    only_with: tuple[str, str] = ("", "")
    """An option of megaswift and the value that it needs; without it the option is refused."""


@dataclass(frozen=True)
class ConfigSource:
    """All values of one place. Later places override earlier ones."""

    givens: tuple[GivenOptionValue, ...] = ()
    problems: tuple[Problem, ...] = ()
    notices: tuple[str, ...] = ()
    """Lines for the user that are not mistakes."""
    ambient: bool = False
    """Values that happen to be there, for other programs too: they count where they apply, and are no mistake where
    not."""
    file: str = ""
    """The path of a configuration file."""
    accepted: tuple[AcceptedOption, ...] = ()
    """Options of other toolkits that change nothing here."""
    compared: bool = False
    """The run compares these values with its own later: no notice says that a later source replaces one."""


def launch_source_from_environment(environ: Mapping[str, str]) -> ConfigSource:
    """The launch section from torchrun-style variables. Not for workers: there torchrun has set some of them itself."""
    givens = [
        GivenOptionValue(n.lower(), environ[n], f"{n}={environ[n]} (environment)", f"{n} (environment)")
        for n in ENVIRONMENT
        if environ.get(n)
    ]
    return ConfigSource(tuple(givens), ambient=True)


def source_from_mapping(options: Mapping[str, Any], table: OptionTable) -> ConfigSource:
    """Returns the options of a Python call: flat names, or sections as dicts or section objects."""
    givens: list[GivenOptionValue] = []
    for name, value in options.items():
        if name in table.sections and isinstance(value, table.sections[name]):
            fields = {f: getattr(value, f) for f, o in table.options.items() if o.section == name}
            value = {f: v for f, v in fields.items() if v != table.options[f].default}
        inner = value if table.opens_section(name, value) else {name: value}
        inner = {n: _with_named_objects(table, n, v) for n, v in inner.items()}
        givens += [
            GivenOptionValue(
                normalize_name(n), v, f"{n}={MASK if is_secret(normalize_name(n)) else _shown(v)}", f"{n}="
            )
            for n, v in inner.items()
        ]
    return ConfigSource(tuple(givens))


def _with_named_objects(table: OptionTable, name: str, value: Any) -> Any:
    """A value in which each function or class has the text that names it, where the option takes them."""
    option = table.options.get(table.names.get(normalize_name(name), ""))
    if option is None or not option.details.get("takes_objects"):
        return value
    if isinstance(value, list | tuple):
        return [named_object(one) if callable(one) else one for one in value]
    return named_object(value) if callable(value) else value


def _shown(value: Any) -> str:
    """A value for messages: a whole data set may have been given, and the first of its rows say so."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = LONGEST
    text = short.repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def normalize_name(name: str) -> str:
    """`--Learning-rate` and `learning_rate` are one name."""
    return name.lstrip("-").replace("-", "_")


def accepted_notice(accepted: Iterable[AcceptedOption]) -> str:
    """One line for options without effect, empty for none; each reason occurs once."""
    by_reason: dict[str, list[str]] = {}
    for option in accepted:
        by_reason.setdefault(option.reason, []).append(option.label)
    listed = "; ".join(f"{', '.join(labels)} ({reason})" for reason, labels in by_reason.items())
    return f"accepted without effect: {listed}" if listed else ""


def secret_values_of(givens: Iterable[GivenOptionValue]) -> list[str]:
    """Values that no message may repeat."""
    return [str(g.value) for g in givens if g.value and is_secret(g.name)]
