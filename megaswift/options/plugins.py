"""Reads `--external_plugins FILE...`: the user's own Python files, which register what they add (`megaswift.plugins`),
or reward classes as ms-swift's plugins do.

Files are read once in a process, before the values of other options are checked, because they may add choices. Only
files that the user names are run, never one of a model folder that the user has not named.

Files written for ms-swift import `swift`. While a file is read, modules of that name stand in for it: they hold `ORM`,
`AsyncORM`, `orms` and a logger; whatever else a file takes from them can be subclassed and registered, and says what it
is when it is used.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from megaswift.base.user_code import defined_at, import_user_file
from megaswift.errors import ConfigError, Problem, missing_path_hint
from megaswift.options.sources import ConfigSource

OPTION = "external_plugins"
ALIAS = "custom_register_path"
PACKAGE = "swift"


class ORM:
    """The base of a file's reward classes; ms-swift hands them its arguments, here None."""

    def __init__(self, args: Any = None, **_: Any) -> None:
        self.args = args


class UnavailableError(Exception):
    """Use of a part of ms-swift that is not here."""


class _Elsewhere(type):
    """Classes of ms-swift that are not here, and registries: `name["x"] = y` is taken and does nothing."""

    def __setitem__(cls, name: str, value: object) -> None:
        pass

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise UnavailableError(f"{cls.__mro__[-2].__name__} is part of ms-swift; only reward classes of orms run here")


class _StandIn(ModuleType):
    """A module `swift...`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Elsewhere(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, orms: dict[str, Any]) -> None:
        self.given: dict[str, Any] = {"ORM": ORM, "AsyncORM": ORM, "orms": orms, "get_logger": logging.getLogger}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _StandIn(spec.name)
        module.__dict__.update(self.given)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


@contextmanager
def _in_place_of_swift(orms: dict[str, Any]) -> Iterator[None]:
    """ms-swift itself, where it is installed, is left alone."""
    finder = _Finder(orms)
    own = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PACKAGE}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules.update(own)


@dataclass
class ExternalPlugins:
    """Registrations of files and scripts in this process."""

    rewards: dict[str, Any] = field(default_factory=dict)
    """Functions, classes and objects of `megaswift.plugins.reward`."""
    environments: dict[str, Any] = field(default_factory=dict)
    """Classes of `megaswift.plugins.environment`."""
    orms: dict[str, Any] = field(default_factory=dict)
    """What files written for ms-swift put into its `orms`. Only configurations that name such a file see them."""
    read: dict[Path, str] = field(default_factory=dict)
    """SHA-256 of each file when it was read."""
    with_formats: set[Path] = field(default_factory=set)
    """Files that have registered data formats: workers that tokenize read them too."""
    of_script: dict[tuple[str, str], None] = field(default_factory=dict)
    """Option and value that a script has registered; no option for what every run has, such as a callback."""
    script_formats: dict[str, str] = field(default_factory=dict)
    """Data formats that a script has registered, and a digest of what it registered them from."""
    reading: Path | None = None


PLUGINS = ExternalPlugins()


def plugins_of_sources(sources: Sequence[ConfigSource]) -> Sequence[ConfigSource]:
    """The sources; what their files add is registered. Files that are not here are an error when the run starts."""
    for source in sources:
        for given in source.givens:
            if given.name in (OPTION, ALIAS) and given.value:
                files = given.value if isinstance(given.value, list | tuple) else [given.value]
                load_external_plugins([str(file) for file in files if Path(file).expanduser().is_file()])
    return sources


def load_external_plugins(files: Sequence[str]) -> None:
    """Reads the files that have not been read; ConfigError for one that is missing or fails."""
    for file in files:
        flag = f"--external_plugins {file}"
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(Problem(flag, f"no such file: {path}", missing_path_hint(path)))
        path = path.resolve()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if PLUGINS.read.get(path) == digest:
            continue
        PLUGINS.reading = path
        try:
            with _in_place_of_swift(PLUGINS.orms):
                import_user_file(path, flag)
        finally:
            PLUGINS.reading = None
        PLUGINS.read[path] = digest


def sources_of_data_formats() -> list[tuple[str, str]]:
    """Path and SHA-256 of each file that has registered a data format; no path for formats of a script, which other
    processes cannot read."""
    files = [(str(path), digest) for path, digest in PLUGINS.read.items() if path in PLUGINS.with_formats]
    return sorted([*files, *(("", digest) for digest in PLUGINS.script_formats.values())])


def digest_of_script(function: Any) -> str:
    """SHA-256 of the file in which a function is defined, the same on every rank; a number of its own for a function
    of a notebook, whose cells may have changed since: its rows are tokenized again."""
    path = Path(defined_at(function).rpartition(":")[0])
    content = path.read_bytes() if path.is_file() else os.urandom(32)
    return hashlib.sha256(content).hexdigest()
