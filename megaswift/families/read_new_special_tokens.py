"""`--new_special_tokens`: the tokens that its values name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megaswift.errors import ConfigError, Problem


def named_special_tokens(entries: Iterable[str]) -> list[str]:
    """The tokens in order, each once; a .txt file has one a line."""
    tokens: list[str] = []
    for entry in entries:
        if not entry.endswith(".txt"):
            tokens.append(entry)
            continue
        try:
            lines = Path(entry).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            rule = f"cannot be read ({type(error).__name__})"
            fix = "give tokens, or a UTF-8 text file with one token a line"
            raise ConfigError(Problem(f"--new_special_tokens {entry}", rule, fix)) from None
        tokens += [line.strip() for line in lines if line.strip()]
    return list(dict.fromkeys(tokens))
