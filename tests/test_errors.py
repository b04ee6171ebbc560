"""Texts of errors: what comes from a user's file moves no cursor and ends no line."""

from __future__ import annotations

from megaswift.data.encode.rows import malformed_row_problem
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import ConfigError, DataError, Problem

BAD = "\x1b]0;x\x07\x9b"


def test_a_message_shows_control_characters_as_escapes() -> None:
    text = ConfigError(Problem(f"--columns a{BAD}=b", "two\nlines stay", f"say {BAD}")).message()
    assert "\x1b" not in text and "\x07" not in text and "\x9b" not in text
    assert r"--columns a\x1b]0;x\x07\x9b=b: two" in text.splitlines()[1] and "lines stay" in text.splitlines()[2]


def test_a_name_in_a_row_forges_no_line() -> None:
    error = RowError("a\nmegaswift: fake", "x", "y")
    lines = DataError(malformed_row_problem("d\nmegaswift: other.jsonl", 3, error)).message().splitlines()
    assert len(lines) == 2 and r"d\nmegaswift: other.jsonl:3: column a\nmegaswift: fake: x; expected y" in lines[1]
