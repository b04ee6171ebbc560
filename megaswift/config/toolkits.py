"""The door to what is known about other toolkits: the loader asks it, and the command hands it in.

The package behind it is `megaswift/compat/`; nothing else in this folder contains another toolkit's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from megaswift.config.sections import Sections
from megaswift.config.sources import ConfigSource, GivenOptionValue
from megaswift.errors import Problem


class Toolkits(Protocol):
    """Names and values of other toolkits, for the options of one command."""

    def translate(self, sources: Sequence[ConfigSource], known: Mapping[str, str]) -> list[ConfigSource]:
        """Return the sources in megaswift's names and values; what nobody knows stays as it is.

        Args:
            known: Any spelling of an option of the command, and its canonical name.
        """

    def explain(self, given: GivenOptionValue, known: Mapping[str, str], task: str | None) -> list[Problem]:
        """Return what is wrong with an option that the command does not have; empty for a name that is in no table."""

    def instead(self, option: str, value: Any) -> str:
        """Return what to do in place of a value that `option` does not take; empty where that is not known."""

    def unread_variables(self, environ: Mapping[str, str]) -> Iterable[str]:
        """Return a line for variables of other toolkits that no command of megaswift reads."""


class TrainingToolkits(Toolkits, Protocol):
    """The same for training, whose defaults differ from those of other toolkits."""

    def notices(self, sections: Sections, spellings: Iterable[str]) -> Iterable[str]:
        """Return lines about defaults that differ from those of the toolkit whose spellings were used."""
