"""Redaction of secrets (tokens, keys, passwords) in messages, by the names of options."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megaswift.errors import Problem

NAME = re.compile(
    r"^api_|(access|private|auth)_?key|(hf|hub|api|access|auth)_?token|(^|_)(keys?|token)$|passw|secret|credential|bearer"
)
NOT_SECRET = re.compile(r"(eos|bos|pad|unk|mask|stop|image|prng)_(token|key)$")
"""Tokens of a vocabulary and keys of random generators."""
URL_CREDENTIALS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/@:'\"]*:[^\s/@'\"]+@|\bhttps?://[^\s/@'\"]+@", re.I)
"""`SCHEME://USER:PASSWORD@`, and `https://TOKEN@`."""
MASK = "***"
LEAST = 4
"""Characters of a value that is looked for inside other texts; shorter ones would be found everywhere."""


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a secret."""
    low = name.lower()
    return NAME.search(low) is not None and NOT_SECRET.search(low) is None


def has_url_credentials(text: str) -> bool:
    """Whether a URL in the text holds a password or a token; `ssh://git@host` holds neither."""
    return URL_CREDENTIALS.search(text) is not None


def redact_problems(problems: Iterable[Problem], values: Iterable[str]) -> list[Problem]:
    """The problems without these secret values."""
    hidden = sorted((v for v in values if len(v) >= LEAST), key=len, reverse=True)
    return [Problem(*(_without(part, hidden) for part in (p.what, p.rule, p.fix))) for p in problems]


def redacted_command(text: str) -> str:
    """A line of flags and words without the words that follow a secret's flag."""

    def hidden(found: re.Match[str]) -> str:
        return found[1] + found[2] + MASK if is_secret(found[1].lstrip("-").replace("-", "_")) else found[0]

    return re.sub(r"(--[\w-]+)([= ])([^\s-]\S*(?: [^\s-]\S*)*)", hidden, text)


def _without(text: str, hidden: Iterable[str]) -> str:
    for value in hidden:
        text = text.replace(value, MASK)
    return text
