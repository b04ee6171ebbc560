"""`--chat_template`: a file, the template itself, and what is neither."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaswift.data.templates.chosen import read_template
from megaswift.errors import DataError

TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_file_a_file_below_home_and_the_template_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.jinja").write_text("\ufeff" + TEXT, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_template(TEXT) == read_template("~/t.jinja") == read_template(str(tmp_path / "t.jinja")) == TEXT
    assert read_template("{{ '/' }}") == "{{ '/' }}"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no/such.jinja", "neither a file nor a template"),
        ("", "neither a file nor a template"),
        ("{ braces }.jinja", "neither a file"),
        ("x" * 300, "cannot be read"),
        ("~no-such-user-here/t.jinja", "cannot be read"),
        ("plain.jinja", "does not contain a template"),
        ("latin.jinja", "not UTF-8"),
        (".", "neither a file"),
    ],
)
def test_what_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.jinja").write_text("You are helpful. {name}")
    Path("latin.jinja").write_bytes(TEXT.encode() + b"\xe9")
    with pytest.raises(DataError, match=words):
        read_template(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ 1", "line 1: unexpected end of template"),
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", "line 2: unexpected '}'"),
        ("{% generation %}x", "line 1: Unexpected end of template"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is nested too deeply"),
    ],
)
def test_a_syntax_error_is_found_without_a_row(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(text)
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        read_template(str(tmp_path / "t.jinja"))
    assert caught.value.problems[0].what == f"--chat_template {tmp_path / 't.jinja'}"
    with pytest.raises(DataError, match=re.escape(said)):
        read_template(text)


def test_the_tags_of_transformers_templates_are_known() -> None:
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert read_template(text) == text
