"""Commands in a folder of shell scripts, as a user would have typed them.

Owns reading scripts: joined lines, the environment before a command, and variables that the script sets itself.
"""

from __future__ import annotations

import functools
import operator
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TASKS = ("pt", "sft", "rlhf", "dpo", "kto", "grpo", "ppo", "rm", "orpo", "cpo", "simpo")
INFERENCE = ("infer", "deploy", "export")
PROGRAMS = ("swift", "megatron")
SCRIPT = re.compile(r"(?:^|/)(?:swift/)?cli/(?:_megatron/)?(pt|sft|rlhf|infer|deploy|export)\.py$")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_QUOTIENT = re.compile(r"\$\(expr\s+(\d+(?:\s*/\s*\d+)+)\s*\)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class Command:
    """One command of TASKS or INFERENCE."""

    file: str
    line: int
    program: str
    task: str
    words: tuple[str, ...]
    environ: dict[str, str]


def commands_in_folder(folder: Path) -> list[Command]:
    """Of all scripts below `folder`, in order of their paths."""
    return [c for file in sorted(folder.rglob("*.sh")) for c in commands_in_script(file, str(file.relative_to(folder)))]


def commands_in_script(file: Path, name: str) -> Iterator[Command]:
    """Every command of one script."""
    variables: dict[str, str] = {}
    for number, text in _logical_lines(file.read_text(encoding="utf-8", errors="replace")):
        try:
            words = shlex.split(_without_comment(_expanded(text, variables)))
        except ValueError:  # an unfinished quotation: text of another language inside the script
            continue
        environ: dict[str, str] = {}
        while words and (found := _ASSIGNMENT.match(words[0].removeprefix("export "))):
            environ[found[1]] = found[2]
            words = words[1:]
        if words[:1] == ["export"]:
            environ |= {m[1]: m[2] for m in map(_ASSIGNMENT.match, words[1:]) if m}
            words = []
        if not words:
            variables |= environ
            continue
        if command := _command(words):
            program, task, rest = command
            known = {k: v for k, v in variables.items() if k.isupper()}
            yield Command(name, number, program, task, rest, known | environ)


def _without_comment(text: str) -> str:
    """The text up to a comment. As in a shell, `#` begins one at the start of a word only: `rows#500` is a word."""
    quote = ""
    for at, char in enumerate(text):
        escaped = at > 0 and text[at - 1] == "\\" and quote != "'"
        if quote:
            quote = "" if char == quote and not escaped else quote
        elif char in "'\"" and not escaped:
            quote = char
        elif char == "#" and (at == 0 or text[at - 1] in " \t;&|()"):
            return text[:at]
    return text


def _command(words: list[str]) -> tuple[str, str, tuple[str, ...]] | None:
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) else ""
        if word in PROGRAMS and following in (*TASKS, *INFERENCE):
            return word, following, _arguments(words[i + 2 :])
        if found := SCRIPT.search(word):
            return "megatron" if "_megatron" in word else "swift", found[1], _arguments(words[i + 1 :])
    return None


def _arguments(words: list[str]) -> tuple[str, ...]:
    """Up to the end of the command."""
    ends = (i for i, w in enumerate(words) if w in ("&", "&&", "|", "||", ";", ">", ">>", "2>&1", "2>"))
    return tuple(words[: next(ends, len(words))])


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their number, continued ones joined; comment lines in between are skipped as a shell's reader would
    expect them to be."""
    begin, parts = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if not parts:
            begin = number
        if line.lstrip().startswith("#"):
            continue
        if line.rstrip().endswith("\\"):
            parts.append(line.rstrip()[:-1])
            continue
        yield begin, " ".join([*parts, line])
        parts = []
    if parts:
        yield begin, " ".join(parts)


def _expanded(text: str, variables: dict[str, str]) -> str:
    plain = _VARIABLE.sub(lambda m: variables.get(m[1] or m[3], m[2] if m[2] is not None else m[0]), text)
    return _QUOTIENT.sub(lambda m: str(functools.reduce(operator.floordiv, map(int, m[1].split("/")))), plain)
