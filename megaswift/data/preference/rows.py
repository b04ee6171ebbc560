"""Preference data before tokenization: a pair of completions of one prompt, or one labeled completion.

Owns `PreferenceExample`, where its completions begin, and the checks that every preference format shares. The
completion is what
follows the messages that both conversations share (of a labeled one: the last question); its assistant messages carry
loss and nothing else. Which columns a file has belongs to `formats/`, tokens to `encode.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaswift.data.templates.message_loss import included, loss_flag
from megaswift.data.untokenized_sample import RowError, UntokenizedSample, describe_value

# Why a unit is of no use, as it is counted.
IDENTICAL = "identical completions"
EMPTY = "an empty completion"
NO_PROMPT = "no prompt"
PROMPTS = "two prompts"
ASKING = ("user", "system", "developer")
"""Roles that belong to a prompt; what the model or its tools wrote may be part of a completion."""
COLUMNS = ("rejected_response", "rejected_messages", "chosen", "rejected", "label", "margin")
"""Columns that formats of preferences add to those of conversations."""
TRUTH = {"true": True, "1": True, "false": False, "0": False}


class UnusablePreferenceError(RowError):
    """A row that could be read and is of no use for preferences; counted by its cause."""

    def __init__(self, cause: str, column: str, found: str, expected: str) -> None:
        super().__init__(column, found, expected)
        self.cause = cause

    def __reduce__(self) -> tuple[Any, ...]:
        """The cause goes along."""
        return type(self), (self.cause, self.column, self.found, self.expected)


@dataclass(frozen=True)
class PreferenceExample:
    """A pair (chosen, rejected) with its margin, or one answer with its label."""

    samples: tuple[UntokenizedSample, ...]
    """Conversations in which just the completion's messages are marked for loss; or plain texts, prompt and completion
    in one."""
    value: float
    """The margin (nan where the row has none), or 1 for a desirable answer and 0 for another."""
    prompt: int = 0
    """For plain texts: characters of the prompt."""


def number_in_column(row: Mapping[str, Any], column: str = "margin") -> float:
    """The number in `column`; nan where the row has none."""
    value = row.get(column)
    if value is None or value == "":
        return math.nan
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RowError(column, describe_value(value), "a number")
    return number


def label_in_column(row: Mapping[str, Any], column: str = "label") -> float:
    """1 or 0 for the label in `column`: a truth value, as JSON, as a number, or as a flat file writes it."""
    value = row.get(column)
    label = TRUTH.get(str(int(value) if isinstance(value, float) and value in (0, 1) else value).strip().lower())
    if label is None or not isinstance(value, (bool, int, float, str)):
        raise RowError(column, describe_value(value), "true for a desirable completion, false otherwise (or 1 and 0)")
    return float(label)


def _silent(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no assistant message of these says or calls anything."""
    answers = [m for m in messages if m["role"] == "assistant"]
    return not any(m.get("tool_calls") or (c.strip() if isinstance(c := m.get("content"), str) else c) for m in answers)


def _only(sample: UntokenizedSample, begin: int) -> UntokenizedSample:
    """The conversation with loss on assistant messages from `begin` on, but for those the row takes out."""
    flags = [
        (i >= begin and loss_flag(loss) is not False and included(loss)) if m["role"] == "assistant" else None
        for i, (m, loss) in enumerate(zip(sample.messages, sample.loss, strict=True))
    ]
    return replace(sample, loss=tuple(flags))


def make_pair(
    chosen: UntokenizedSample, rejected: UntokenizedSample, margin: float, columns: tuple[str, str]
) -> PreferenceExample:
    """Two conversations as a pair; `columns` name them in messages about a row."""
    a = chosen.messages
    b = rejected.messages
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if shared == len(a) == len(b):
        raise UnusablePreferenceError(
            IDENTICAL, columns[1], "identical to the chosen completion", "a different completion"
        )
    for messages, column in ((a, columns[0]), (b, columns[1])):
        if shared == len(messages):
            raise UnusablePreferenceError(
                EMPTY, column, "no completion after the shared prompt", "an assistant message"
            )
        if messages[shared]["role"] in ASKING:
            raise UnusablePreferenceError(
                PROMPTS,
                column,
                f"the conversations part at message {shared}, which is the {messages[shared]['role']}'s: "
                + describe_value(messages[shared].get("content")),
                "two completions of the same prompt",
            )
        if _silent(messages[shared:]):
            raise UnusablePreferenceError(EMPTY, column, "an empty completion", "a non-empty completion")
    _need_prompt(a[:shared], columns[0])
    return PreferenceExample((_only(chosen, shared), _only(rejected, shared)), margin)


def make_labeled_example(
    sample: UntokenizedSample, label: float, column: str, begin: int | None = None
) -> PreferenceExample:
    """A conversation as an example: the completion is what follows the last question (or begins at message `begin`)."""
    messages = sample.messages
    prompt_end = max((i for i, m in enumerate(messages) if m["role"] in ASKING), default=-1) + 1
    begin = prompt_end if begin is None else begin
    if _silent(messages[begin:]):
        raise UnusablePreferenceError(
            EMPTY,
            column,
            "no answer after the last question" if begin == len(messages) else "an empty completion",
            "a non-empty assistant message",
        )
    _need_prompt(messages[:begin], column)
    return PreferenceExample((_only(sample, begin),), label)


def _need_prompt(messages: Sequence[Mapping[str, Any]], column: str) -> None:
    if not messages:
        raise UnusablePreferenceError(
            NO_PROMPT, column, "no message before the completion", "a prompt: a user message first"
        )


def make_plain_text_preference_example(prompt: str, completions: Mapping[str, str], value: float) -> PreferenceExample:
    """A plain prompt, followed by each of `completions` (column -> text) without a chat template."""
    if not prompt:
        raise UnusablePreferenceError(NO_PROMPT, "prompt", "an empty prompt", "text that the completions continue")
    for column, text in completions.items():
        if not text.strip():
            raise UnusablePreferenceError(EMPTY, column, "an empty completion", "a non-empty completion")
    texts = list(completions.values())
    if len(texts) == 2 and texts[0] == texts[1]:
        raise UnusablePreferenceError(
            IDENTICAL, list(completions)[1], "identical to the chosen completion", "a different completion"
        )
    return PreferenceExample(tuple(UntokenizedSample(text=prompt + text) for text in texts), value, len(prompt))
