"""The commands other than training: their option sections, parsed from a command line with all mistakes in one error,
and their help page.

Owns reading and help; what the options mean together is each command's own `check`. Training's configuration, which
also comes from files and Python, is `swift_config.py`'s.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar, get_type_hints

from megaswift.command_line_common import HELP
from megaswift.config.help_page import option_lines, section_heading
from megaswift.config.option import OptionTable, build_option_table
from megaswift.config.option_sources import GivenOptionValue, read_command_line, secret_values_of
from megaswift.config.parse_option_values import FALSE
from megaswift.config.resolve_sections import ResolveState, set_option_value, unknown_option_problem
from megaswift.config.user_spelling import TypedOption, errors_as_typed, problems_as_typed
from megaswift.errors import ConfigError, Problem
from megaswift.redaction import redacted

LEGEND = (
    "Each option is shown with its default and unit; CAPITALS: not set by default. Dashes and underscores are "
    "interchangeable. A boolean flag without a value means true."
)


@dataclass(frozen=True)
class ParsedCommand:
    """What a command line said, typed: sections by name, and the options that were given, as they were written."""

    sections: Mapping[str, Any]
    typed: Mapping[str, TypedOption]

    def given(self, name: str) -> bool:
        """Whether the user set this option."""
        return name in self.typed

    def label(self, name: str) -> str:
        """The option as the user wrote it."""
        return self.typed[name].label if name in self.typed else f"--{name}"


Config = TypeVar("Config")


@dataclass(frozen=True)
class CommandParser(Generic[Config]):
    """A command's name, its help and its options."""

    name: str
    usage: str
    config: type[Config]
    """A dataclass whose fields are the sections of options."""
    check: Callable[[ParsedCommand], Iterable[Problem]]
    hints: Mapping[str, str]
    """Names of other toolkits that have another shape here."""

    @cached_property
    def sections(self) -> Mapping[str, type]:
        """The classes of options by section."""
        return get_type_hints(self.config)

    @cached_property
    def table(self) -> OptionTable:
        """Its options by name."""
        return build_option_table(self.sections)

    def run(self, argv: Sequence[str], work: Callable[[Config], int]) -> int:
        """Help where it is asked for, else `work` on the options; returns the exit code."""
        if not argv or any(word in HELP for word in argv):
            print(self.help())
            return 0 if argv else 2
        parsed = self.parse(argv)
        with errors_as_typed(parsed.typed, self.table.names):
            return work(self.config(**parsed.sections))

    def parse(self, argv: Sequence[str]) -> ParsedCommand:
        """The sections; ConfigError with all mistakes."""
        line = read_command_line(list(argv), self.table)
        state = ResolveState(problems=list(line.problems))
        state.problems += [
            Problem(word, f"is an unexpected argument of megaswift {self.name}", f"megaswift {self.name} --help")
            for word in line.files
        ]
        first: dict[str, GivenOptionValue] = {}
        for given in line.givens:
            option = self.table.options.get(self.table.names.get(given.name, ""))
            if option is None:
                state.problems.append(self._unknown(given))
                continue
            set_option_value(state, option, given, first.get(option.name))
            first.setdefault(option.name, given)
        sections = {
            key: cls(**{n: v for n, v in state.values.items() if self.table.options[n].section == key})
            for key, cls in self.sections.items()
        }
        parsed = ParsedCommand(
            sections, {n: typed for n, typed in state.typed.items() if state.values.get(n) is not None}
        )
        checked = [p for p in self.check(parsed) if p.what.removeprefix("--").split(" ")[0] not in state.wrong]
        problems = state.problems + problems_as_typed(checked, parsed.typed, self.table.names)
        if problems:
            raise ConfigError(redacted(problems, secret_values_of(line.givens)))
        return parsed

    def _unknown(self, given: GivenOptionValue) -> Problem:
        problem = unknown_option_problem(given, self.table.names, self.name)
        off = str(given.value).strip().lower() in FALSE
        return replace(problem, fix=self.hints[given.name]) if given.name in self.hints and not off else problem

    def help(self, width: int | None = None) -> str:
        """The help page, `width` columns wide (None: as wide as the terminal, at most 120)."""
        width = min(width or shutil.get_terminal_size((100, 24)).columns, 120)
        lines = [self.usage.rstrip(), "", *textwrap.wrap(LEGEND, width)]
        for key, cls in self.sections.items():
            lines += section_heading(cls.__doc__ or key, width)
            for option in self.table.options.values():
                if option.section == key:
                    lines += option_lines(option, width)
        return "\n".join(line.rstrip() for line in lines)
