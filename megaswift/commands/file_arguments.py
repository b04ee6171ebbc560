"""A command line of `argparse` whose arguments may stand in a configuration file, too: that of `megaswift convert`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.config.sections import TRAINING
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.inference.options.launch import LAUNCH_OPTIONS
from megaswift.options.files import read_config_file
from megaswift.options.sources import GivenOptionValue


class FileArgumentParser(UserErrorArgumentParser):
    """Arguments that `--config FILE` gives, too, by their names; those of the command line override it."""

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """ConfigError with all entries of the file that are wrong, by their lines."""
        files, words = config_files_and_words(args)
        self.add_argument("--config", metavar="FILE", help="YAML or JSON file with these arguments and those of nodes")
        positional = [action for action in self._actions if not action.option_strings]
        for action in positional:
            action.nargs = "?"
        entries: dict[str, Any] = {}
        if problems := [problem for given in entries_of_files(files) for problem in self._take(given, entries)]:
            raise ConfigError(problems)
        names = [action.dest for action in positional]
        self.set_defaults(**{name: value for name, value in entries.items() if name not in names})
        found = super().parse_args(words, namespace)
        typed = [value for name in names if (value := getattr(found, name)) is not None]
        open_names = [name for name in names if name not in entries]
        if typed and len(typed) == len(open_names) < len(names):  # one in the file, the other on the command line
            entries |= dict(zip(open_names, typed, strict=True))
        else:
            entries |= dict(zip(names, typed, strict=False))
        for name in names:
            setattr(found, name, entries.get(name))
        if missing := [str(action.metavar) for action in positional if action.dest not in entries]:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        return found

    def _take(self, given: GivenOptionValue, entries: dict[str, Any]) -> list[Problem]:
        """Puts the value of a file's entry into `entries`."""
        actions = {action.dest: action for action in self._actions if action.dest not in ("help", "config")}
        if given.name in LAUNCH_OPTIONS or given.value is None:
            return []
        if (action := actions.get(given.name)) is None:
            fix = did_you_mean_hint(given.name, list(actions)) or f"{self.prog} --help"
            return [Problem(given.label, f"is not an option of {self.prog}", fix)]
        if action.nargs == 0 and not isinstance(given.value, bool):  # a switch
            return [Problem(given.label, "must be true or false", f"{given.name}: true")]
        try:
            value = given.value if action.nargs == 0 else self._get_value(action, str(given.value))
            if action.nargs != 0:
                self._check_value(action, value)
        except argparse.ArgumentError as error:
            return [Problem(given.label, str(error.message), f"{self.prog} --help")]
        entries[given.name] = value
        return []


def config_files_and_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files of `--config`, and a YAML file as the first word; the other words."""
    first = [word for word in words[:1] if Path(word).suffix in (".yaml", ".yml")]
    parser = UserErrorArgumentParser(prog="megaswift convert", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    named, others = parser.parse_known_args(list(words[len(first) :]))
    return [*first, *named.config], others


def entries_of_files(files: Sequence[str]) -> list[GivenOptionValue]:
    """ConfigError where a file cannot be read."""
    sources = [read_config_file(file, TRAINING) for file in files]
    if problems := [problem for source in sources for problem in source.problems]:
        raise ConfigError(problems)
    return [given for source in sources for given in source.givens]
