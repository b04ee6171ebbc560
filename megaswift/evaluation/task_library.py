"""Finds the tasks that `--tasks` names and reads their data, before a model is loaded: names, task files, and files of
questions. All that is wrong with them is reported together."""

from __future__ import annotations

import difflib
import logging
import random
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex
from yaml import YAMLError

from megaswift.data.sources.files import KIND_OF
from megaswift.errors import ConfigError, DataError, Problem, UserError, first_line, missing_path_hint
from megaswift.evaluation.question_task import QuestionTask, task_name
from megaswift.evaluation.questions import Question, read_questions

NEAR = 5
"""Names that are offered in place of an unknown one."""
TASK_FILES = (".yaml", ".yml")
REFUSALS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    AssertionError,
    YAMLError,
)
"""What lm-evaluation-harness and datasets raise for a task that they cannot load."""


class CutNotes(logging.Handler):
    """Counts the notes about questions that are too long; other notes of the libraries are dropped."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.cut = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Take a note."""
        self.cut += "truncat" in record.getMessage().lower()


@contextmanager
def quiet_harness() -> Iterator[CutNotes]:
    """Keep the notes of lm-evaluation-harness and datasets off the screen; errors of theirs become ours."""
    notes = CutNotes()
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        logger.addHandler(notes)
    try:
        yield notes
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(notes)
            logger.setLevel(level)
            logger.propagate = propagate


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch, which lm-evaluation-harness seeds."""
    python = random.getstate()
    state = np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(state)


def split_names(words: Sequence[str]) -> list[str]:
    """Return the entries of `--tasks`: by words and by commas, as lm-evaluation-harness has them."""
    found: list[str] = []
    for word in words:
        found += [word] if Path(word).exists() else [part.strip() for part in word.split(",") if part.strip()]
    return list(dict.fromkeys(found))


def is_question_file(name: str) -> bool:
    """Return whether an entry is a data file."""
    return Path(name.partition("#")[0]).suffix.lower() in KIND_OF


def load_tasks(words: Sequence[str], include_path: Sequence[str], chat: bool, flag: str = "--tasks") -> Any:
    """Read all tasks.

    Args:
        words: The entries of the option.
        include_path: Folders with further task files.
        chat: Whether files of questions go into the chat template.
        flag: The option, for messages.

    Returns:
        The tasks and groups with their data, as lm-evaluation-harness's `TaskManager.load` returns them.

    Raises:
        UserError: Everything that is wrong with the tasks and their data.
    """
    names = split_names(words)
    files = [name for name in names if is_question_file(name)]
    listed = [name for name in names if name not in files]
    with quiet_harness(), kept_random_state():
        # The index of fourteen thousand names takes seconds: it is built only where a name is asked for.
        by_name = any(Path(name).suffix.lower() not in TASK_FILES for name in listed)
        problems = [
            Problem(f"--include_path {folder}", "no such folder", missing_path_hint(Path(folder)))
            for folder in include_path
            if not Path(folder).is_dir()
        ]
        if problems:
            raise ConfigError(problems)
        manager = TaskManager(include_path=list(include_path), include_defaults=by_name)
        wanted: list[Any] = []
        for name in listed:
            wanted += _matching(manager, name, flag, problems)
        if problems:
            raise ConfigError(problems)
        questions = read_question_files(files)
        loaded = _loaded(manager, wanted, flag)
        for file, rows in questions.items():
            name = free_name(task_name(file), loaded["tasks"])
            loaded["tasks"][name] = QuestionTask(name, rows, chat)
        return loaded


def _matching(manager: TaskManager, name: str, flag: str, problems: list[Problem]) -> list[str]:
    """The tasks of an entry; what is wrong with it goes into `problems`."""
    what = f"{flag} {name}"
    if Path(name).suffix.lower() in TASK_FILES:
        try:
            entry = TaskIndex.entry_from_path(Path(name))
        except REFUSALS as error:
            fix = "docs/evaluation.md shows a task file"
            problems.append(Problem(what, f"is not a task file of lm-evaluation-harness: {first_line(error)}", fix))
            return []
        if entry is None:
            problems.append(Problem(what, "no such file", missing_path_hint(Path(name))))
            return []
        return [name]
    if name in manager.task_index:
        return [name]
    if matches := manager.match_tasks([name]):
        return list(matches)
    near = difflib.get_close_matches(name, manager.all_tasks, NEAR, cutoff=0.5)
    near = near or [known for known in manager.all_tasks if known.startswith(name[:4])][:NEAR]
    fix = f"near names: {', '.join(near)}" if near else "lm-eval ls tasks lists the names"
    problems.append(Problem(what, "is no task of lm-evaluation-harness, and no file", fix))
    return []


def read_question_files(files: Sequence[str]) -> dict[str, list[Question]]:
    """Read files of questions; DataError with what is wrong in any of them."""
    read: dict[str, list[Question]] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            read[file] = read_questions(file)
        except UserError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return read


def free_name(name: str, taken: Container[str]) -> str:
    """Return the name, with a number behind it if there is such a task already."""
    return next(one for i in count(1) if (one := name if i == 1 else f"{name}-{i}") not in taken)


def _loaded(manager: TaskManager, wanted: Sequence[Any], flag: str) -> Any:
    """Read the data of all tasks; DataError with each that cannot be read."""
    try:
        return manager.load(list(wanted))
    except REFUSALS as error:
        together = first_line(error)
    problems = []
    for one in wanted:
        if not isinstance(one, str):
            continue
        try:
            manager.load([one])
        except REFUSALS as error:
            fix = "download its data set where there is a network, or write a task file over local files"
            problems.append(Problem(f"{flag} {one}", f"its data cannot be read: {first_line(error)}", fix))
    raise DataError(problems or [Problem(flag, together, "name each task once")])
