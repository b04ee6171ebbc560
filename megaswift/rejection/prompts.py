"""Reads prompts as reinforcement learning reads them: the conversation up to the answer, and columns for rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.data.encode.rows import malformed_row_problem
from megaswift.data.formats import FORMATS
from megaswift.data.preference.rows import COLUMNS
from megaswift.data.prompts.rows import ANSWER, ANSWERS, PROMPT, split_prompt_row
from megaswift.data.sources.files import DatasetFiles, split_into_parts
from megaswift.data.untokenized_sample import RowError, with_default_system_message
from megaswift.data.vision.media import plural_of_kinds
from megaswift.data.vision.placeholders import kinds_of_media
from megaswift.errors import DataError, Problem, merge_similar_problems
from megaswift.inference.chat_inputs import ChatInputError, ChatInputRenderer, TokenizedChat

SHOWN = 10
READ = frozenset(
    (*COLUMNS, *ANSWERS, *PROMPT, ANSWER, "completion", "reward", "chosen_reward", "rejected_reward")
    + tuple(name for form in FORMATS for name in (*form.required, *form.optional))
)
"""Columns with a meaning in some format of rows: a written row has none of the prompt's."""


@dataclass(frozen=True)
class PromptToSample:
    """A row of the data set."""

    place: str
    """`file:line`"""
    content: str | tuple[Mapping[str, Any], ...]
    columns: Mapping[str, Any]
    """What rewards read besides."""
    tools: Sequence[Mapping[str, Any]] | None
    tokens: TokenizedChat

    @property
    def free_columns(self) -> dict[str, Any]:
        """The columns that a written row keeps."""
        return {name: value for name, value in self.columns.items() if name not in READ}


def read_prompts(
    sources: Sequence[DatasetFiles], columns: Mapping[str, str], renderer: ChatInputRenderer
) -> list[PromptToSample]:
    """Read all rows; DataError with file and line of those without a usable prompt."""
    prompts: list[PromptToSample] = []
    problems: list[Problem] = []
    for path, line, row in _located(sources):
        try:
            if isinstance(row, RowError):
                raise row
            named = {columns.get(name, name): value for name, value in row.items()}
            prompts.append(_prompt(f"{path}:{line}", named, columns, renderer))
        except RowError as error:
            problems.append(malformed_row_problem(str(path), line, error))
        except ChatInputError as error:
            problems.append(Problem(f"{path}:{line}", str(error)))
    if problems:
        more = [Problem(f"and {len(problems) - SHOWN} more rows", "have problems too")] if len(problems) > SHOWN else []
        raise DataError(merge_similar_problems(problems[:SHOWN]) + more)
    if not prompts:
        fix = 'write rows like {"messages": [{"role": "user", "content": "..."}], "solution": "..."}'
        raise DataError(Problem("--dataset", "has no rows", fix))
    return prompts


def _located(sources: Sequence[DatasetFiles]) -> Iterator[tuple[Path, int, Mapping[str, Any] | RowError]]:
    for source in sources:
        for part in split_into_parts(source, processes=1):
            for located in part.rows():
                yield Path(part.path), located.line, located.row


def _prompt(
    place: str, row: Mapping[str, Any], columns: Mapping[str, str], renderer: ChatInputRenderer
) -> PromptToSample:
    question = split_prompt_row(row, "grpo", columns)
    if media := kinds_of_media(row, question.sample):
        raise ChatInputError(f"{plural_of_kinds(media)} are not supported by megaswift sample")
    sample = question.sample
    if sample.text is not None:
        if renderer.system:
            raise RowError("prompt", "plain text, to which --system cannot be applied", "messages, or omit --system")
        return PromptToSample(place, sample.text, question.columns, None, renderer.of_text(sample.text))
    renderer.need_template()
    sample = with_default_system_message(sample, renderer.system)
    tokens = renderer.of_chat(sample.messages, sample.tools, row)
    return PromptToSample(place, tuple(sample.messages), question.columns, sample.tools, tokens)
