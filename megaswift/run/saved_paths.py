"""Relative paths of a configuration made absolute, so that its file repeats the run from any folder.

Owns which options hold paths: those whose value `--help` shows as a DIR, FILE or PATH. A text that names no file
here (a model of the hub, a template as text) stays as it is.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from megaswift.config.sections import OPTIONS, SECTIONS

KEPT = ("output_dir", "resume_from_checkpoint")
"""Said again at each start."""
MADE = ("dataset_cache_dir", "tensorboard_dir")
"""Folders that need not be there yet."""
SUFFIXES = ("#", ":")
"""What may follow a path: `data.jsonl#500`, `reward.py:NAME`."""


def with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Make the paths in `SwiftConfig.to_dict()` absolute."""
    return {
        key: {n: _value(n, v) for n, v in part.items()} if key in SECTIONS and isinstance(part, dict) else part
        for key, part in values.items()
    }


def _value(name: str, value: Any) -> Any:
    metavar = OPTIONS[name].details.get("metavar") or ""
    if name in KEPT:
        return value
    if name == "loss_scale":  # names and files, joined
        return "+".join(_text(name, part) if part.endswith(".json") else part for part in value.split("+"))
    if "|" in metavar:  # a name or a file: a folder called zero2 does not make the name a path
        is_path = "FILE" in metavar.split("|") and isinstance(value, str) and _is_there(value) and Path(value).is_file()
        return str(Path.cwd() / value) if is_path else value
    if not metavar.startswith(("DIR", "FILE", "PATH")):
        return value
    if isinstance(value, list):
        return [_text(name, v) for v in value]
    return _text(name, value)


def _text(name: str, value: Any) -> Any:
    if not isinstance(value, str) or not value or "\n" in value or value.startswith(("/", "~")):
        return value
    if name in MADE or _is_there(value) or _is_there(f"{value}.idx"):
        return str(Path.cwd() / value)
    for mark in SUFFIXES:
        head, separator, _ = value.rpartition(mark)
        if separator and head and _is_there(head):
            return str(Path.cwd() / value)
    return value


def _is_there(text: str) -> bool:
    try:
        return Path(text).exists() or (glob.has_magic(text) and bool(glob.glob(text)))
    except (OSError, ValueError):  # too long for a name: a template as text
        return False
