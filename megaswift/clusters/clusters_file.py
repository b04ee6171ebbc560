"""clusters.yaml: where it is looked for, and its checks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megaswift import log
from megaswift.base.redaction import has_secret, is_secret
from megaswift.clusters.job import Cluster
from megaswift.clusters.options import ENVIRONMENT_NAME, RAY, options_of_launcher
from megaswift.clusters.table import SCHEDULERS
from megaswift.errors import ConfigError, Problem, did_you_mean_hint, first_line
from megaswift.options.files import LARGEST_FILE
from megaswift.options.yaml_limits import TooManyValuesError, compose_yaml

FILE = "clusters.yaml"
EXAMPLE = "clusters: {NAME: {launcher: slurm, partition: gpu}}"
LOCAL = Cluster("local", "local")
"""Known without a file, and never from one: submit takes this cluster where none is named, so an entry of a file in the
working folder would run its `setup` unasked."""
SECRET_OPTIONS = ("secrets", "secret_variables")
LITERAL = re.compile(r"(?<![\w$?&-])([A-Za-z_]\w*)=[\"']?(?=[^\s\"'$`<;&|)/~.])")
"""An assignment in a line of shell whose value is neither an expansion nor a path."""
WRITTEN = "is a secret, which would be written into the job's files"


def clusters_file(given: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file: `--clusters FILE`, else ./clusters.yaml, else the user's; None where there is none."""
    if given is not None:
        return Path(given).expanduser()
    return next((p for p in (Path(FILE), _own_file(environ)) if p.is_file()), None)


def read_cluster(name: str, given: str | None, environ: Mapping[str, str] = os.environ) -> Cluster:
    """A cluster by name. ConfigError with every mistake of its entry."""
    file = clusters_file(given, environ)
    if file is None:
        if name == LOCAL.name:
            return LOCAL
        fix = f"write ./{FILE} with {EXAMPLE}, or give --clusters FILE"
        raise ConfigError(Problem(f"--cluster {name}", f"there is no {FILE} here or in the configuration folder", fix))
    clusters = _read(file)
    _say_what_is_hidden(name, file, given, clusters, environ)
    if name not in clusters:
        if name == LOCAL.name:
            return LOCAL
        known = ", ".join(map(str, clusters)) or "none"
        hint = did_you_mean_hint(name, [*map(str, clusters)])
        raise ConfigError(Problem(f"--cluster {name}", f"is not in {file}; clusters there: {known}", hint))
    entry = clusters[name]
    where = f"{file}: {name}"
    if not isinstance(entry, Mapping) or entry.get("launcher") not in SCHEDULERS:
        given = str(entry.get("launcher", "")) if isinstance(entry, Mapping) else ""
        rule = f"launcher {given or 'is missing; it'} must be one of {', '.join(SCHEDULERS)}"
        raise ConfigError(Problem(where, rule, _closest(given)))
    launcher = str(entry["launcher"])
    options = {str(key): value for key, value in entry.items() if key != "launcher"}
    if problems := [*_problems(where, launcher, options)]:
        raise ConfigError(problems)
    return Cluster(name, launcher, options)


def _say_what_is_hidden(
    name: str, file: Path, given: str | None, clusters: Mapping[str, Any], environ: Mapping[str, str]
) -> None:
    """Warns where the file of the working folder has a cluster that the user's own file has, too."""
    own = _own_file(environ)
    if given is None and file != own and own.is_file() and name in clusters and name in _read(own):
        log.warn(f"cluster {name} is taken from ./{file}, not from {own}; --clusters FILE names the file to use")


def _own_file(environ: Mapping[str, str]) -> Path:
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".config")
    return home / "megaswift" / FILE


