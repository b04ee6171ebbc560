"""Parses JSON text into values that can be tokenized, or raises a one-line error.

Owns what the json module lets through, or raises in other ways than by `JSONDecodeError`: halves of surrogate pairs,
numbers of thousands of digits, nesting without end. Which row it was is the caller's to say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

MOST_NESTED = 100
"""Levels of lists and objects in a row."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a pair by itself; a decoder with `surrogateescape` puts one for each byte that is not UTF-8."""
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.DOTALL)
NEAR = 20
"""Characters that are shown on each side of a syntax error."""


class JsonError(ValueError):
    """Text that is no JSON, or JSON that no text of a data set can hold."""

    def __init__(self, where: str, found: str, expected: str) -> None:
        self.where = where
        self.found = found
        self.expected = expected
        super().__init__(f"{where}: {found}")


def json_syntax_error_text(error: json.JSONDecodeError) -> str:
    """What is wrong with the syntax, and the text around it."""
    near = (
        error.doc[max(0, error.pos - NEAR) : error.pos + NEAR]
        .strip("\r\n")
        .encode("utf-8", "backslashreplace")
        .decode()
    )
    return f"not JSON: {error.msg.removesuffix(' at')} near {near!r}"


def parse_json(text: str) -> Any:
    """The value of a row's text; JsonError where there is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as e:
        raise JsonError(f"character {e.pos + 1}", json_syntax_error_text(e), "one JSON object per line") from None
    except (ValueError, RecursionError) as e:
        raise json_limit_error(e) from None
    if has_surrogate_escape(text):
        check_no_lone_surrogates(value)
    if text.count("{") + text.count("[") > MOST_NESTED:
        refuse_deeply_nested_value(value)
    return value


def has_surrogate_escape(text: str) -> bool:
    """Whether JSON text may have one. To look for one character first takes a thirtieth of the time."""
    return "\\" in text and ("\\ud" in text or "\\uD" in text)


def json_limit_error(error: ValueError | RecursionError) -> JsonError:
    """The limit of the json module that a well-formed text exceeds."""
    if isinstance(error, RecursionError):
        return JsonError("line", "lists or objects nested too deeply", f"at most {MOST_NESTED} levels")
    digits = sys.get_int_max_str_digits()
    return JsonError("line", f"an integer of more than {digits:,} digits", "a shorter number, or a string")


def check_no_lone_surrogates(value: Any) -> None:
    """JsonError for a string that no encoding can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        where, text = next((w, t) for w, t in _strings(value, "") if SURROGATE.search(t))
        match = SURROGATE.search(text)
        assert match is not None
        raise JsonError(
            where or "line",
            f"\\u{ord(match[0]):04x} at character {match.start() + 1} is an unpaired surrogate (incomplete character)",
            "complete characters",
        ) from None


def _strings(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """(place, text) of all strings in a value, keys included."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield where, key
            name = key.encode("utf-8", "backslashreplace").decode()
            yield from _strings(item, f"{where}.{name}" if where else name)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _strings(item, f"{where}[{i}]")


def refuse_deeply_nested_value(value: Any) -> None:
    """JsonError for a value that is nested too deep for the code after this."""
    level = [value]
    for _ in range(MOST_NESTED + 1):
        level = [c for v in level if isinstance(v, (dict, list)) for c in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return
    raise json_limit_error(RecursionError())


def split_json_list(text: str) -> list[str] | None:
    """The items of a well-formed JSON list as texts; None for JSON of another kind."""
    items: list[str] = []
    depth = 0
    begin = 0
    if not text.lstrip().startswith("["):
        return None
    for token in _TOKENS.finditer(text):
        mark = token[0]
        if mark in "]}":
            depth -= 1
        if depth == 1 and mark == "," or depth == 0 and mark == "]":
            items.append(text[begin : token.start()])
        if mark in "[{":
            depth += 1
        if depth == 1 and mark in "[,":
            begin = token.end()
    return [item for item in items if item.strip()]
