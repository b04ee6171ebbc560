"""A translated command as the text of a YAML file, with a comment at every line that changed.

Owns the form of the file. Nothing of the input can leave a comment: control characters are written as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megaswift import compat
from megaswift.base.redaction import is_secret, redacted_command
from megaswift.compat.names.translated import RENAMED
from megaswift.compat.scripts.launch import LAUNCH_ORDER, command_line
from megaswift.compat.scripts.migrated_run import MigratedOption, MigratedRun
from megaswift.compat.scripts.settle import missing_options
from megaswift.config.resolve import Resolver
from megaswift.config.sections import NAMES, TRAINING
from megaswift.errors import ConfigError, Problem
from megaswift.options.files import read_config_file
from megaswift.version import __version__

LONGEST = 400
"""Characters of a comment."""


def run_file_text(run: MigratedRun, file: str) -> str:
    """Return the whole file, as the loader accepts it: a line that it refuses becomes a question.

    `settle.py` has checked the options before; lines of the launch, and values as YAML spells them, are checked here.
    """
    while True:
        text = "\n".join(_lines(run, file)) + "\n"
        refused = next(((n, p) for p in _problems_of_text(run, text) if (n := _line_at_fault(run, p))), None)
        if refused is None:
            return text
        name, problem = refused
        option = run.options.pop(name, None)
        what = f"{name}: {run.launch.pop(name)}" if option is None else option.label
        run.ask_problem(problem, what)


def _problems_of_text(run: MigratedRun, text: str) -> list[Problem]:
    """Return what the loader finds wrong with the text as a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            Resolver(compat).resolve(run.task, [read_config_file(str(path), TRAINING)])
        except ConfigError as error:
            return error.problems
    return []


def _line_at_fault(run: MigratedRun, problem: Problem) -> str:
    """The option whose line a message names: `/tmp/run.yaml:7 ray_address: auto`."""
    named = re.findall(r"\w+", problem.what.partition("run.yaml:")[2] or problem.what)
    words = [NAMES.get(word, word) for word in named]
    return next((word for word in words if word in run.options or word in run.launch), "")


def _lines(run: MigratedRun, file: str) -> Iterator[str]:
    yield from head_lines(run)
    yield from _comments(["Run it with:", f"  {command_line(run, file)}"])
    yield ""
    yield f"task: {run.task}"
    for option in run.options.values():
        if not option.of_default:
            yield _line(option)
    for name, value in run.launch.items():
        if name not in LAUNCH_ORDER or (name == "nproc_per_node" and "max_restarts" in run.launch):
            yield f"{name}: {_yaml_value(int(value) if value.isdecimal() else value)}"
    defaults = [o for o in run.options.values() if o.of_default]
    if defaults:
        yield ""
        yield from _comments([f"Defaults of {run.toolkit} that differ from megaswift's:"])
        yield from map(_line, defaults)
    yield from remark_lines(run)


def head_lines(run: MigratedRun) -> Iterator[str]:
    """Yield the comment that says where a file comes from."""
    yield from _comments([f"From {run.place} ({run.toolkit}), by megaswift migrate {__version__}."])


def remark_lines(run: MigratedRun) -> Iterator[str]:
    """Questions, what was left out, and notices, as comments."""
    for title, lines in (
        ("For you to decide; these are not part of the run:", run.open),
        ("Left out, because they change nothing:", run.left_out),
        ("What megaswift says of this file:", run.notes),
    ):
        if lines:
            yield ""
            yield from _comments([title, *(f"- {line}" for line in lines)])


def _line(option: MigratedOption) -> str:
    text = f"{option.name}: {_yaml_value(option.value)}"
    return f"{text}  # {_plain(option.comment)}" if option.comment else text


def _yaml_value(value: Any) -> str:
    """On one line."""
    import yaml

    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, float) and plain == int(plain):
        plain = int(plain)
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=str(plain).isprintable(), width=10**9)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _comments(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"# {_plain(line)}".rstrip()


def _plain(text: str) -> str:
    """One line without control characters and secrets; a long one is cut."""
    shown = re.sub(
        r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]+",
        lambda m: " " if m[0].isspace() else "?",
        redacted_command(text),
    )
    shown = re.sub(
        r"(\w+): (?!is |has |must |a secret is not copied)\S+",
        lambda m: f"{m[1]}: ***" if is_secret(m[1]) else m[0],
        shown,
    )
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."


def ask_for_missing(run: MigratedRun) -> None:
    """Adds what a run cannot do without and the command did not say."""
    words = {w.replace("-", "_") for q in run.questions for w in re.findall(r"[\w-]+", q.what.replace("--", " "))}
    asked = {NAMES.get(RENAMED.get(w, w)) for w in words}
    for problem in missing_options(run):
        if problem.what.removeprefix("--") not in asked:
            run.ask_problem(problem)
