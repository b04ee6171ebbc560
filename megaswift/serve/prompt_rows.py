"""Converts rows of a file to prompts: the data formats of training, with or without answers.

Owns which part of a row is the prompt. An answer in the row is not part of it; it is kept as `labels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaswift.data.encode.rows import malformed_row_problem
from megaswift.data.formats import parse_sample
from megaswift.data.prompts.rows import lacks_only_answer, make_row_readable_as_prompt
from megaswift.data.sources.files import DatasetFiles, split_into_parts
from megaswift.data.store.shared_build import data_cache_folder
from megaswift.data.tokenization import resolve_or_download_dataset_files
from megaswift.data.untokenized_sample import RowError, UntokenizedSample
from megaswift.data.vision.media import plural_of_kinds
from megaswift.data.vision.placeholders import kinds_of_media
from megaswift.errors import DataError, Problem, merge_similar_problems
from megaswift.inference.chat_inputs import ChatInputError, ChatInputRenderer, TokenizedChat

SHOWN = 10


@dataclass(frozen=True)
class PromptRows:
    """Which rows of which data sets are answered."""

    datasets: tuple[str, ...]
    columns: Mapping[str, str]
    only: frozenset[str] | None = None
    """`file:line` of the rows to take; None: all."""


@dataclass(frozen=True)
class PromptFileRow:
    """A row, and what of it goes into the model."""

    place: str
    """`file:line`"""
    columns: dict[str, Any]
    """As they were read, an answer under `labels`."""
    prompt: TokenizedChat
    """Without its images' pixels, which are read again when the row's turn comes."""


def _sample(row: Mapping[str, Any]) -> UntokenizedSample:
    """The conversation or text of a row; an answer that is not there is an empty one."""
    filled = make_row_readable_as_prompt(row, "sft")
    plain = row.get("text") is not None and not lacks_only_answer(row, "sft")
    return parse_sample(filled, "pt" if plain else "sft")


def _prompt(
    row: Mapping[str, Any], columns: Mapping[str, str], prompts: ChatInputRenderer
) -> tuple[TokenizedChat, str | None]:
    """(the prompt, the row's reference answer)."""
    named = {columns.get(k, k): v for k, v in row.items()}
    sample = _sample(named)
    media = kinds_of_media(named, sample)
    if media and (prompts.blind or sample.text is not None):
        why = prompts.blind or "a plain text is continued without a chat template"
        raise ChatInputError(f"{plural_of_kinds(media)} are not supported: {why}")
    if sample.prompt is not None and sample.text is not None:
        return prompts.of_text(sample.prompt), sample.text.removeprefix(sample.prompt) or None
    if sample.text is not None:
        return prompts.of_text(sample.text), None
    prompts.need_template()
    messages = list(sample.messages)
    answer = None
    if messages[-1]["role"] == "assistant":
        content = messages.pop().get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        answer = "".join(p.get("text") or "" for p in parts) or None
    if not messages:
        raise RowError("messages", "no message before the answer", "a question")
    return replace(prompts.of_chat(messages, sample.tools, named), pictures=None), answer


def read_prompt_file(wanted: PromptRows, renderer: Callable[[Path], ChatInputRenderer]) -> list[PromptFileRow]:
    """All rows in order; DataError with file and line of rows without a usable prompt. `renderer`: for the rows of a
    file."""
    prompt_rows: list[PromptFileRow] = []
    problems: list[Problem] = []
    for path, line, row in located_rows(wanted.datasets):
        place = f"{path}:{line}"
        if wanted.only is not None and place not in wanted.only:
            continue
        try:
            if isinstance(row, RowError):
                raise row
            prompt, answer = _prompt(row, wanted.columns, renderer(path))
            prompt_rows.append(PromptFileRow(place, _columns(row, answer), prompt))
        except RowError as error:
            problems.append(malformed_row_problem(str(path), line, error))
        except ChatInputError as error:
            problems.append(Problem(place, str(error)))
    if problems:
        more = [Problem(f"and {len(problems) - SHOWN} more rows", "have problems too")] if len(problems) > SHOWN else []
        raise DataError(merge_similar_problems(problems[:SHOWN]) + more)
    if not prompt_rows:
        what = f"--dataset {' '.join(wanted.datasets)}"
        fix = 'write rows like {"messages": [{"role": "user", "content": "..."}]}'
        raise DataError(Problem(what, "is empty", fix))
    return prompt_rows


def prompt_dataset_files(names: Sequence[str]) -> list[DatasetFiles]:
    """The files of each entry of --dataset, fetched from a hub where it is an ID."""
    return [resolve_or_download_dataset_files(name, data_cache_folder(None)) for name in names]


def located_rows(names: Sequence[str]) -> Iterator[tuple[Path, int, Mapping[str, Any] | RowError]]:
    """Yield (file, line, row or what is wrong with it) of each row of some entries of --dataset, in order."""
    for source in prompt_dataset_files(names):
        for part in split_into_parts(source, processes=1):
            for located in part.rows():
                yield Path(part.path), located.line, located.row


def _columns(row: Mapping[str, Any], answer: str | None) -> dict[str, Any]:
    result_columns = {k: v for k, v in row.items() if k not in ("response", "logprobs")}
    return result_columns | ({"labels": answer} if answer is not None and "labels" not in result_columns else {})
