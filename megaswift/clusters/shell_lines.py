"""The lines of shell that start a node's part of a run. Every value is quoted; the cluster's own `setup` lines stand as
they are."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from megaswift.clusters.job import Job
from megaswift.clusters.network_presets import network_variables

HEADER = "#!/bin/bash"


def export_lines(variables: Mapping[str, str]) -> list[str]:
    """`export NAME=VALUE`, each value as it is."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def default_lines(variables: Mapping[str, str]) -> list[str]:
    """`export NAME=VALUE` unless the variable is set."""
    return [f': "${{{name}={_in_double_quotes(value)}}}"; export {name}' for name, value in variables.items()]


def preparation_lines(job: Job) -> list[str]:
    """The working folder, the cluster's setup, the variables."""
    variables = job.environment()
    preset = network_variables(job.cluster.get("network"))
    preset = {name: value for name, value in preset.items() if variables[name] == value}
    own = {name: value for name, value in variables.items() if name not in preset}
    setup = [str(line) for line in job.cluster.get("setup") or ()]
    return [f"cd -- {shlex.quote(job.workdir)} || exit 1", *setup, *default_lines(preset), *export_lines(own)]


def shell_words(words: Sequence[str]) -> str:
    """The words, quoted."""
    return " ".join(shlex.quote(word) for word in words)


def _in_double_quotes(value: str) -> str:
    return "".join(f"\\{c}" if c in '\\"$`' else c for c in value)
