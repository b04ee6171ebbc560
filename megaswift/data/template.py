"""`--chat_template`: a Jinja template from a file, or the template itself. One reader for all, light enough for the
first checks."""

from __future__ import annotations

from pathlib import Path

from megaswift.errors import DataError, Problem

MARKS = ("{%", "{{")
"""A template has one of them; a path has none."""


def read_template(value: str) -> str:
    """The template that `value` is, or that the file of this name holds; DataError when neither."""
    if _is_template(value):
        return value
    flag, fix = f"--chat_template {value}", "--chat_template FILE.jinja, or the template itself"
    try:
        path = Path(value).expanduser()
        text = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    except (OSError, RuntimeError) as error:  # a name that is too long, no permission; ~name of nobody
        raise DataError(Problem(flag, f"cannot be read ({error})", fix)) from None
    except UnicodeDecodeError:
        raise DataError(Problem(flag, "is not UTF-8", "text in UTF-8")) from None
    if text is None:
        raise DataError(Problem(flag, "is neither a file nor a template (no {{ or {% in it)", fix))
    if not _is_template(text):
        raise DataError(Problem(flag, "holds no template (no {{ or {% in it)", fix))
    return text


def _is_template(text: str) -> bool:
    return any(mark in text for mark in MARKS)
