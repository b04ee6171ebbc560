"""Reads a configuration file, YAML or JSON; every entry is named with its line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaswift.base.redaction import MASK, is_secret
from megaswift.errors import ConfigError, Problem, missing_path_hint
from megaswift.options.option import OptionTable
from megaswift.options.sources import ConfigSource, GivenOptionValue, normalize_name
from megaswift.options.values import option_value_text
from megaswift.options.yaml_limits import TooManyValuesError, compose_yaml
from megaswift.version import __version__

DATA_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
"""Suffixes of files that are no configuration, whatever is in them."""
CONFIG_HEADER = "# The resolved configuration of this run, written by megaswift"
"""How the first line of a run's config.yaml begins; the version that wrote it follows, and a full stop."""
LARGEST_FILE = 1 << 20
"""Bytes of a configuration file."""


def read_config_file(path: str, table: OptionTable) -> ConfigSource:
    """Returns the entries of a configuration file, each with its line.

    Args:
        table: The options whose headings the file may have.
    """
    file = Path(path)
    try:
        folder = file.is_dir()
    except OSError as error:  # a name that is too long
        rule = f"is not a file name ({error.strerror})"
        raise ConfigError(Problem(f"{path[:40]}...", rule, "give a YAML or JSON configuration file")) from None
    if folder:
        rule = "is a folder; the first positional argument must be a YAML or JSON configuration file"
        raise ConfigError(Problem(path, rule, f"--model {path}"))
    if file.suffix.lower() in DATA_SUFFIXES:
        raise ConfigError(Problem(path, "is not a configuration file (YAML or JSON)", f"--dataset {path}"))
    if not file.exists():
        raise ConfigError(
            Problem(path, "no such file", f"give a YAML or JSON configuration file; {missing_path_hint(file)}")
        )
    try:
        text = _text(file)
        pairs = list(_json_pairs(text, table) if file.suffix.lower() == ".json" else _yaml_pairs(text, table))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(path, f"cannot be read: {error}")) from None
    except _Malformed as error:
        fix = "write one `name: value` per line, optionally grouped in sections"
        raise ConfigError(Problem(f"{path}{error.line}", error.rule, fix)) from None
    givens: list[GivenOptionValue] = []
    problems: list[Problem] = []
    seen: set[tuple[str, str]] = set()
    for section, name, value, line in pairs:
        own = normalize_name(name)
        label = f"{path}{line} {name}: {MASK if is_secret(own) else option_value_text(value)}"
        is_empty_section = not section and value is None and table.opens_section(own, {})
        if (section, name) in seen:
            problems.append(Problem(label, "occurs twice in the file", "remove one of the two"))
        elif not is_empty_section:
            givens.append(GivenOptionValue(own, value, label, f"{path}{line} {name}:"))
        seen.add((section, name))
    return ConfigSource(tuple(givens), tuple(problems), config_version_notices(path, text), file=path)


def config_version_notices(path: str, text: str) -> tuple[str, ...]:
    """A line for the config.yaml of a run by another version: it is read by the same rules, old spellings included."""
    first = text.partition("\n")[0]
    if not first.startswith(CONFIG_HEADER):
        return ()
    version = first.removeprefix(CONFIG_HEADER).strip(" .")
    if version == __version__:
        return ()
    written = f"megaswift {version}" if version else "an earlier version of megaswift"
    return (
        f"{path}: written by {written}, read by {__version__}; options that it does not contain take their "
        "current defaults",
    )


def _text(file: Path) -> str:
    with file.open("rb") as stream:
        content = stream.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise _Malformed(f"is larger than {LARGEST_FILE >> 20} MiB, too large for a configuration file")
    return content.decode("utf-8")


class _Malformed(Exception):
    def __init__(self, rule: str, line: str = "") -> None:
        self.rule = rule
        self.line = line


_Pair = tuple[str, str, Any, str]
"""Section or the empty string, name, value (a mapping that is no section, too), `:line`."""


def _yaml_pairs(text: str, table: OptionTable) -> Iterator[_Pair]:
    import yaml  # 20 ms that --help need not pay

    try:
        loader, root = compose_yaml(text)
        yield from _walk(loader, root, "", table)
    except RecursionError:
        raise _Malformed("is nested too deeply") from None
    except TooManyValuesError as error:
        raise _Malformed(str(error)) from None
    except ValueError as error:  # of a number or date that Python cannot represent
        raise _Malformed(f"contains a value that cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise _Malformed(f"is not YAML: {what}", f":{mark.line + 1}" if mark else "") from None


def _walk(loader: Any, node: Any, section: str, table: OptionTable) -> Iterator[_Pair]:
    import yaml

    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise _Malformed("must contain `name: value` entries", f":{node.start_mark.line + 1}")
    for key, value in node.value:
        name = str(key.value)
        line = f":{key.start_mark.line + 1}"
        plain = loader.construct_object(value, deep=True)
        if not section and table.opens_section(normalize_name(name), plain):
            yield from _walk(loader, value, name, table)
        else:
            yield section, name, plain, line


def _json_pairs(text: str, table: OptionTable) -> Iterator[_Pair]:
    try:
        root = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise _Malformed(f"is not JSON: {error.msg}", f":{error.lineno}") from None
    except RecursionError:
        raise _Malformed("is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise _Malformed(f"is not valid JSON:  {error}") from None
    if not isinstance(root, _Pairs):
        raise _Malformed("must contain a JSON object of options")
    for name, value in root:
        if isinstance(value, _Pairs) and table.opens_section(normalize_name(name), {}):
            yield from ((name, n, _plain(v), "") for n, v in value)
        else:
            yield "", name, _plain(value), ""


class _Pairs(list):
    """A JSON object that still knows names that stand twice."""


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {k: _plain(v) for k, v in value}
    return [_plain(v) for v in value] if isinstance(value, list) else value
