"""Commands translated in tests, and the configuration that the written file resolves to."""

from __future__ import annotations

from pathlib import Path

from megaswift.compat.scripts.commands import migrated_run
from megaswift.compat.scripts.migrated_run import MigratedRun
from megaswift.compat.scripts.run_file import ask_for_missing, run_file_text
from megaswift.compat.scripts.toolkits import foreign_commands
from megaswift.config import SwiftConfig, load_config


def translated(text: str, folder: Path) -> MigratedRun:
    """The run of a script with one command."""
    (command,) = foreign_commands(text, "run.sh")
    run = migrated_run(command, folder)
    ask_for_missing(run)
    return run


def loaded(run: MigratedRun, folder: Path) -> SwiftConfig:
    """What the file of a run says, read by the command that the file names."""
    path = folder / "migrated.yaml"
    path.write_text(run_file_text(run, "migrated.yaml"), encoding="utf-8")
    return load_config(run.task, [str(path)], environ={})
