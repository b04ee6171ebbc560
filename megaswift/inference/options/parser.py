"""The commands other than training: their option sections, parsed from a command line with all mistakes in one error,
and their help page.

Owns reading and help; what the options mean together is each command's own `check`. Training's configuration, which
also comes from files and Python, is `swift_config.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, get_type_hints

from megaswift import log
from megaswift.base.command_words import help_topic
from megaswift.base.redaction import redact_problems
from megaswift.config.help import HelpPages
from megaswift.config.sections import SECTIONS, TRAINING
from megaswift.data.options.hub_ids import dataset_hubs, hub_source_from_environment
from megaswift.errors import ConfigError, Problem
from megaswift.launchers.options.variables import CHECKED
from megaswift.options.command_line import read_command_line
from megaswift.options.files import read_config_file
from megaswift.options.given_options import GivenOptions, Toolkits, unknown_option_problem
from megaswift.options.option import OptionTable, build_option_table
from megaswift.options.sources import ConfigSource, GivenOptionValue, accepted_notice, secret_values_of
from megaswift.options.spelling import TypedOption, errors_as_typed, problems_as_typed


@dataclass(frozen=True)
class ParsedCommand:
    """What a command line said, typed: sections by name, and the options that were given, as they were written."""

    sections: Mapping[str, Any]
    typed: Mapping[str, TypedOption]
    notices: tuple[str, ...] = ()
    """Lines for the user that are no mistakes."""

    def given(self, name: str) -> bool:
        """Whether the user set this option."""
        return name in self.typed

    def label(self, name: str) -> str:
        """The option as the user wrote it."""
        return self.typed[name].label if name in self.typed else f"--{name}"


def as_given(parsed: ParsedCommand) -> ParsedCommand:
    """The options without any from elsewhere."""
    return parsed


Config = TypeVar("Config")


@dataclass(frozen=True)
class CommandParser(Generic[Config]):
    """A command's name, its help and its options."""

    name: str
    usage: str
    config: type[Config]
    """A dataclass whose fields are the sections of options."""
    toolkits: Toolkits
    """What the command understands of other toolkits' names."""
    check: Callable[[ParsedCommand], Iterable[Problem]]
    complete: Callable[[ParsedCommand], ParsedCommand] = as_given
    """Fills in what files name that the options point to, before `check`."""

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
        topic = help_topic(argv)
        if not argv or topic is not None:
            print(self.help(topic or ""))
            return 0 if argv else 2
        parsed = self.parse(argv)
        if CHECKED not in os.environ:  # the process that started this one has printed them
            for notice in (*parsed.notices, *self.toolkits.unread_variables(os.environ)):
                log.info(notice)
        with errors_as_typed(parsed.typed, self.table.names):
            return work(self.config(**parsed.sections))

    def parse(self, argv: Sequence[str]) -> ParsedCommand:
        """The sections; ConfigError with all mistakes."""
        line = read_command_line(list(argv), self.table)
        state = GivenOptions()
        sources = [read_config_file(file, TRAINING) for file in line.files]
        state.problems += line.problems
        state.problems += [problem for source in sources for problem in source.problems]
        state.notices += [notice for source in sources for notice in source.notices]
        if "use_hf" in self.table.options:
            state.values |= {given.name: given.value for given in hub_source_from_environment(os.environ).givens}
        for source in self.toolkits.translate([*sources, ConfigSource(tuple(line.givens))], self.table.names):
            self._take(state, source)
        values = dataset_hubs(state.values, state.wrong)
        sections = {
            key: cls(**{n: v for n, v in values.items() if self.table.options[n].section == key})
            for key, cls in self.sections.items()
        }
        accepted = accepted_notice(state.accepted.values())
        typed = {n: typed for n, typed in state.typed.items() if state.values.get(n) is not None}
        parsed = ParsedCommand(sections, typed, (*state.notices, *((accepted,) if accepted else ())))
        if not state.problems:  # it may download
            parsed = self.complete(parsed)
        checked = [p for p in self.check(parsed) if p.what.removeprefix("--").split(" ")[0] not in state.wrong]
        if state.problems:  # what the command lacks may be what a refused option asked for
            filled = {f"megaswift {self.name}", "--output_dir"} | (
                {"--model"} if state.values.get("adapters") else set()
            )
            checked = [p for p in checked if p.what not in filled]
        problems = state.problems + problems_as_typed(checked, parsed.typed, self.table.names)
        if problems:
            raise ConfigError(redact_problems(problems, secret_values_of(line.givens)))
        return parsed

    def _take(self, state: GivenOptions, source: ConfigSource) -> None:
        """The values of one source."""
        first: dict[str, GivenOptionValue] = {}
        names = self.table.names
        for given in source.givens:
            option = self.table.options.get(names.get(given.name, ""))
            if option is None:
                known = self.toolkits.explain(given, names, None)
                state.problems += known or [unknown_option_problem(given, names, SECTIONS, self.name)]
                continue
            state.take(option, given, first.get(option.name), self.toolkits)
            first.setdefault(option.name, given)
        state.accepted |= {accepted.name: accepted for accepted in source.accepted}

    def help(self, topic: str = "", width: int | None = None) -> str:
        """Return a help page, as `HelpPages.page` does."""
        options = [option for key in self.sections for option in self.table.options.values() if option.section == key]
        return HelpPages(self.name, self.usage, self.sections, options).page(topic, width)
