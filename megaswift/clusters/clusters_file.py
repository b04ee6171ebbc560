"""clusters.yaml: where it is looked for, and its checks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megaswift.clusters.cluster_and_job import Cluster
from megaswift.clusters.cluster_options import ENVIRONMENT_NAME, RAY, options_of_launcher
from megaswift.clusters.scheduler_table import SCHEDULERS
from megaswift.config.read_config_file_and_command_line import LARGEST_FILE
from megaswift.errors import ConfigError, Problem, did_you_mean_hint, first_line
from megaswift.redaction import is_secret

FILE = "clusters.yaml"
EXAMPLE = "clusters: {NAME: {launcher: slurm, partition: gpu}}"
LOCAL = Cluster("local", "local")
"""Known without a file."""
NUMBERS = {
    "tag:yaml.org,2002:int": r"^[-+]?(0|[1-9][0-9_]*)$",
    "tag:yaml.org,2002:float": r"^[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?$",
}
"""As people write them: in the base 10."""
SECRET_OPTIONS = ("secrets", "secret_variables")
LITERAL = re.compile(r"(?<![\w$])([A-Za-z_]\w*)=[\"']?(?=[^\s\"'$`<;&|)/~.])")
"""An assignment in a line of shell whose value is neither an expansion nor a path."""
WRITTEN = "is a secret, which would be written into the job's files"


def clusters_file(given: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file: `--clusters FILE`, else ./clusters.yaml, else the user's; None where there is none."""
    if given is not None:
        return Path(given).expanduser()
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".config")
    return next((p for p in (Path(FILE), home / "megaswift" / FILE) if p.is_file()), None)


def read_cluster(name: str, given: str | None, environ: Mapping[str, str] = os.environ) -> Cluster:
    """A cluster by name. ConfigError with every mistake of its entry."""
    file = clusters_file(given, environ)
    if file is None:
        if name == LOCAL.name:
            return LOCAL
        fix = f"write ./{FILE} with {EXAMPLE}, or give --clusters FILE"
        raise ConfigError(Problem(f"--cluster {name}", f"there is no {FILE} here or in the configuration folder", fix))
    clusters = _read(file)
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


def _read(file: Path) -> Mapping[Any, Any]:
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise ConfigError(Problem(str(file), f"is larger than {LARGEST_FILE >> 20} MiB"))
        content = _clusters_loader()(file.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError(Problem(str(file), f"cannot be read: {error.strerror}", "--clusters FILE")) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(Problem(str(file), f"is not YAML: {first_line(error)}")) from None
    clusters = content.get("clusters") if isinstance(content, Mapping) else None
    if not isinstance(clusters, Mapping):
        raise ConfigError(Problem(str(file), "has no mapping `clusters`", EXAMPLE))
    return {str(name): entry for name, entry in clusters.items()}


def _clusters_loader() -> type[Any]:
    """Reads 24:00:00 as text: YAML 1.1 has numbers to the base 60, so that a time limit would be 86400."""

    class WithoutBase60(yaml.SafeLoader):
        pass

    first = {
        letter: [(tag, pattern) for tag, pattern in rows if tag not in NUMBERS]
        for letter, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    WithoutBase60.yaml_implicit_resolvers = first
    for tag, pattern in NUMBERS.items():
        WithoutBase60.add_implicit_resolver(tag, re.compile(pattern), list("-+.0123456789"))
    return WithoutBase60


def _closest(given: str) -> str:
    aliases = {"k8s": "kubernetes", "sbatch": "slurm", "pai": "dlc", "torchrun": "local", "pytorchjob": "kubernetes"}
    known = aliases.get(given.lower())
    return f"launcher: {known}" if known else did_you_mean_hint(given, SCHEDULERS) or EXAMPLE


def _problems(where: str, launcher: str, options: Mapping[str, Any]) -> Iterator[Problem]:
    rows = options_of_launcher(launcher)
    for name, value in options.items():
        if name not in rows and name in SECRET_OPTIONS:
            fix = secret_fix(launcher, options)
            yield Problem(f"{where}: {name}", f"is no option of a {launcher} cluster", fix)
        elif name not in rows:
            hint = did_you_mean_hint(name, [*rows])
            yield Problem(
                f"{where}: {name}", f"is no option of a {launcher} cluster", hint or "docs/launch.md lists them"
            )
        elif rule := rows[name].wrong(value):
            yield Problem(f"{where}: {name}", rule)
    yield from _environment_problems(where, launcher, options)
    yield from _setup_problems(where, launcher, options)
    for variable in [*(options.get("secret_variables") or ()), *(options.get("secrets") or ())]:
        if not ENVIRONMENT_NAME.fullmatch(str(variable)):
            yield Problem(f"{where}: secrets: {variable}", "is not the name of a variable")


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
    for line in setup if isinstance(setup, list) else ():
        for variable in (found[1] for found in LITERAL.finditer(str(line)) if is_secret(found[1])):
            yield Problem(f"{where}: setup: {variable}", WRITTEN, secret_fix(launcher, options, variable))


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
