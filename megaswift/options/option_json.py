"""Reads the JSON or YAML object in a file given by an option, or raises one error with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megaswift.errors import ConfigError, Problem
from megaswift.options.yaml_limits import read_yaml


def read_option_json_file(path: Path, what: str, fix: str) -> dict[str, Any]:
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


def read_option_object(named: str, what: str, fix: str) -> dict[str, Any]:
    """The same for a value that is JSON itself, a YAML file (by its suffix) or a JSON file."""
    if named.lstrip().startswith("{"):
        try:
            return dict(json.loads(named))
        except (ValueError, RecursionError) as error:
            raise ConfigError(Problem(what, f"is not JSON: {error}", fix)) from error
    if Path(named).suffix.lower() not in (".yaml", ".yml"):
        return read_option_json_file(Path(named), what, fix)
    import yaml

    try:
        value = read_yaml(Path(named).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(Problem(what, f"cannot be read: {error.strerror}", fix)) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(Problem(what, f"is not YAML: {str(error).splitlines()[0]}", fix)) from error
    if not isinstance(value, dict):
        raise ConfigError(Problem(what, "does not contain names with values", fix))
    return value


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a JSON text has; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
