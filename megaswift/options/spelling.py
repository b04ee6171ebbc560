"""Rewrites messages to show options as the user typed them: `--val_datasets` for `--val_dataset`, or the line of a
file.

Checks of later stages know an option by its canonical name only; their errors pass through here on the way out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megaswift.errors import Problem, UserError

_FLAG = re.compile(r"--([A-Za-z]\w*)( ?)")

_VALUE = re.compile(r"--([A-Za-z]\w*) [\w.+]+")


@dataclass(frozen=True)
class TypedOption:
    """How the user wrote an option."""

    spelling: str
    """Without the value: `--lr`, `run.yaml:3 lr:`, `lr=`."""
    label: str
    """With it."""


def problems_as_typed(
    problems: Iterable[Problem], typed: Mapping[str, TypedOption], names: Mapping[str, str]
) -> list[Problem]:
    """The problems, each option in what was given as it was typed. `names`: any spelling to the canonical name."""
    return [replace(p, what=_renamed(p.what, typed, names)) for p in problems]


@contextmanager
def errors_as_typed(typed: Mapping[str, TypedOption], names: Mapping[str, str]) -> Iterator[None]:
    """A user's mistake that is found inside names the options as they were typed."""
    try:
        yield
    except UserError as error:
        error.problems = problems_as_typed(error.problems, typed, names)
        error.args = (error.message(),)
        raise


def _one_word(own: TypedOption) -> bool:
    """Whether the value is one word that is no path: a spelling such as `--vllm_mode colocate`, where a check knows
    `vllm`."""
    value = own.label.removeprefix(own.spelling).strip()
    return bool(own.spelling) and re.fullmatch(r"[\w+]+", value) is not None


def _renamed(what: str, typed: Mapping[str, TypedOption], names: Mapping[str, str]) -> str:
    if not what.startswith("--") or what in {t.label for t in typed.values()}:
        return what
    whole = _VALUE.fullmatch(what)
    if whole and (own := typed.get(names.get(whole[1], ""))) and _one_word(own):
        return own.label
    several = len(_FLAG.findall(what)) > 1

    def written(found: re.Match[str]) -> str:
        own = typed.get(names.get(found[1], ""))
        if own is None or not own.spelling or (several and not own.spelling.startswith("--")):
            return found[0]
        return own.spelling if own.spelling.endswith("=") else own.spelling + found[2]

    return _FLAG.sub(written, what)
