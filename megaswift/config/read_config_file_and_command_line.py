"""Sources of option values: a YAML or JSON file, the command line, the environment, Python. Each gives a list of
`GivenOptionValue`.

Owns reading and what the user literally wrote; it neither types values nor knows rules.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaswift.compat.names.answers import SINGLE_VALUE_FIXES, unknown_section_advice
from megaswift.compat.names.neutral import neutral_option
from megaswift.config.bounded_yaml import TooManyValuesError, compose_yaml
from megaswift.config.option import OptionTable
from megaswift.config.parse_option_values import FALSE, TRUE, example_flag_text, option_value_text
from megaswift.config.sections import NAMES, OPTIONS, SECTIONS, TRAINING, is_section_entry, takes_mapping
from megaswift.errors import ConfigError, Problem, missing_path_hint
from megaswift.redaction import MASK, is_secret
from megaswift.version import __version__

ENVIRONMENT = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT_SECTION = "ENV"
"""ms-swift's section of environment variables."""
DATA_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
"""Of files that are no configuration, whatever is in them."""
CONFIG_HEADER = "# The resolved configuration of this run, written by megaswift"
"""How the first line of a run's config.yaml begins; the version that wrote it follows, and a full stop."""
LONGEST = 200
"""Characters of a value of the Python API in a message."""
LARGEST_FILE = 1 << 20
"""Bytes of a configuration file."""


@dataclass(frozen=True)
class GivenOptionValue:
    """One value from the user, and what to call it when it is wrong."""

    name: str
    """As written, dashes turned to underscores; any spelling."""
    value: Any  # None: an empty entry of a file; a flag without a value is True
    label: str
    """`--lr 3`, `run.yaml:7 lr: 3`."""
    spelling: str = ""
    """The label without its value: `--lr`, `run.yaml:7 lr:`."""


@dataclass(frozen=True)
class ConfigSource:
    """All values of one place. Later places override earlier ones."""

    givens: tuple[GivenOptionValue, ...] = ()
    problems: tuple[Problem, ...] = ()
    notices: tuple[str, ...] = ()
    """Lines for the user that are not mistakes."""
    ambient: bool = False
    """Values that happen to be there, for other programs too: they count where they apply, and are no mistake where
    not."""


@dataclass
class ParsedCommandLine:
    """What stands on a command line."""

    files: list[str] = field(default_factory=list)
    givens: list[GivenOptionValue] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def launch_source_from_environment(environ: Mapping[str, str]) -> ConfigSource:
    """The launch section from torchrun-style variables. Not for workers: there torchrun has set some of them itself."""
    givens = [
        GivenOptionValue(n.lower(), environ[n], f"{n}={environ[n]} (environment)", f"{n} (environment)")
        for n in ENVIRONMENT
        if environ.get(n)
    ]
    return ConfigSource(tuple(givens), ambient=True)


def source_from_mapping(options: Mapping[str, Any]) -> ConfigSource:
    """Options of the Python API: flat names, or sections as dicts or section objects."""
    givens: list[GivenOptionValue] = []
    for name, value in options.items():
        if name in SECTIONS and isinstance(value, SECTIONS[name]):
            fields = {f: getattr(value, f) for f, o in OPTIONS.items() if o.section == name}
            value = {f: v for f, v in fields.items() if v != OPTIONS[f].default}
        inner = value if is_section_entry(name, value) else {name: value}
        givens += [
            GivenOptionValue(
                normalize_name(n), v, f"{n}={MASK if is_secret(normalize_name(n)) else _shown(v)}", f"{n}="
            )
            for n, v in inner.items()
        ]
    return ConfigSource(tuple(givens))


