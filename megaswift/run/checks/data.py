"""Checks data sets and the chat template before the model is loaded: whether they are there and of the right kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megaswift.config import SwiftConfig
from megaswift.data.indexed.files import open_indexed_tokens
from megaswift.data.options.indexed import parse_indexed_blend
from megaswift.data.sources.files import cached_dataset_folder, resolve_dataset_files
from megaswift.data.sources.remote import check_remote_dataset, is_remote_dataset
from megaswift.data.templates.chosen import check_template, read_system_message
from megaswift.errors import Problem, UserError, missing_path_hint


def data_problems(cfg: SwiftConfig) -> list[Problem]:
    """Report data sets and chat templates that do not exist. `megaswift.data` reads their content later."""
    problems: list[Problem] = []
    checks: list[Callable[[], object]] = [
        check for option in ("dataset", "val_dataset") for check in _data_set_checks(cfg.value(option), f"--{option}")
    ]
    if absent := [file for file in cfg.train.external_plugins if not Path(file).expanduser().is_file()]:
        problems += [
            Problem(f"--external_plugins {file}", "no such file", missing_path_hint(Path(file))) for file in absent
        ]
    if cfg.train.max_steps is None and parse_indexed_blend(cfg.data.dataset) is not None:
        names = " ".join(cfg.data.dataset)
        problems.append(Problem(f"--dataset {names}", "indexed data are drawn for a number of steps", "--max_steps N"))
    if cfg.data.chat_template is not None:
        checks.append(partial(check_template, cfg.data.chat_template))
    if cfg.data.system is not None:
        checks.append(partial(read_system_message, cfg.data.system))
    for check in checks:
        try:
            check()
        except UserError as error:
            problems += error.problems
    return problems


def _data_set_checks(entries: Sequence[str], flag: str) -> list[Callable[[], object]]:
    blend = parse_indexed_blend(entries)
    if blend is not None:
        return [partial(open_indexed_tokens, prefix) for prefix in blend.prefixes]
    return [
        partial(check_remote_dataset, name, flag)
        if is_remote_dataset(name)
        else partial(resolve_dataset_files, name, _later, flag)
        for name in entries
        if not cached_dataset_folder(name)
    ]


def _later(name: str, subset: str | None, hub: str) -> tuple[Path, ...]:
    """Hub ids are resolved when the data are read."""
    return ()
