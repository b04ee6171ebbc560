"""Rows of a file to prompts: the same formats as training reads, with or without answers.

Owns what of a row is asked. An answer that a row brings is no part of the prompt; it is kept as `labels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.data.encode import row_problem
from megaswift.data.formats import sample_of
from megaswift.data.questions import answerable, unanswered
from megaswift.data.sample import RowError, Sample
from megaswift.data.sources import parts_of, resolve
from megaswift.errors import DataError, Problem
from megaswift.inference.prompts import PromptError, Prompts

SHOWN = 10


@dataclass(frozen=True)
class Asked:
    """A row, and what of it goes into the model."""

    line: int
    columns: dict[str, Any]
    """As they were read, an answer under `labels`."""
    prompt: tuple[int, ...]


def _no_hub(name: str, subset: str | None) -> tuple[Path, ...]:
    raise DataError(Problem(f"--dataset {name}", "no such file"))


def _sample(row: Mapping[str, Any]) -> Sample:
    """The conversation or text of a row; an answer that is not there is an empty one."""
    filled = answerable(row, "sft")
    plain = row.get("text") is not None and not unanswered(row, "sft")
    return sample_of(filled, "pt" if plain else "sft")


def _prompt(row: Mapping[str, Any], columns: Mapping[str, str], prompts: Prompts) -> tuple[tuple[int, ...], str | None]:
    """(tokens, the answer that the row brings)."""
    named = {columns.get(k, k): v for k, v in row.items()}
    sample = _sample(named)
    if sample.text is not None:
        return prompts.of_text(sample.text), None
    prompts.need_template()
    messages, answer = list(sample.messages), None
    if messages[-1]["role"] == "assistant":
        content = messages.pop().get("content")
        answer = content if isinstance(content, str) and content else None
    if not messages:
        raise RowError("messages", "nothing before the answer", "a question")
    return prompts.of_chat(messages, sample.tools), answer


def read(path: str, columns: Mapping[str, str], prompts: Prompts) -> list[Asked]:
    """All rows in order; DataError with file and line of those that cannot be asked."""
    asked: list[Asked] = []
    problems: list[Problem] = []
    for line, row in _located(path):
        try:
            if isinstance(row, RowError):
                raise row
            tokens, answer = _prompt(row, columns, prompts)
            asked.append(Asked(line, _columns(row, answer), tokens))
        except RowError as error:
            problems.append(row_problem(path, line, error))
        except PromptError as error:
            problems.append(Problem(f"{path}:{line}", str(error)))
    if problems:
        more = [Problem(f"and {len(problems) - SHOWN} more rows", "cannot be asked either")] if len(problems) > SHOWN else []
        raise DataError(problems[:SHOWN] + more)
    if not asked:
        raise DataError(Problem(f"--dataset {path}", "holds no row", 'rows like {"messages": [{"role": "user", "content": "..."}]}'))
    return asked


def _located(path: str) -> Iterator[tuple[int, Mapping[str, Any] | RowError]]:
    for part in parts_of(resolve(path, _no_hub), processes=1):
        for located in part.rows():
            yield located.line, located.row


def _columns(row: Mapping[str, Any], answer: str | None) -> dict[str, Any]:
    kept = {k: v for k, v in row.items() if k not in ("response", "logprobs")}
    return kept | ({"labels": answer} if answer is not None and "labels" not in kept else {})
