"""Reads the JSON object in a file given by an option, or raises one error with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem


def read_option_json_object(path: Path, what: str, fix: str) -> dict[str, Any]:
    """The object; ConfigError with `what` as the option and its value, and `fix`, where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(Problem(what, f"cannot be read: {error.strerror}", fix)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(Problem(what, f"is not JSON: {error}", fix)) from error
    if not isinstance(value, dict):
        raise ConfigError(Problem(what, "does not contain a JSON object", fix))
    return value
