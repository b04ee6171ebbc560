"""`megaswift migrate`: scripts and configuration files of other toolkits as YAML files of megaswift.

Owns the command: files in, files out, the exit code. Reading and translating is `megaswift.migration`'s. Nothing of
what is read is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from megaswift import log
from megaswift.atomic_disk_writes import write_atomically
from megaswift.command_line_common import UserErrorArgumentParser
from megaswift.config.option_sources import LARGEST_FILE, read_config_file
from megaswift.errors import ConfigError, Problem, UserError
from megaswift.migration.foreign_command import WITHOUT_A_FILE, ForeignCommand, command_of_file, foreign_commands
from megaswift.migration.migrated_run import MigratedRun
from megaswift.migration.translate_command import migrated_run
from megaswift.migration.write_run_file import ask_for_missing, run_file_text

EXIT_OPEN = 3
"""Every command was translated, and something is left for the user."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
USAGE = """\
Translates training scripts and configuration files of ms-swift, Megatron-LM, transformers, TRL and LLaMA-Factory, also
behind torchrun, accelerate and deepspeed, to YAML files of megaswift. Nothing is run. Exit code: 0 everything is
translated; 3 something is left for you to decide (it is in the file, as comments); 2 a file cannot be read or has no
training command."""


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = UserErrorArgumentParser(prog="megaswift migrate", description=USAGE, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="shell scripts, YAML or JSON files")
    parser.add_argument("--output", type=Path, help="the file to write, for one command (default: standard output)")
    parser.add_argument("--output_dir", type=Path, help="folder for one file per command")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    given = parser.parse_args(list(argv))
    runs: list[tuple[MigratedRun, str]] = []
    problems: list[Problem] = []
    for file in given.files:
        try:
            found = [migrated_run(command, file.parent) for command in _commands(file)]
            runs += [(run, _name(file, i, len(found))) for i, run in enumerate(found)]
        except UserError as error:
            problems += error.problems
    for run, _ in runs:
        if run.task is None:
            log.warn(f"{run.place}: not translated: {'; '.join(run.open)}")
    _write([(run, name) for run, name in runs if run.task is not None], given)
    if problems:
        raise ConfigError(problems)
    return EXIT_OPEN if any(run.open for run, _ in runs) else 0


def _name(file: Path, number: int, count: int) -> str:
    return f"{file.stem}-{number + 1}.yaml" if count > 1 else f"{file.stem}.yaml"


def _commands(file: Path) -> list[ForeignCommand]:
    """The training commands of a file; ConfigError where there is none."""
    if file.suffix.lower() in CONFIG_SUFFIXES:
        return [command_of_file(read_config_file(str(file)), file.name)]
    found = list(foreign_commands(_text(file), file.name))
    others = [c for c in found if c.task in WITHOUT_A_FILE]
    if len(others) < len(found):
        for command in others:
            log.warn(f"{command.place}: {command.task} is no training command; {_instead(command)}")
        return [c for c in found if c.task not in WITHOUT_A_FILE]
    if others:
        rule = f"has no training command; {others[0].task} takes its options on the command line"
        raise ConfigError(Problem(others[0].place, rule, _instead(others[0])))
    raise ConfigError(
        Problem(
            str(file),
            "has no training command of ms-swift, Megatron-LM, transformers, TRL or LLaMA-Factory",
            "give the script that starts the training",
        )
    )


def _instead(command: ForeignCommand) -> str:
    own = command.task in ("infer", "deploy", "export")
    return f"megaswift {command.task} --help lists its options" if own else "megaswift --help lists the commands"


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(str(file), f"cannot be read: {getattr(error, 'strerror', None) or error}")) from None
    if len(content) > LARGEST_FILE:
        raise ConfigError(Problem(str(file), f"is larger than {LARGEST_FILE >> 20} MiB, too large for a script"))
    if "\0" in text:
        raise ConfigError(Problem(str(file), "contains NUL bytes: it is not a text file", "give the shell script"))
    return text


def _write(runs: list[tuple[MigratedRun, str]], given: argparse.Namespace) -> None:
    if len(runs) > 1 and given.output_dir is None:
        places = ", ".join(run.place for run, _ in runs)
        raise ConfigError(
            Problem(" ".join(map(str, given.files)), f"has several commands: {places}", "--output_dir DIR")
        )
    targets = dict(_targets(runs, given))
    existing = [str(path) for path in targets if path.exists()]
    if existing and not given.overwrite:
        raise ConfigError(Problem(" ".join(existing), "exists", "--overwrite, or another --output_dir"))
    for run, name in runs:
        ask_for_missing(run)
        path = next((p for p, r in targets.items() if r is run), None)
        text = run_file_text(run, str(path or name))
        if path is None:
            print(text, end="")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        state = f"{len(run.open)} left to decide" if run.open else "complete"
        log.print_result(f"wrote {path} ({run.place}: {state})")


def _targets(runs: list[tuple[MigratedRun, str]], given: argparse.Namespace) -> Iterator[tuple[Path, MigratedRun]]:
    if given.output is not None:
        yield from ((given.output, run) for run, _ in runs)
    elif given.output_dir is not None:
        names: set[str] = set()
        for run, name in runs:
            stem, number = Path(name).stem, 1
            while name in names:
                number += 1
                name = f"{stem}_{number}.yaml"
            names.add(name)
            yield given.output_dir / name, run
