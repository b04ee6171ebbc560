"""`megaswift migrate`: scripts and configuration files of other toolkits as YAML files of megaswift.

Owns the command: files in, files out, the exit code. Reading and translating is `megaswift.compat.scripts`. Nothing of
what is read is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaswift import log
from megaswift.base.atomic_writes import write_atomically
from megaswift.base.command_words import UserErrorArgumentParser
from megaswift.compat.scripts.commands import migrated_run
from megaswift.compat.scripts.inference import migrated_command, migrated_command_script_text
from megaswift.compat.scripts.migrated_run import MigratedRun
from megaswift.compat.scripts.run_file import ask_for_missing, run_file_text
from megaswift.compat.scripts.toolkits import (
    WITHOUT_A_FILE,
    ForeignCommand,
    command_of_file,
    foreign_commands,
)
from megaswift.config.sections import TRAINING
from megaswift.errors import ConfigError, Problem, UserError
from megaswift.inference.options.parser import CommandParser
from megaswift.options.files import LARGEST_FILE, read_config_file

EXIT_OPEN = 3
"""Every command was translated, and something is left for the user."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
USAGE = """\
Translates training scripts and configuration files of ms-swift, Megatron-LM, transformers, TRL and LLaMA-Factory, also
behind torchrun, accelerate and deepspeed, to YAML files of megaswift; ms-swift's infer, deploy and export to shell
scripts. Nothing is run. Exit code: 0 everything is translated; 3 something is left for you to decide (it is in the
file, as comments); 2 a file cannot be read or has no command."""


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code."""
    parser = UserErrorArgumentParser(prog="megaswift migrate", description=USAGE, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="shell scripts, YAML or JSON files")
    parser.add_argument("--output", type=Path, help="the file to write, for one command (default: standard output)")
    parser.add_argument("--output_dir", type=Path, help="folder for one file per command")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    given = parser.parse_args(list(argv))
    migrated: list[_Migrated] = []
    problems: list[Problem] = []
    for file in given.files:
        try:
            commands = _commands(file)
            stems = [f"{file.stem}-{i + 1}" for i in range(len(commands))] if len(commands) > 1 else [file.stem]
            migrated += [_translated(c, file.parent, stem) for c, stem in zip(commands, stems, strict=True)]
        except UserError as error:
            problems += error.problems
    for one in migrated:
        if not one.name:
            log.warn(f"{one.run.place}: not translated: {'; '.join(one.run.open)}")
    _write([one for one in migrated if one.name], given)
    if problems:
        raise ConfigError(problems)
    return EXIT_OPEN if any(one.run.open for one in migrated) else 0


@dataclass(frozen=True)
class _Migrated:
    run: MigratedRun
    name: str
    """The name of the file to write; empty where there is nothing to write."""
    text: Callable[[str], str]
    """Its content, by the path that it will have."""


def _translated(command: ForeignCommand, folder: Path, stem: str) -> _Migrated:
    if command.task in WITHOUT_A_FILE:
        made = migrated_command(command, _parser(command.task), folder)
        return _Migrated(made.run, f"{stem}.sh" if made.groups else "", lambda _: migrated_command_script_text(made))
    run = migrated_run(command, folder)
    if run.task is not None:
        ask_for_missing(run)
    return _Migrated(run, f"{stem}.yaml" if run.task is not None else "", lambda path: run_file_text(run, path))


def _parser(command: str) -> CommandParser | None:
    """Returns the parser of a command that does not train; it is imported on demand, since each has its own
    dependencies."""
    if command == "infer":
        from megaswift.infer import COMMAND as INFER

        return INFER
    if command == "deploy":
        from megaswift.deploy import COMMAND as DEPLOY

        return DEPLOY
    if command == "export":
        from megaswift.export import COMMAND as EXPORT

        return EXPORT
    if command == "eval":
        from megaswift.eval import COMMAND as EVAL

        return EVAL
    if command == "sample":
        from megaswift.sample import COMMAND as SAMPLE

        return SAMPLE
    return None


def _commands(file: Path) -> list[ForeignCommand]:
    """The commands of a file; ConfigError where there is none."""
    if file.suffix.lower() in CONFIG_SUFFIXES:
        return [command_of_file(read_config_file(str(file), TRAINING), file.name)]
    found = list(foreign_commands(_text(file), file.name))
    if not found:
        rule = "has no command of ms-swift, Megatron-LM, transformers, TRL or LLaMA-Factory"
        raise ConfigError(Problem(str(file), rule, "give the script that starts the training"))
    return found


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


def _write(migrated: list[_Migrated], given: argparse.Namespace) -> None:
    inputs = " ".join(map(str, given.files))
    if len(migrated) > 1 and given.output_dir is None:
        places = ", ".join(one.run.place for one in migrated)
        raise ConfigError(Problem(inputs, f"has several commands: {places}", "--output_dir DIR"))
    targets = list(_targets(migrated, given))
    own = [str(path) for path, _ in targets if path and any(path.resolve() == f.resolve() for f in given.files)]
    existing = [str(path) for path, _ in targets if path and path.exists()]
    if own:
        raise ConfigError(Problem(" ".join(own), "is a file to translate", "another --output or --output_dir"))
    if existing and not given.overwrite:
        raise ConfigError(Problem(" ".join(existing), "exists", "--overwrite, or another --output or --output_dir"))
    for path, one in targets:
        text = one.text(str(path or one.name))
        if path is None:
            print(text, end="")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        state = f"{len(one.run.open)} left to decide" if one.run.open else "complete"
        log.print_result(f"wrote {path} ({one.run.place}: {state})")
    if len(targets) == 1 and (path := targets[0][0]) is not None and path.suffix == ".yaml":
        log.print_result(f"next:\n  megaswift config {path}\n  megaswift data show {path}")


def _targets(migrated: list[_Migrated], given: argparse.Namespace) -> Iterator[tuple[Path | None, _Migrated]]:
    names: set[str] = set()
    for one in migrated:
        name = one.name
        number = 1
        while name in names:
            number += 1
            name = f"{Path(one.name).stem}_{number}{Path(one.name).suffix}"
        names.add(name)
        yield given.output or (given.output_dir / name if given.output_dir else None), one
