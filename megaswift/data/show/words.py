"""The words of `megaswift data show` and `data index`: their own options, data sets and configuration files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaswift.config.sections import NAMES, SECTIONS
from megaswift.errors import DataError, Problem, did_you_mean_hint
from megaswift.options.sources import normalize_name


def split_own_options(argv: Sequence[str], defaults: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(the command's own options, what the configuration reads: its file first, data sets as --dataset). DataError for
    a misspelt one of its own."""
    own = dict(defaults)
    datasets: list[str] = []
    files: list[str] = []
    rest: list[str] = []
    words = [
        w
        for a in argv
        for w in (a.split("=", 1) if a.startswith("--") and a.partition("=")[0].lstrip("-") in own else [a])
    ]
    leading = True
    while words:
        word = words.pop(0)
        leading = leading and not word.startswith("--")
        if word.startswith("--") and word[2:] in own and words:
            own[word[2:]] = words.pop(0)
        elif leading:
            (files if is_config_file_word(word) else datasets).append(word)
        else:
            name = word.partition("=")[0].lstrip("-")
            if (
                word.startswith("--")
                and normalize_name(name) not in NAMES
                and (close := did_you_mean_hint(name, list(own)))
            ):
                raise DataError(Problem(word, "is not an option", close))
            rest.append(word)
    return own, [*files, *rest, *(["--dataset", *datasets] if datasets else [])]


def is_config_file_word(word: str) -> bool:
    """Whether a word names a configuration rather than data: any YAML file, or a JSON object of options without a list
    of rows."""
    path = Path(word)
    if path.suffix.lower() != ".json" or not path.is_file():
        return path.suffix.lower() in (".yaml", ".yml")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # whatever it is, the data's reader says what is wrong with it
        return False
    known = (
        [name for name in value if normalize_name(name) in NAMES or normalize_name(name) in SECTIONS]
        if isinstance(value, dict)
        else []
    )
    return 2 * len(known) > len(value) and not any(
        isinstance(v, list) and any(isinstance(r, dict) for r in v) for v in value.values()
    )
