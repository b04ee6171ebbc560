"""A command in megaswift's terms while it is translated: entries of the file, what was left out, what is open.

Owns the record; `commands.py` fills it and `run_file.py` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaswift.base.redaction import MASK, is_secret
from megaswift.config.sections import Sections
from megaswift.errors import Problem
from megaswift.options.given_options import LISTS_ALL
from megaswift.options.sources import ConfigSource, GivenOptionValue
from megaswift.options.values import option_value_text

LONGEST_LIST = 200
"""Characters of a list of options in a line."""
NOT_SET = "the script does not set {0}"
SECRET = "a secret is not copied; set it in the environment"


@dataclass(frozen=True)
class MigratedOption:
    """One line of the file."""

    name: str
    value: Any
    label: str
    """What it comes from, as it was written there."""
    comment: str = ""
    of_default: bool = False
    """Written out because the other toolkit's default differs."""
    spelling: str = ""
    """As the command spelled the name, where that counts: `save_safetensors false` is more than `export_hf false`."""

    @property
    def given(self) -> GivenOptionValue:
        """As the loader will read it."""
        text = MASK if is_secret(self.name) else option_value_text(self.value)
        return GivenOptionValue(self.name, self.value, f"{self.name}: {text}", self.spelling or f"{self.name}:")


@dataclass
class MigratedRun:
    """What becomes of one command."""

    toolkit: str
    place: str
    task: str | None
    options: dict[str, MigratedOption] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    """Options that the command sets to none."""
    accepted: dict[str, tuple[GivenOptionValue, str]] = field(default_factory=dict)
    """Options that are none of megaswift's and change nothing, each with the reason, while the loader does not refuse
    them beside the others."""
    left_out: list[str] = field(default_factory=list)
    """Options without effect, each with the reason."""
    questions: list[Problem] = field(default_factory=list)
    """What the user has to decide."""
    notes: list[str] = field(default_factory=list)
    """What the loader says of the file."""
    launch: dict[str, str] = field(default_factory=dict)
    """Values of NPROC_PER_NODE and the like."""
    hostfile: str = ""
    """A launcher's file of hosts, as it was written there."""
    environment: dict[str, str] = field(default_factory=dict)
    variables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The variables in each value of the launch or the environment, as written, by its name in capitals."""
    sections: Sections | None = None
    """The configuration that the file resolves to."""

    def add(self, option: MigratedOption) -> None:
        """A line; a later one of the same name replaces an earlier one."""
        self.replace(option.name, option.label)
        self.options[option.name] = option

    def replace(self, name: str, by: str) -> None:
        """Takes out the line of an option that the command gives again, as `by`."""
        earlier = self.options.pop(name, None)
        if earlier is not None and not earlier.of_default and earlier.label != by:
            self.left_out.append(f"{earlier.label}: {by} comes later")

    def ask(self, what: str, rule: str, fix: str = "") -> None:
        """Something for the user to decide."""
        if (question := Problem(what, rule, fix)) not in self.questions:
            self.questions.append(question)

    def ask_problem(self, problem: Problem, what: str = "") -> None:
        """The same of a mistake that the loader would report."""
        fix = LISTS_ALL.format(task=self.task or "TASK") if problem.fix == LISTS_ALL else problem.fix
        self.ask(what or problem.what, problem.rule, fix)

    @property
    def open(self) -> list[str]:
        """The questions, a line each; those with one answer on one line."""
        lines: dict[tuple[str, str], list[str]] = {}
        for question in self.questions:
            lines.setdefault((question.rule, question.fix), []).append(question.what)
        return [
            f"{names}: {rule}" + (f"; {fix}" if fix else "")
            for (rule, fix), whats in lines.items()
            for names in _joined(whats)
        ]

    def source(self) -> ConfigSource:
        """The file as the loader will see it, and what the file leaves out as accepted without effect."""
        accepted = (given for given, _ in self.accepted.values())
        return ConfigSource((*(option.given for option in self.options.values()), *accepted))

    def launched_processes(self) -> int | None:
        """The number of processes on all nodes; None where a number is not known."""
        counts: Mapping[str, str] = {"nproc_per_node": "1", "nnodes": "1"} | self.launch
        numbers = [counts["nproc_per_node"], counts["nnodes"]]
        known = all(re.fullmatch(r"[1-9]\d{0,5}", n) for n in numbers)
        return int(numbers[0]) * int(numbers[1]) if known else None


def _joined(whats: Iterable[str]) -> Iterator[str]:
    """The subjects of one answer, as many on a line as are readable."""
    line = ""
    for what in whats:
        if line and len(line) + len(what) > LONGEST_LIST:
            yield line
            line = ""
        line = f"{line}, {what}" if line else what
    yield line
