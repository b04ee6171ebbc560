"""`--chat_template`: a file, the template itself, and what is neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.data.template import read_template
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
        ("plain.jinja", "holds no template"),
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
