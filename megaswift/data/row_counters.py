"""Counters of skipped and changed rows, and their wording in warnings, the run summary, the report and `data show`.

Owns names and words. Who counts is `store/token_store.py` (while reading), `store/documents.py` and
`preference/documents.py` (cut to length), and `stream/batches.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaswift.errors import without_control_characters

EMPTY_ANSWERS = "empty_answers"
UNUSED_TOOLS = "unused_tools"
UNUSED_SYSTEM = "unused_system"
UNUSED_CALLS = "unused_calls"
UNUSED_MESSAGES = "unused_messages"
UNUSED_PARTS = "unused_parts"
WITHOUT_CONTENT = "without_content"
TAGS_WITHOUT_FILES = "tags_without_files"
PLAIN_TEXT = "plain_text"
SPLIT_REASONING = "split_reasoning"
UNKNOWN_ROLE = "unknown_role"
MALFORMED = "malformed"
WITHOUT_LABELS = "without_labels"
CUT_TEXTS = "cut_texts"
NOTES = {
    EMPTY_ANSWERS: "with an empty completion, which trains the model to stop immediately",
    PLAIN_TEXT: "of plain text, trained on whole and without the chat template (language modelling, as in megaswift "
    "pt)",
    UNUSED_TOOLS: "with tools that the chat template does not use",
    UNUSED_SYSTEM: "with a system message that the chat template omits",
    UNUSED_CALLS: "with a tool call that the chat template omits, which is not trained",
    UNUSED_MESSAGES: "with a message that the chat template omits",
    UNUSED_PARTS: "with a content part that the chat template omits or prints as Python data, or whose image, video or "
    "audio the model does not read",
    WITHOUT_CONTENT: "with a message of the system, a user or a tool without content, which the chat template writes "
    "as empty, as None or not at all",
    UNKNOWN_ROLE: "with a message of an unknown role, which carries no loss",
    SPLIT_REASONING: "with </think> in a content, before which the chat template writes another </think>; give the "
    "reasoning as reasoning_content",
    TAGS_WITHOUT_FILES: "with <image>, <video> or <audio> in a text and no file for it, which stays text",
    CUT_TEXTS: "with a text that was cut to --max_length",
}
"""Texts about rows that are kept. Those of UNKNOWN_ROLE may be counted apart for each role (`unknown_role_note`)."""
WORDS = NOTES | {
    MALFORMED: "malformed and skipped",
    "deleted": "deleted (longer than --max_length)",
    "truncated": "truncated to --max_length",
    "split": "split at --max_length",
    "empty": "without tokens",
    WITHOUT_LABELS: "without label tokens",
    EMPTY_ANSWERS: "with an empty completion",
    PLAIN_TEXT: "of plain text",
}
"""Texts about all rows, as short as the first screen and the report need them."""


def unknown_role_note(role: str) -> str:
    """The name of a count of rows with a message of this role."""
    shown = role if len(role) <= 40 else f"{role[:37]}..."
    return f"{UNKNOWN_ROLE} {without_control_characters(repr(shown))}"


def has_text(name: str) -> bool:
    """Whether a count has a text here."""
    return name.partition(" ")[0] in WORDS


def note_text(name: str, words: Mapping[str, str] = NOTES) -> str:
    """The text about rows that are counted under this name."""
    kind, _, role = name.partition(" ")
    return f"{words[kind]} ({role})" if kind == UNKNOWN_ROLE and role else words.get(name, name)


def skipped_rows_counter_name(cause: str) -> str:
    """The name of a count of rows that were read and are of no use."""
    return f"skipped ({cause})"


def row_count_texts(counted: Mapping[str, float]) -> list[str]:
    """Each count but that of all rows, in words."""
    return [f"{int(count):,} {note_text(name, WORDS)}" for name, count in counted.items() if count and name != "rows"]
