"""`megaswift infer` for models that give vectors, scores or classes: on a file, or a line of text at a time.

Owns which columns of a row are read, and the columns that results have. Rows of a file are read and tokenized before
the model is loaded; the result is written in the order of the file, and appears whole or not at all.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from megaswift import log
from megaswift.base.atomic_writes import atomic_file
from megaswift.data.encode.rows import malformed_row_problem
from megaswift.data.labeled.encode import labeled_sample, second_text, with_spaces
from megaswift.data.untokenized_sample import RowError, decode_json_cell
from megaswift.errors import DataError, Problem, merge_similar_problems
from megaswift.inference.chat_inputs import ChatInputError
from megaswift.inference.options.commands import PoolingOptions, PromptFileOptions
from megaswift.inference.pooling.folder import EMBEDDING, SEQUENCE, TOKENS, PoolingFolder
from megaswift.inference.pooling.model import PoolingModel, class_probabilities, pair_score
from megaswift.inference.pooling.texts import TextInput, TextReader
from megaswift.losses.options.classification import REGRESSION
from megaswift.serve.prompt_rows import located_rows
from megaswift.serve.terminal import greet, read_text

SHOWN = 10
HELP = "a text per line; a line that ends in \\ continues on the next; /quit or Ctrl-D exits"
SORTED_BATCHES = 64
"""Batches whose rows are sorted by length together; their results are in memory at a time."""
HALF = 0.5
"""The probability from which a label holds, where several may."""
TEXTS = ("text", "query", "sentence", "question", "prompt")
WORDS = ("words", "tokens")
QUERIES = ("query", "question", "anchor", "sentence1", "text1")
DOCUMENTS = ("documents", "document", "positive", "passage", "response", "answer", "sentence2", "text2")


@dataclass(frozen=True)
class PoolingRow:
    """A row and the inputs that are made of it."""

    columns: Mapping[str, Any]
    inputs: Sequence[TextInput]
    is_pair: bool = False
    """Whether the inputs are pairs of a query and a document."""
    is_list: bool = False
    """Whether the row has a list of documents."""


def read_rows(
    file: PromptFileOptions, reader: TextReader, options: PoolingOptions, places: frozenset[str] | None = None
) -> list[PoolingRow]:
    """Return rows with their tokens; DataError with file and line of rows that cannot be used.

    Args:
        places: `file:line` of the rows to read; None: all.
    """
    rows: list[PoolingRow] = []
    problems: list[Problem] = []
    for path, line, row in located_rows(file.dataset):
        if places is not None and f"{path}:{line}" not in places:
            continue
        try:
            if isinstance(row, RowError):
                raise row
            rows.append(_row(row, {file.columns.get(k, k): v for k, v in row.items()}, reader, _most(reader, options)))
        except RowError as error:
            problems.append(malformed_row_problem(str(path), line, error))
        except ChatInputError as error:
            fix = "shorten it, or give --truncation_strategy right" if "tokens; the limit" in str(error) else ""
            problems.append(Problem(f"{path}:{line}", str(error), fix))
    if problems:
        more = [Problem(f"and {len(problems) - SHOWN} more rows", "have problems too")] if len(problems) > SHOWN else []
        raise DataError(merge_similar_problems(problems[:SHOWN]) + more)
    if not rows:
        raise DataError(Problem(f"--dataset {' '.join(file.dataset)}", "is empty", 'write rows like {"text": "..."}'))
    return rows


def _most(reader: TextReader, options: PoolingOptions) -> int | None:
    """The tokens behind which a text is cut; None: it is not."""
    return reader.limit if options.truncation_strategy == "right" else None


def _row(columns: Mapping[str, Any], named: Mapping[str, Any], reader: TextReader, most: int | None) -> PoolingRow:
    if reader.found.scores_pairs and reader.found.problem_type != REGRESSION:
        query = next((named[name] for name in QUERIES if isinstance(named.get(name), str)), None)
        name = next((name for name in DOCUMENTS if named.get(name)), None)
        if query is not None and name is not None:
            documents = decode_json_cell(named[name], name, "a list of texts") if name == "documents" else named[name]
            texts = documents if isinstance(documents, list) else [documents]
            if not all(isinstance(text, str) for text in texts):
                raise RowError(name, "something else than texts", "a text or a list of texts")
            pairs = [reader.of_pair(query, text, most) for text in texts]
            return PoolingRow(columns, pairs, is_pair=True, is_list=isinstance(documents, list))
        if reader.found.kind != SEQUENCE:
            raise RowError("query", "no query with documents", '{"query": "...", "documents": ["...", ...]}')
    return PoolingRow(columns, [_text(named, reader, most)])


def _text(named: Mapping[str, Any], reader: TextReader, most: int | None) -> TextInput:
    """The text of a row, as training reads it: of a classifier also a conversation."""
    if reader.found.kind == SEQUENCE:
        sample = labeled_sample(named)
        if sample.text is not None:
            if reader.system:
                fault = "plain text, which is read without a chat template, so --system cannot be applied"
                raise RowError("text", fault, "messages, or omit --system")
            second = second_text(named)
            if second is not None:
                return reader.of_pair(sample.text, second, most)
            return reader.of_text(sample.text, most=most)
        if reader.tokenizer.chat_template:
            return reader.of_messages(sample.messages, tools=sample.tools)
        return reader.of_text("\n".join(map(_content, sample.messages)), most=most)
    words = next((named[name] for name in WORDS if named.get(name) is not None), None)
    if reader.found.kind == TOKENS and words is not None:
        words = decode_json_cell(words, "words", "a list of words")
        if not isinstance(words, list) or not words or not all(isinstance(w, str) and w for w in words):
            raise RowError("words", "something else than words", "a list of words")
        return reader.of_text("".join(with_spaces(words)), most=most)
    prompt = reader.prompt(None) if reader.found.kind == EMBEDDING else ""
    messages = named.get("messages")
    if messages is not None:
        messages = decode_json_cell(messages, "messages", "a list of messages")
        if not isinstance(messages, list) or len(messages) != 1 or not isinstance(messages[0], Mapping):
            raise RowError("messages", "something else than one message", 'one {"role", "content"}, or a column text')
        return reader.of_text(_content(messages[0]), prompt, most)
    name = next((name for name in TEXTS if isinstance(named.get(name), str)), None)
    if name is None:
        raise RowError("text", "no text", f"a column of {', '.join(TEXTS)}, or messages")
    return reader.of_text(named[name], prompt, most)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise RowError("messages", "a content that is no text", "texts")
    return content


def write_results(
    rows: Sequence[PoolingRow], make: Callable[[], PoolingModel], tokenizer: Any, file: PromptFileOptions
) -> Path:
    """Write each row with its results; returns the file. `make` loads the model."""
    result = Path(str(file.result_path))
    result.parent.mkdir(parents=True, exist_ok=True)
    model = make()
    size = file.per_device_eval_batch_size
    with atomic_file(result) as fresh, fresh.open("w", encoding="utf-8") as out:
        for start in range(0, len(rows), size * SORTED_BATCHES):
            some = rows[start : start + size * SORTED_BATCHES]
            results = _run_sorted(model, [one for row in some for one in row.inputs], size)
            for row in some:
                taken = [results.pop(0) for _ in row.inputs]
                line = {**row.columns, **_columns(row, taken, model.found, tokenizer)}
                out.write(json.dumps(line, ensure_ascii=False, default=_plain) + "\n")
            log.info(f"{start + len(some)} of {len(rows)} rows")
    return result


def _run_sorted(model: PoolingModel, inputs: Sequence[TextInput], size: int) -> list[Tensor]:
    """Results in the order of the inputs, computed in batches of neighbours in length, the longest first."""
    order = sorted(range(len(inputs)), key=lambda i: -len(inputs[i].ids))
    results: dict[int, Tensor] = {}
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        results |= zip(batch, model.run([inputs[i] for i in batch]), strict=True)
    return [results[i] for i in range(len(inputs))]


def _columns(row: PoolingRow, results: Sequence[Tensor], found: PoolingFolder, tokenizer: Any) -> dict[str, Any]:
    """What results add to a row."""
    first = results[0]
    if found.kind == EMBEDDING:
        return {"embedding": first.tolist()}
    if found.kind == TOKENS:
        return {"labels": _token_labels(row.inputs[0], class_probabilities(first, found), found, tokenizer)}
    if row.is_list:
        return {"scores": [pair_score(logits, found) for logits in results]}
    if row.is_pair:
        return {"score": pair_score(first, found)}
    if len(found.labels) == 1:  # of a reward model, or one number of a regression
        return {"score": float(first[0])}
    values = class_probabilities(first, found)
    if found.problem_type == "regression":
        return {"scores": dict(zip(found.labels, values.tolist(), strict=True))}
    probabilities = {"probs": dict(zip(found.labels, values.tolist(), strict=True))}
    if found.problem_type == "multi_label_classification":
        held = [label for label, value in zip(found.labels, values.tolist(), strict=True) if value >= HALF]
        return {"label": held, **probabilities}
    return {"label": found.labels[int(values.argmax())], **probabilities}


def _token_labels(one: TextInput, values: Tensor, found: PoolingFolder, tokenizer: Any) -> list[dict[str, Any]]:
    """The likeliest label of each token that is none of the tokenizer's special ones."""
    special = set(tokenizer.all_special_ids)
    best = values.max(-1)
    told = zip(tokenizer.convert_ids_to_tokens(one.ids), best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        {"token": text, "label": found.labels[label], "score": value}
        for token, (text, label, value) in zip(one.ids, told, strict=True)
        if token not in special
    ]


@dataclass
class TextTerminal:
    """Labels or scores of lines of text, as `megaswift infer` gives them without a file."""

    model: PoolingModel
    reader: TextReader
    options: PoolingOptions
    out: TextIO = field(default_factory=lambda: sys.stdout)

    def run(self) -> None:
        """Print a line of JSON for each text, until the input ends."""
        greet(HELP, self.out)
        while (text := read_text(self.out)) is not None and text != "/quit":
            if text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        try:
            row = _row({}, {"query": text}, self.reader, _most(self.reader, self.options))
        except (RowError, ChatInputError) as error:
            print(f"({error})", file=self.out, flush=True)
            return
        found = _columns(row, self.model.run(row.inputs), self.model.found, self.reader.tokenizer)
        print(json.dumps(found, ensure_ascii=False), file=self.out, flush=True)


def _plain(value: Any) -> str:
    """A form for values that JSON has none for: bytes as base64, everything else as text."""
    return f"data:;base64,{base64.b64encode(value).decode()}" if isinstance(value, bytes) else str(value)
