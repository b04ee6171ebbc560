"""Commands of ms-swift that do not train (`infer`, `deploy`, `export`) as shell scripts: they take no file here.

Owns the translation by the command's own parser, which the caller gives: what it refuses is left out and asked.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megaswift.base.command_words import ELSEWHERE
from megaswift.base.redaction import is_secret
from megaswift.compat.scripts.launch import PIXELS_HINT, launch_of_command, launch_words
from megaswift.compat.scripts.migrated_run import NOT_SET, SECRET, MigratedRun
from megaswift.compat.scripts.run_file import head_lines, remark_lines
from megaswift.compat.scripts.toolkits import ForeignCommand
from megaswift.compat.variables import OPTIONS
from megaswift.errors import ConfigError, Problem, UserError
from megaswift.inference.options.parser import CommandParser


@dataclass
class MigratedCommand:
    """What becomes of a command that does not train."""

    run: MigratedRun
    """Its questions, launch and environment."""
    name: str
    groups: list[list[str]] = field(default_factory=list)
    """An option with its values each."""


def migrated_command(command: ForeignCommand, parser: CommandParser | None, folder: Path) -> MigratedCommand:
    """The command in megaswift's options; `parser`: of the command here, None where there is none."""
    name = command.task or ""
    made = MigratedCommand(MigratedRun(command.toolkit, command.place, None), name)
    if parser is None:
        made.run.ask(f"{command.toolkit} {name}", "is not a command here", ELSEWHERE.get(name, "megaswift --help"))
        return made
    for given in [given for source in launch_of_command(made.run, command, folder) for given in source.givens]:
        if given.name in OPTIONS.values():
            made.run.ask(given.label, "is a setting of ms-swift", PIXELS_HINT)
    for word in command.words:
        if word.text.startswith("--") or not made.groups:
            made.groups.append([])
        made.groups[-1].append(word.text)
    unresolved = {w.text: w.unresolved for w in command.words if w.unresolved}
    for group in list(made.groups):
        flag = group[0].partition("=")[0]
        if flag.startswith("--") and is_secret(flag[2:].replace("-", "_")):
            made.groups.remove(group)
            made.run.left_out.append(f"{flag}: {SECRET}")
        elif names := [n for word in group for n in unresolved.get(word, ())]:
            made.groups.remove(group)
            made.run.ask(" ".join(group), NOT_SET.format(", ".join(names)))
    _settle(made, parser)
    return made


def _settle(made: MigratedCommand, parser: CommandParser) -> None:
    """Takes out what the command's parser refuses."""
    for _ in range(len(made.groups) + 1):
        try:
            parser.parse([word for group in made.groups for word in group])
            return
        except ConfigError as error:
            wrong = [p for p in error.problems if not p.rule.startswith("no such")]  # a path of the other machine
            if not _drop(made, wrong):
                for problem in wrong:
                    made.run.ask_problem(problem)
                made.run.notes += [str(p).replace("\n    try:", ";") for p in error.problems if p not in wrong]
                return
        except UserError as error:
            for problem in error.problems:
                made.run.ask_problem(problem)
            return


def _drop(made: MigratedCommand, problems: list[Problem]) -> bool:
    for problem in problems:
        flag = problem.what.split(" ")[0]
        group = next((g for g in made.groups if g[0].partition("=")[0] == flag), None)
        if group is not None:
            made.groups.remove(group)
            made.run.ask(" ".join(group), problem.rule, problem.fix)
            return True
    return False


def migrated_command_script_text(made: MigratedCommand) -> str:
    """The whole script."""
    return "\n".join(_lines(made)) + "\n"


def _lines(made: MigratedCommand) -> Iterator[str]:
    yield from head_lines(made.run)
    yield from remark_lines(made.run)
    yield ""
    words = [*launch_words(made.run), "megaswift", made.name]
    options = [" ".join(map(shlex.quote, group)) for group in made.groups]
    yield " \\\n    ".join([" ".join(words), *options])
