"""The doors through which the safety net looks at the package: the loader of training commands and the parsers of the
others.

The records of this folder look through these doors and through whole commands, so that a change that moves modules is
followed here alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from importlib.machinery import ModuleSpec
from unittest import mock

from megaswift.config import load_config
from megaswift.errors import UserError
from tests.sources import ROOT

PARSED = ("infer", "deploy", "export")
"""Commands that are no training."""
ACCEPTED = "accepted"
ENVIRON = {"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent"}
OPTIONAL = ("deepspeed", "transformer_engine", "deep_ep", "vllm", "sglang")
"""Packages that count as not installed."""
_OPTION = re.compile(r"(?<![\w-])--([A-Za-z]\w*)")
_FIND = importlib.util.find_spec
_HEAD = re.compile(r"- (.*?): ")
_ADVICE = "try: "


def outcome(command: str, words: Iterable[str]) -> str:
    """Return `accepted`, or `refused` with the options at fault and, behind a slash, the other options that the
    message names. Advice and wording are left out. Paths are relative to the repository."""
    with on_any_machine():
        try:
            if command in PARSED:
                importlib.import_module(f"megaswift.{command}").COMMAND.parse(list(words))
            else:
                load_config(command, list(words), environ={})
        except UserError as error:
            return refused(str(error))
    return ACCEPTED


def refused(message: str) -> str:
    """Return the outcome that a message about a command line shows."""
    return refusal(message, _HEAD, _OPTION)


def refusal(message: str, head: re.Pattern[str], option: re.Pattern[str]) -> str:
    """Return the outcome that a message of ours shows. `head` finds the part of a line that names what is at fault."""
    at_fault: set[str] = set()
    named: set[str] = set()
    for line in message.splitlines():
        text = line.strip()
        if text.startswith(_ADVICE):
            continue
        if found := head.match(text):
            at_fault |= set(option.findall(found[1]))
        named |= set(option.findall(text))
    others = sorted(named - at_fault)
    return " ".join(["refused", *sorted(at_fault), *(["/", *others] if others else [])])


@contextmanager
def on_any_machine() -> Iterator[None]:
    """Hide what differs between machines: the environment and packages that may be installed."""
    with ExitStack() as stack:
        stack.enter_context(chdir(ROOT))
        stack.enter_context(mock.patch.dict(os.environ, ENVIRON, clear=True))
        stack.enter_context(mock.patch("importlib.util.find_spec", _find_required))
        yield


def _find_required(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name.partition(".")[0] in OPTIONAL else _FIND(name, package)
