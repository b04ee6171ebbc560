"""Reads files of questions: with answers, with choices, or plain texts. A row that cannot be used is named by its line.

The columns are those of common data sets and of EvalScope's general_qa (`query`, `response`) and general_mcq (`A`,
`B`, ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.data.encode.rows import malformed_row_problem
from megaswift.data.sources.files import split_into_parts
from megaswift.data.store.shared_build import data_cache_folder
from megaswift.data.tokenization import resolve_or_download_dataset_files
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import DataError, Problem, merge_similar_problems

ANSWER = "answer"
CHOICE = "choice"
TEXT = "text"
QUESTIONS = ("question", "query", "prompt", "input", "instruction")
ANSWERS = ("answers", "answer", "response", "labels", "label", "solution", "output", "target")
LETTERS = "ABCDEFGHIJ"
SHOWN = 10
_ROLES = ("system", "user", "assistant")
_EXAMPLE = '{"question": "...", "answer": "..."}, {"question": "...", "choices": [...], "answer": 0} or {"text": "..."}'


@dataclass(frozen=True)
class Question:
    """One row."""

    kind: str
    """`answer`: generated text is compared with references; `choice`: the likeliest choice; `text`: perplexity."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The conversation up to the answer."""
    references: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    label: int = -1
    """Which choice is right."""
    text: str = ""

    @property
    def plain(self) -> str:
        """The conversation as plain text, for models without a chat template."""
        return "\n".join(message["content"] for message in self.messages)


def read_questions(name: str) -> list[Question]:
    """Read all rows of a file.

    Raises:
        DataError: Rows that cannot be used, by file and line; or rows of different kinds.
    """
    questions: list[Question] = []
    problems: list[Problem] = []
    for path, line, row in _located(name):
        try:
            if isinstance(row, RowError):
                raise row
            question = question_of(row)
            if questions and question.kind != questions[0].kind:
                first = _KINDS[questions[0].kind]
                raise RowError("row", f"{_KINDS[question.kind]}", f"{first}, like the rows before it")
            questions.append(question)
        except RowError as error:
            problems.append(malformed_row_problem(str(path), line, error))
    if problems:
        more = [Problem(f"and {len(problems) - SHOWN} more rows", "have problems too")] if len(problems) > SHOWN else []
        raise DataError(merge_similar_problems(problems[:SHOWN]) + more)
    if not questions:
        raise DataError(Problem(f"--tasks {name}", "has no rows", f"write rows like {_EXAMPLE}"))
    return questions


_KINDS = {ANSWER: "a question with an answer", CHOICE: "a question with choices", TEXT: "a plain text"}


def _located(name: str) -> Iterator[tuple[Path, int, Mapping[str, Any] | RowError]]:
    source = resolve_or_download_dataset_files(name, data_cache_folder(None), "--tasks")
    for part in split_into_parts(source, processes=1):
        for located in part.rows():
            yield Path(part.path), located.line, located.row


def question_of(row: Mapping[str, Any]) -> Question:
    """Parse a row; RowError for one that cannot be used."""
    given = {name: value for name, value in row.items() if value is not None}
    messages, answer = _conversation(given)
    if not messages:
        if isinstance(given.get("text"), str) and given["text"]:
            return Question(TEXT, text=given["text"])
        raise RowError("row", f"the columns {', '.join(map(str, given)) or 'none'}", f"rows like {_EXAMPLE}")
    choices = _choices(given)
    column = next((name for name in ANSWERS if name in given), "answer")
    value = given.get(column, answer)
    if value is None:
        raise RowError("answer", "nothing", "the reference answer, or the right choice")
    if choices:
        return Question(CHOICE, messages, choices=choices, label=_label(column, value, choices))
    return Question(ANSWER, messages, references=_references(column, value))


def _conversation(row: Mapping[str, Any]) -> tuple[tuple[Mapping[str, str], ...], str | None]:
    """Return the messages before the answer, and the answer where the last message is one."""
    if "messages" in row:
        messages = _messages(row["messages"])
        last = messages[-1]
        return (messages[:-1], last["content"]) if last["role"] == "assistant" else (messages, None)
    column = next((name for name in QUESTIONS if name in row), None)
    if column is None:
        return (), None
    if not isinstance(row[column], str) or not row[column].strip():
        raise RowError(column, "no text", "the question as text")
    system = row.get("system")
    before = ({"role": "system", "content": system},) if isinstance(system, str) and system else ()
    return (*before, {"role": "user", "content": row[column]}), None


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise RowError("messages", "no list of messages", '[{"role": "user", "content": "..."}]')
    for i, message in enumerate(value):
        usable = isinstance(message, Mapping) and message.get("role") in _ROLES
        if not usable or not isinstance(message.get("content"), str):
            raise RowError(f"messages[{i}]", "no message of text", '{"role": "user", "content": "..."}')
    if not any(message["role"] == "user" for message in value):
        raise RowError("messages", "no message of the user", "a question")
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def _choices(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "choices" in row:
        value = row["choices"]
        if not isinstance(value, list) or len(value) < 2 or not all(isinstance(c, str) and c.strip() for c in value):
            raise RowError("choices", "no list of texts", "a list of at least two texts")
        return tuple(value)
    lettered: list[str] = []
    for letter in LETTERS:
        if letter not in row or not str(row[letter]).strip():
            break
        lettered.append(str(row[letter]))
    return tuple(lettered) if len(lettered) > 1 else ()


def _label(column: str, value: Any, choices: Sequence[str]) -> int:
    """Return the number of the right choice, which is given by number from 0, by letter, or as text."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        if value in choices:
            return choices.index(str(value))
        text = str(value).strip()
        if len(text) == 1 and text in LETTERS[: len(choices)]:
            return LETTERS.index(text)
        if text.isdigit() and int(text) < len(choices):
            return int(text)
    expected = f"a number from 0 to {len(choices) - 1}, a letter from A to {LETTERS[len(choices) - 1]}, or a choice"
    raise RowError(column, repr(value)[:40], expected if len(choices) <= len(LETTERS) else "a number or a choice")


def _references(column: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    texts = [str(one) for one in values if isinstance(one, str | int | float) and not isinstance(one, bool)]
    if not texts or len(texts) != len(values) or not all(text.strip() for text in texts):
        raise RowError(column, repr(value)[:40], "the answer as text, or a list of right answers")
    return tuple(texts)
