"""Rules that follow from the `only_with` of options: one for each selector that an option names there.

A selector is another option (`optimizer`), or a fact that is more than the value of one option. Training lists its
facts in `variants.py`, and the inference commands list theirs in `megaswift.inference.options.variants`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaswift.config.rule import IgnoredOption, join_names
from megaswift.options.option import Option, Wanted
from megaswift.options.values import option_value_text


@dataclass(frozen=True)
class Fact:
    """A selector whose value is computed from a configuration."""

    read: Callable[[Any], Any]
    """Computes the value."""
    reads: tuple[str, ...]
    """Options that decide the value."""
    wants: str = ""
    """Why an option with this selector has no effect, for the message; empty: derived from the wanted values."""
    fix: str | Callable[[Wanted], str] = ""
    """What the message proposes, or a function of the condition; empty: derived likewise."""
    shows_value: bool = False
    """Whether the message adds the actual value, which is a name."""


@dataclass(frozen=True)
class Selectors:
    """The options of a command with the selectors that their declarations name."""

    options: Mapping[str, Option]
    facts: Mapping[str, Fact]
    """By name. A selector that is not listed here is an option and has the option's value."""
    option_value: Callable[[Any, str], Any]
    """Returns the value of an option in a configuration."""

    def value(self, c: Any, name: str) -> Any:
        """Return the value of a selector in a configuration."""
        return self.facts[name].read(c) if name in self.facts else self.option_value(c, name)

    def rules(self) -> Iterator[IgnoredOption]:
        """Yield a rule for each option and selector: the option has no effect if the selector has another value."""
        for option in self.options.values():
            for selector, wanted in option.only_with.items():
                yield self._rule(option, selector, wanted)

    def _rule(self, option: Option, selector: str, wanted: Wanted) -> IgnoredOption:
        fact = self.facts.get(selector)
        fix = fact.fix if fact else ""
        return IgnoredOption(
            option.name,
            fact.reads if fact else (selector,),
            lambda c: not wanted.holds(self.value(c, selector)),
            (fact and fact.wants) or self._reason(selector, wanted),
            (fix if isinstance(fix, str) else fix(wanted)) or self._fix(selector, wanted),
            option.neutral,
            notice=wanted.notice,
        )

    def _reason(self, selector: str, wanted: Wanted) -> str:
        """Return why the option has no effect, for messages: the rest of a sentence that begins with the option."""
        if wanted.values == (None,):
            return f"applies only to runs without --{selector}"
        if wanted.values:
            names = join_names(_texts(wanted.values), "or")
            # The actual value is added where it is a name: `{engine}` is a placeholder, filled when the rule is broken.
            fact = self.facts.get(selector)
            shows_value = isinstance(wanted.values[0], str) and (fact is None or fact.shows_value)
            return f"applies only to --{selector} {names}" + (f" ({selector} is {{{selector}}})" if shows_value else "")
        if wanted.excluded:
            return f"does not apply to --{selector} {join_names(_texts(wanted.excluded), 'or')}"
        if wanted.least is not None:
            return f"applies only to --{selector} {wanted.least} or more"
        return f"applies only to runs with --{selector}"

    def _fix(self, selector: str, wanted: Wanted) -> str:
        """Return the option to give instead."""
        if wanted.values == (None,):
            return f"leave out --{selector}"
        if wanted.values:
            return f"--{selector} {option_value_text(wanted.values[0])}"
        if wanted.least is not None:
            return f"--{selector} {wanted.least}"
        option = self.options[selector]
        choice = next((choice for choice in option.choices if choice not in wanted.excluded), None)
        if choice or option.kind == "bool":
            return f"--{selector} {choice or 'false'}"
        return f"--{selector} {option.details.get('metavar') or option.unit.upper() or 'VALUE'}"


def _texts(values: tuple[Any, ...]) -> list[str]:
    named = [value for value in values if value not in (None, "auto")]
    return [option_value_text(value) for value in named or values]
