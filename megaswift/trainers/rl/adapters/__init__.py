"""Environments of other libraries: `--environment openenv:URL`.

An adapter is a module of this package with the name before the colon. Its `environment(rest)` returns what makes an
environment, and `missing(rest)` the problems of this machine with it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from megaswift.errors import Problem


def adapter_names() -> list[str]:
    """Return the names of all adapters."""
    return [module.name for module in pkgutil.iter_modules(__path__)]


def is_adapted(text: str) -> bool:
    """Return whether a value of `--environment` names an adapter: `openenv:URL`."""
    return text.partition(":")[0] in adapter_names() and ":" in text


def adapted_environment(text: str) -> Callable[[], Any]:
    """Return what makes the environment of `NAME:REST`, without arguments. ConfigError where it cannot be made."""
    name, _, rest = text.partition(":")
    make: Callable[[], Any] = importlib.import_module(f"{__name__}.{name}").environment(rest)
    return make


def adapter_problems(text: str) -> Iterator[Problem]:
    """Yield the problems of `NAME:REST` that can be found before a run starts."""
    name, _, rest = text.partition(":")
    yield from importlib.import_module(f"{__name__}.{name}").missing(rest)