def _shown(value: Any) -> str:
    """A value for messages: a whole data set may have been given, and the first of its rows say so."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = LONGEST
    text = short.repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def normalize_name(name: str) -> str:
    """`--Learning-rate` and `learning_rate` are one name."""
    return name.lstrip("-").replace("-", "_")


def secret_values_of(givens: Iterable[GivenOptionValue]) -> list[str]:
    """Values that no message may repeat."""
    return [str(g.value) for g in givens if g.value and is_secret(g.name)]


# ---- files


def read_config_file(path: str) -> ConfigSource:
    """A configuration file; every entry with its line."""
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
        pairs = list(_json_pairs(text) if file.suffix.lower() == ".json" else _yaml_pairs(text))
        if _is_accelerate_file({name for section, name, *_ in pairs if not section}):
            return ConfigSource((GivenOptionValue("accelerate_config", path, path, path),))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(path, f"cannot be read: {error}")) from None
    except _Malformed as error:
        raise ConfigError(
            Problem(
                f"{path}{error.line}", error.rule, "write one `name: value` per line, optionally grouped in sections"
            )
        ) from None
    givens: list[GivenOptionValue] = []
    problems: list[Problem] = []
    seen: set[tuple[str, str]] = set()
    for section, name, value, line in pairs:
        label = f"{path}{line} {name}: {MASK if is_secret(normalize_name(name)) else option_value_text(value)}"
        if section and not is_section_entry(normalize_name(section), {}):
            if normalize_name(section) == ENVIRONMENT_SECTION:
                rule = "is not an option: a configuration file does not set environment variables"
                problems.append(Problem(label, rule, f"export {name}={option_value_text(value)} before the command"))
            elif (section, "") not in seen:
                rule = f"is not a section of options; sections are {', '.join(SECTIONS)}"
                fix = unknown_section_advice(normalize_name(section), [*SECTIONS, *NAMES])
                problems.append(Problem(f"{path}{line} {section}", rule, fix))
            seen.add((section, ""))
        elif (section, name) in seen:
            problems.append(Problem(label, "occurs twice in the file", "remove one of the two"))
        elif section or value is not None or not is_section_entry(normalize_name(name), {}):  # else an empty section
            givens.append(GivenOptionValue(normalize_name(name), value, label, f"{path}{line} {name}:"))
        seen.add((section, name))
    return ConfigSource(tuple(givens), tuple(problems), config_version_notices(path, text))


def _is_accelerate_file(names: set[str]) -> bool:
    """Of names that accelerate alone has; one of them in a file with a model or data is a mistake in it."""
    found = names & {"compute_environment", "distributed_type"}
    return len(found) == 2 or bool(found) and not {NAMES.get(normalize_name(n)) for n in names} & {"model", "dataset"}


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
        self.rule, self.line = rule, line


_Pair = tuple[str, str, Any, str]
"""Section or the empty string, name, value, `:line`."""


def _yaml_pairs(text: str) -> Iterator[_Pair]:
    import yaml  # 20 ms that --help need not pay

    try:
        loader, root = compose_yaml(text)
        yield from _walk(loader, root, "")
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


def _walk(loader: Any, node: Any, section: str) -> Iterator[_Pair]:
    import yaml

    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise _Malformed("must contain `name: value` entries", f":{node.start_mark.line + 1}")
    for key, value in node.value:
        name, line = str(key.value), f":{key.start_mark.line + 1}"
        plain = loader.construct_object(value, deep=True)
        own = normalize_name(name)
        is_value = not isinstance(plain, dict) or takes_mapping(own) or neutral_option(own) is not None
        if not section and (is_section_entry(own, plain) or not is_value):
            yield from _walk(loader, value, name)
        else:
            yield section, name, plain, line


def _json_pairs(text: str) -> Iterator[_Pair]:
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
        own = normalize_name(name)
        is_value = (takes_mapping(own) or neutral_option(own) is not None) and not is_section_entry(own, {})
        if isinstance(value, _Pairs) and not is_value:
            yield from ((name, n, _plain(v), "") for n, v in value)
        else:
            yield "", name, _plain(value), ""


class _Pairs(list):
    """A JSON object that still knows names that stand twice."""


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {k: _plain(v) for k, v in value}
    return [_plain(v) for v in value] if isinstance(value, list) else value


# ---- command line

_FLAG = re.compile(r"^--[A-Za-z]")


def _stray(word: str, rule: str, fix: str) -> Problem:
    """A word that no flag takes; what looks like data was meant for --dataset."""
    return Problem(word, rule, f"--dataset {word}" if Path(word).suffix.lower() in DATA_SUFFIXES else fix)


def _one_dash(word: str, table: OptionTable) -> bool:
    """`-lr`: an option that lacks a dash."""
    return (
        word[:1] == "-"
        and bool(_FLAG.match(f"-{word}"))
        and normalize_name(f"-{word.partition('=')[0]}") in table.names
    )


def _with_two_dashes(words: Sequence[str]) -> Problem:
    typed = " ".join(words)
    return Problem(typed, "is not an option: option names begin with two dashes", f"-{typed}")


def read_command_line(argv: list[str], table: OptionTable = TRAINING) -> ParsedCommandLine:
    """A first word that is no flag, and --config, name files; the rest are `--name value...`, `--name=value`,
    `--switch`."""
    line = ParsedCommandLine()
    words = list(argv)
    if words and not _FLAG.match(words[0]) and not _one_dash(words[0], table):
        line.files.append(words.pop(0))
    while words:
        word = words.pop(0)
        if not _FLAG.match(word):
            if _one_dash(word, table):
                values = [] if not words or _FLAG.match(words[0]) else [words.pop(0)]
                line.problems.append(_with_two_dashes([word, *values]))
                continue
            line.problems.append(
                _stray(
                    word,
                    "is an unexpected argument",
                    "give options as --name value, and the configuration file first or after --config",
                )
            )
            continue
        flag, equals, text = word.partition("=")
        values = [text] if equals else []
        while not equals and words and not _FLAG.match(words[0]) and not _one_dash(words[0], table):
            values.append(words.pop(0))
        _take(line, flag, values, table)
    if any(given.name == "deepspeed_config" for given in line.givens):  # DeepSpeed's own arguments: a switch and a file
        line.problems = [p for p in line.problems if (p.what, p.rule) != ("--deepspeed", "has no value")]
    if len(line.files) > 1:
        line.problems.append(
            Problem(
                " and ".join(line.files),
                "only one configuration file is allowed",
                "give one file, followed by options that override it",
            )
        )
    return line


def _take(line: ParsedCommandLine, flag: str, values: list[str], table: OptionTable) -> None:
    name = normalize_name(flag)
    option = table.options.get(table.names.get(name, ""))
    hidden = option.details.get("secret", False) if option else is_secret(name)
    label = " ".join([flag, *([MASK] if hidden else values)])
    if name in ("config", "config_file"):
        line.files += values
        line.problems += [] if values else [Problem(flag, "has no value", "--config run.yaml")]
    elif not values and option is not None and option.switches and name != option.name:
        line.givens.append(GivenOptionValue(name, True, label, flag))
    elif not values and option is not None and option.kind != "bool":
        line.problems.append(Problem(flag, "has no value", example_flag_text(option)))
    elif option is None:
        line.givens.append(GivenOptionValue(name, values[0] if values else True, label, flag))
    elif option.kind in ("list", "numbers", "integers", "map") and values:
        earlier = next((g for g in line.givens if g.name == name), None)
        if earlier:  # --dataset a --dataset b
            line.givens.remove(earlier)
            values, label = [*earlier.value, *values], f"{earlier.label} {label}"
        line.givens.append(GivenOptionValue(name, values, label, flag))
    elif option.kind == "bool" and (not values or values[0].lower() not in TRUE + FALSE) and len(values) != 1:
        line.givens.append(GivenOptionValue(name, True, label, flag))
        line.problems += [
            Problem(v, f"is an unexpected argument ({flag} is a boolean flag)", f"{flag} true") for v in values
        ]
    else:
        label = label if hidden else " ".join([flag, *values[:1]])
        line.givens.append(GivenOptionValue(name, values[0] if values else None, label, flag))
        why = f"is an unexpected argument ({flag} takes one value)"
        fix = SINGLE_VALUE_FIXES.get(option.name, f'quote values with spaces: {flag} "a b"')
        line.problems += [_stray(MASK if hidden else v, why, fix) for v in values[1:]]
