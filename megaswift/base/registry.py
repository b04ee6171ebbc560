"""A registry of named objects (families, formats, tasks, launchers): the error for an unknown name lists the known
ones.

Owns registration and lookup; what is registered belongs to the packages that own a registry.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from megaswift.errors import ConfigError, Problem, did_you_mean_hint

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to things, filled by the modules of one package when they are first needed."""

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind = kind
        self.package = package
        self._items: dict[str, T] = {}
        self._loaded = package is None

    def register(self, name: str, item: T) -> T:
        """Add `item` under `name`; a second one of that name is a programming error."""
        assert name not in self._items, f"two of {self.kind} are named {name}"
        self._items[name] = item
        return item

    def replace(self, name: str, item: T) -> None:
        """The same, in place of one of that name."""
        self._load()
        self._items[name] = item

    def add(self, name: str) -> Callable[[T], T]:
        """The same as a decorator."""
        return lambda item: self.register(name, item)

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            package = importlib.import_module(str(self.package))
            for info in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self.package}.{info.name}")

    def get(self, name: str) -> T:
        """The thing called `name`; ConfigError with the known names otherwise."""
        self._load()
        if name not in self._items:
            known = ", ".join(sorted(self._items))
            raise ConfigError(
                Problem(
                    f"{self.kind} {name!r}",
                    f"is unknown; known names are {known}",
                    did_you_mean_hint(name, list(self._items)),
                )
            )
        return self._items[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        self._load()
        return sorted(self._items)

    def __iter__(self) -> Iterator[T]:
        self._load()
        return iter(self._items.values())

    def __contains__(self, name: str) -> bool:
        self._load()
        return name in self._items
