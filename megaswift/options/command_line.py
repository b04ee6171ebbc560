"""Reads a command line: `--name value...`, `--name=value`, `--switch`, and the configuration file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaswift.base.redaction import MASK, is_secret
from megaswift.errors import Problem
from megaswift.options.files import DATA_SUFFIXES
from megaswift.options.option import OptionTable
from megaswift.options.sources import GivenOptionValue, normalize_name
from megaswift.options.values import FALSE, TRUE, example_flag_text

_FLAG = re.compile(r"^--[A-Za-z]")
SINGLE_VALUE_FIXES = {
    "adapters": "give one folder; to start from several, merge the others into the model first: megaswift export "
    "--merge_lora true",
}
"""Advice for several values of an option that takes one."""


@dataclass
class ParsedCommandLine:
    """What stands on a command line."""

    files: list[str] = field(default_factory=list)
    givens: list[GivenOptionValue] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def _stray(word: str, rule: str, fix: str) -> Problem:
    """A word that no flag takes; what looks like data was meant for --dataset."""
    return Problem(word, rule, f"--dataset {word}" if Path(word).suffix.lower() in DATA_SUFFIXES else fix)


def _one_dash(word: str, table: OptionTable) -> bool:
    """`-lr`: an option that lacks a dash."""
    return (
        word[:1] == "-"
        and bool(_FLAG.match(f"-{word}"))
        and normalize_name(f"-{word.partition('=')[0]}") in table.names
    )


def _with_two_dashes(words: Sequence[str]) -> Problem:
    typed = " ".join(words)
    return Problem(typed, "is not an option: option names begin with two dashes", f"-{typed}")


def read_command_line(argv: list[str], table: OptionTable) -> ParsedCommandLine:
    """A first word that is no flag, and --config, name files; the rest are `--name value...`, `--name=value`,
    `--switch`."""
    line = ParsedCommandLine()
    words = list(argv)
    if words and not _FLAG.match(words[0]) and not _one_dash(words[0], table):
        line.files.append(words.pop(0))
    while words:
        word = words.pop(0)
        if not _FLAG.match(word):
            if _one_dash(word, table):
                values = [] if not words or _FLAG.match(words[0]) else [words.pop(0)]
                line.problems.append(_with_two_dashes([word, *values]))
                continue
            line.problems.append(
                _stray(
                    word,
                    "is an unexpected argument",
                    "give options as --name value, and the configuration file first or after --config",
                )
            )
            continue
        flag, equals, text = word.partition("=")
        values = [text] if equals else []
        while not equals and words and not _FLAG.match(words[0]) and not _one_dash(words[0], table):
            values.append(words.pop(0))
        _take(line, flag, values, table)
    if any(given.name == "deepspeed_config" for given in line.givens):  # DeepSpeed's own arguments: a switch and a file
        line.problems = [p for p in line.problems if (p.what, p.rule) != ("--deepspeed", "has no value")]
    if len(line.files) > 1:
        line.problems.append(
            Problem(
                " and ".join(line.files),
                "only one configuration file is allowed",
                "give one file, followed by options that override it",
            )
        )
    return line


def _take(line: ParsedCommandLine, flag: str, values: list[str], table: OptionTable) -> None:
    name = normalize_name(flag)
    option = table.options.get(table.names.get(name, ""))
    hidden = option.details.get("secret", False) if option else is_secret(name)
    label = " ".join([flag, *([MASK] if hidden else values)])
    if name in ("config", "config_file"):
        line.files += values
        line.problems += [] if values else [Problem(flag, "has no value", "--config run.yaml")]
    elif not values and option is not None and option.switches and name != option.name:
        line.givens.append(GivenOptionValue(name, True, label, flag))
    elif not values and option is not None and option.kind != "bool":
        line.problems.append(Problem(flag, "has no value", example_flag_text(option)))
    elif option is None:
        several = values if len(values) > 1 and not hidden else None  # a list under a name of another toolkit
        line.givens.append(GivenOptionValue(name, several or (values[0] if values else True), label, flag))
    elif option.kind in ("list", "numbers", "integers", "map") and values:
        earlier = next((g for g in line.givens if g.name == name), None)
        if earlier:  # --dataset a --dataset b
            line.givens.remove(earlier)
            values = [*earlier.value, *values]
            label = f"{earlier.label} {label}"
        line.givens.append(GivenOptionValue(name, values, label, flag))
    elif option.kind == "bool" and (not values or values[0].lower() not in TRUE + FALSE) and len(values) != 1:
        line.givens.append(GivenOptionValue(name, True, label, flag))
        line.problems += [
            Problem(v, f"is an unexpected argument ({flag} is a boolean flag)", f"{flag} true") for v in values
        ]
    else:
        label = label if hidden else " ".join([flag, *values[:1]])
        line.givens.append(GivenOptionValue(name, values[0] if values else None, label, flag))
        why = f"is an unexpected argument ({flag} takes one value)"
        fix = SINGLE_VALUE_FIXES.get(option.name, f'quote values with spaces: {flag} "a b"')
        line.problems += [_stray(MASK if hidden else v, why, fix) for v in values[1:]]
