"""How a `config.json` is read: every field is mapped, must have a certain value, or is listed with the reason why it
does not matter.

Owns the row kinds and the reading. Which rows a family has is in its own file and in `decoder`. A field that no
row claims is an error: a setting that nobody looked at may change what the model computes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaswift.errors import Problem, WeightsError, did_you_mean_hint

REQUIRED: Any = object()
"""The default of a row whose field must be there."""
SPEC_FIELDS = ("vocab_size", "max_positions", "tied", "dtype", "rope")
"""Targets that are fields of ModelSpec itself; all others are fields of `Features` or of Megatron's
TransformerConfig."""


MOST = {
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "num_hidden_layers": 1 << 14,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 28,
}
"""Sizes far above any model's: a larger one is a mistake in the file, and would end in lack of memory."""
MOST_OF_OTHERS = (1 << 31) - 1


@dataclass
class ConfigReading:
    """One config.json on its way: the values found and the problems met."""

    family: str
    raw: Mapping[str, Any]
    problems: list[Problem] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def problem(self, key: str, rule: str, fix: str = "") -> None:
        """Note a mistake in field `key`, once."""
        value_text = f" {self.raw[key]!r}" if key in self.raw else ""
        problem = Problem(f"config.json ({self.family}), {key}{value_text}", rule, fix)
        if problem not in self.problems:
            self.problems.append(problem)

    def get(self, key: str, kind: type, default: Any = REQUIRED, least: float = 0) -> Any:
        """Field `key` as `kind`, at least `least`. Absent or null is `default`; after a problem the answer is None."""
        value = self.raw.get(key)
        if value is None:
            if default is REQUIRED:
                self.problem(key, "is missing")
            return None if default is REQUIRED else default
        right = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not right or (isinstance(value, bool) and kind is not bool):
            self.problem(key, f"must be {kind.__name__}, not {type(value).__name__}")
            return None
        if kind in (int, float) and value < least:
            self.problem(key, f"must be at least {least}")
            return None
        most = MOST.get(key, MOST_OF_OTHERS)
        if kind is int and value > most:
            self.problem(key, f"must be at most {most:,}")
            return None
        if kind is float and not math.isfinite(value):
            self.problem(key, "must be a finite number")
            return None
        return float(value) if kind is float else value

    def layers(self) -> int | None:
        """`num_hidden_layers` for rows that list layers; None where it is no number that a model can have, which its
        own row reports."""
        layers = self.raw.get("num_hidden_layers")
        valid = isinstance(layers, int) and not isinstance(layers, bool) and 0 < layers <= MOST["num_hidden_layers"]
        return layers if valid else None


class ConfigRow(ABC):
    """One entry of a family's configuration table."""

    keys: tuple[str, ...]

    @abstractmethod
    def read(self, reading: ConfigReading) -> None:
        """Put values into `reading.values`, or problems into `reading.problems`."""


@dataclass(frozen=True)
class MappedField(ConfigRow):
    """A field that maps to one of ours: `hf` holds its spellings, the first present one counts."""

    hf: str | tuple[str, ...]
    target: str
    kind: type
    default: Any = REQUIRED
    least: float = 1

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        """The spellings."""
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    def read(self, reading: ConfigReading) -> None:
        """Copy the value."""
        key = next((k for k in self.keys if reading.raw.get(k) is not None), self.keys[0])
        reading.values[self.target] = reading.get(key, self.kind, self.default, 0 if self.kind is float else self.least)


@dataclass(frozen=True)
class RequiredValue(ConfigRow):
    """A field that is right only with one of these values; null counts as absent."""

    hf: str
    allowed: tuple[Any, ...]
    why: str
    fix: str = ""

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        """The field."""
        return (self.hf,)

    def read(self, reading: ConfigReading) -> None:
        """Complain of any other value."""
        if reading.raw.get(self.hf) is not None and reading.raw[self.hf] not in self.allowed:
            must = " or ".join(repr(v) for v in self.allowed) or "absent"
            reading.problem(self.hf, f"must be {must}: {self.why}", self.fix)


@dataclass(frozen=True)
class UnusedField(ConfigRow):
    """Fields that change nothing here."""

    keys: tuple[str, ...]
    why: str

    def read(self, reading: ConfigReading) -> None:
        """Nothing to read."""


@dataclass(frozen=True)
class FieldGroupRow(ConfigRow):
    """Fields that have a meaning only together."""

    keys: tuple[str, ...]
    convert: Callable[[ConfigReading], None]

    def read(self, reading: ConfigReading) -> None:
        """Let the group's function do it."""
        self.convert(reading)


def read_rows(family: str, rows: Sequence[ConfigRow], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all rows; a WeightsError with all problems, unclaimed fields included."""
    reading = ConfigReading(family, raw)
    claimed = {"model_type"}
    for row in rows:
        repeated = claimed & set(row.keys)
        assert not repeated, f"family {family}: {sorted(repeated)} claimed twice"
        claimed |= set(row.keys)
    for key in raw:
        if key not in claimed:
            reading.problem(
                key,
                "is not in this family's table, so it may change what the model computes",
                did_you_mean_hint(key, sorted(claimed))
                or "remove it if it has no effect on the model, or add a row for it to the family's table",
            )
    for row in rows:
        row.read(reading)
    if reading.problems:
        raise WeightsError(reading.problems)
    return reading.values