def _read(file: Path) -> Mapping[Any, Any]:
    try:
        with file.open("rb") as stream:
            text = stream.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise ConfigError(Problem(str(file), f"is larger than {LARGEST_FILE >> 20} MiB"))
        loader, root = compose_yaml(text.decode("utf-8"))
        _refuse_twins(file, root, set())
        content = None if root is None else loader.construct_document(root)
    except OSError as error:
        raise ConfigError(Problem(str(file), f"cannot be read: {error.strerror}", "--clusters FILE")) from None
    except TooManyValuesError as error:
        raise ConfigError(Problem(str(file), str(error))) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(Problem(str(file), f"is not YAML: {first_line(error)}")) from None
    clusters = content.get("clusters") if isinstance(content, Mapping) else None
    if not isinstance(clusters, Mapping):
        raise ConfigError(Problem(str(file), "has no mapping `clusters`", EXAMPLE))
    names = [str(name) for name in clusters]
    for name in names:
        if not name.isprintable():
            raise ConfigError(Problem(str(file), "has a cluster whose name is not printable text on one line", EXAMPLE))
    if LOCAL.name in names:
        rule = "always means this machine, so no entry may have this name"
        raise ConfigError(Problem(f"{file}: {LOCAL.name}", rule, "another name: workstation: {launcher: local, ...}"))
    return {str(name): entry for name, entry in clusters.items()}


def _refuse_twins(file: Path, node: Any, seen: set[int]) -> None:
    """ConfigError for a key that a mapping has twice, of which YAML's reader would take the last."""
    if not isinstance(node, (yaml.MappingNode, yaml.SequenceNode)) or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_twins(file, child, seen)
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode):
            if key.value in lines:
                rule = f"repeats the key of line {lines[key.value]}"
                raise ConfigError(Problem(f"{file}, line {line}", rule, "remove or rename one of the two"))
            lines[key.value] = line
        _refuse_twins(file, value, seen)


def _closest(given: str) -> str:
    aliases = {"k8s": "kubernetes", "sbatch": "slurm", "pai": "dlc", "torchrun": "local", "pytorchjob": "kubernetes"}
    known = aliases.get(given.lower())
    return f"launcher: {known}" if known else did_you_mean_hint(given, SCHEDULERS) or EXAMPLE


def _problems(where: str, launcher: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    rows = options_of_launcher(launcher)
    for name, value in options.items():
        if name not in rows and name in SECRET_OPTIONS:
            fix = secret_fix(launcher, options)
            yield Problem(f"{where}: {name}", f"is not an option with launcher {launcher}", fix)
        elif name not in rows:
            hint = did_you_mean_hint(name, [*rows])
            yield Problem(
                f"{where}: {name}", f"is not an option with launcher {launcher}", hint or "docs/launch.md lists them"
            )
        elif rule := rows[name].wrong(value):
            yield Problem(f"{where}: {name}", rule)
    yield from _environment_problems(where, launcher, options)
    yield from _setup_problems(where, launcher, options)
    given = [options.get(name) for name in SECRET_OPTIONS]
    for variable in [name for value in given if isinstance(value, (list, Mapping)) for name in value]:
        if not ENVIRONMENT_NAME.fullmatch(str(variable)):
            yield Problem(f"{where}: variable {variable}", "is not the name of a variable")


def _environment_problems(where: str, launcher: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    environment = options.get("environment")
    for variable in environment if isinstance(environment, Mapping) else ():
        what = f"{where}: environment: {variable}"
        if not ENVIRONMENT_NAME.fullmatch(str(variable)):
            yield Problem(what, "is not the name of a variable")
        elif is_secret(str(variable)):
            yield Problem(what, WRITTEN, secret_fix(launcher, options, str(variable)))


def _setup_problems(where: str, launcher: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    setup = options.get("setup")
    for number, line in enumerate(setup if isinstance(setup, list) else (), 1):
        variables = [found[1] for found in LITERAL.finditer(str(line)) if is_secret(found[1])]
        for variable in variables:
            yield Problem(f"{where}: setup: {variable}", WRITTEN, secret_fix(launcher, options, variable))
        if not variables and has_secret(str(line)):
            fix = f"a variable in its place, such as $HF_TOKEN, and {secret_fix(launcher, options)}"
            yield Problem(f"{where}: setup, line {number}", WRITTEN, fix)


def secret_fix(launcher: str, options: Mapping[str, Any], variable: str = "NAME") -> str:
    """How a job of this cluster gets a secret that is in none of its files."""
    rows = options_of_launcher(launcher)
    if launcher == RAY and options.get("submit_to", "address") == "address":
        return "set the variables where `ray start` runs"
    if "secrets" in rows:
        return f"secrets: {{{variable}: SECRET/KEY}}"
    if "secret_variables" in rows:
        return f"secret_variables: [{variable}]"
    return (
        f"keep it in a file of a mounted data set, and read it in setup: export {variable}=$(cat /mnt/data/{variable})"
    )
