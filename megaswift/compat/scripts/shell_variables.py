"""The variables of a shell script with their values, as far as these do not depend on what a run does.

Owns what conditions, loops, functions and subshells leave of a value: one that not every path sets, or not to the same
text, is left to the run. Expansion is `shell_words.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megaswift.compat.scripts.control_flow import CASE, FUNCTION, GROUP, IF, LIST, LOOP, SUBSHELL
from megaswift.errors import ConfigError, Problem

IN_CONDITION = "outside of a condition"
MOST_EXPORTS = 500
MOST_CHARACTERS = 1 << 20
"""Maximum characters of all words of a script together, expanded: `A=$A$A` doubles with every line."""


@dataclass(frozen=True)
class ExpandedWord:
    """One word; `unresolved`: the expansions that stand in it as they are written."""

    text: str
    unresolved: tuple[str, ...] = ()


Items = list[ExpandedWord]
"""An array; of any other variable one item."""


def unknown_value(name: str) -> Items:
    """The value of a variable that is left to the run."""
    return [ExpandedWord(f"${name}", (f"${name} {IN_CONDITION}",))]


def joined_word(pieces: Sequence[ExpandedWord], between: str = " ") -> ExpandedWord:
    """One word of several."""
    text = between.join(p.text for p in pieces)
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(Problem("the script", f"expands to more than {MOST_CHARACTERS >> 20} MiB of words"))
    return ExpandedWord(text, tuple(dict.fromkeys(u for p in pieces for u in p.unresolved)))


@dataclass
class _Frame:
    """Something open: what its variables were before, and at the end of each branch that ended."""

    kind: str
    before: dict[str, Items | None] = field(default_factory=dict)
    """The values of the variables that it sets; None: not set."""
    ends: list[dict[str, Items | None]] = field(default_factory=list)
    assigned: dict[str, list[Items | None]] = field(default_factory=dict)
    """For a loop: every value that it gives a variable."""
    exported: list[str] = field(default_factory=list)
    branching: bool = False
    """A branch has begun."""
    complete: bool = False
    """It has an `else`, or the pattern `*`."""
    in_elif: bool = False


@dataclass
class ShellVariables:
    """The values at a place of the script."""

    texts: dict[str, Items] = field(default_factory=dict)
    environment: dict[str, ExpandedWord] = field(default_factory=dict)
    """What commands get; replaced by a copy when it changes, because commands keep it."""
    characters: int = 0
    """Characters of all words so far, expanded."""
    _exported: set[str] = field(default_factory=set)
    _frames: list[_Frame] = field(default_factory=list)

    def set(self, name: str, items: Items | None) -> None:
        """An assignment; None: `unset`."""
        if self._frames:
            frame = self._frames[-1]
            frame.before.setdefault(name, self.texts.get(name))
            if frame.in_elif:
                frame.before[name] = unknown_value(name)
            if frame.kind == LOOP:
                frame.assigned.setdefault(name, []).append(items)
        self._store(name, items)

    def _store(self, name: str, items: Items | None) -> None:
        if items is None:
            self.texts.pop(name, None)
            self.environment = {n: w for n, w in self.environment.items() if n != name}
            return
        self.texts[name] = items
        if name in self._exported:
            self.environment = {**self.environment, name: joined_word(items)}

    def leave_to_the_run(self, names: Iterable[str]) -> None:
        """These have values that only a run knows."""
        for name in names:
            self.set(name, unknown_value(name))

    def export(self, name: str) -> None:
        """From now on commands get the variable."""
        if self._frames and name not in self._exported:
            self._frames[-1].exported.append(name)
        self._exported.add(name)
        if name in self.texts:
            self._store(name, self.texts[name])
        if len(self._exported) > MOST_EXPORTS:
            raise ConfigError(Problem("the script", f"exports more than {MOST_EXPORTS} variables"))

    def open(self, kind: str, names: Iterable[str]) -> None:
        """A condition, loop, function, ... begins; `names`: what a loop, or the script after a function, sets."""
        self._frames.append(_Frame(kind))
        if kind in (LOOP, FUNCTION):  # earlier rounds, and what comes between definition and call
            for name in names:
                if kind == LOOP or name in self.texts:
                    self._frames[-1].before.setdefault(name, self.texts.get(name))
                    self._store(name, unknown_value(name))

    def branch(self, word: str) -> None:
        """`then`, `elif`, `else`, or the next pattern of a case."""
        frame = self._frames[-1]
        if word == "last pattern":
            frame.complete = True
            return
        if word == "then" and frame.branching:
            frame.in_elif = False
            return
        going_on = list(frame.before) if word == "next pattern" else []
        if frame.branching:
            self._end_branch(frame)
        else:  # what the condition itself sets, every path has
            self._hand_up(frame, {name: self.texts.get(name) for name in frame.before})
        frame.branching = True
        frame.complete |= word == "else"
        frame.in_elif = word == "elif"
        for name in going_on:
            self._store(name, unknown_value(name))

    def _end_branch(self, frame: _Frame) -> None:
        frame.ends.append({name: self.texts.get(name) for name in frame.before})
        self._restore(frame)

    def _restore(self, frame: _Frame) -> None:
        for name, items in frame.before.items():
            self._store(name, items)

    def _hand_up(self, frame: _Frame, values: dict[str, Items | None]) -> None:
        """These values are what the frame around it gets."""
        self._restore(frame)
        inner = self._frames.pop()
        for name, items in values.items():
            self.set(name, items)
        inner.before = {}
        inner.assigned = {}
        self._frames.append(inner)

    def close(self, piped: bool) -> None:
        """Its end; `piped`: in a process of its own."""
        frame = self._frames[-1]
        lost = piped or frame.kind in (SUBSHELL, FUNCTION)
        values = {} if lost else self._after(frame)
        self._hand_up(frame, values)
        self._frames.pop()
        if lost:
            self._exported -= set(frame.exported)
            self.environment = {n: w for n, w in self.environment.items() if n not in frame.exported}
        elif frame.kind != GROUP:
            unsure = {name: unknown_value(name)[0] for name in frame.exported}
            self.environment = {**self.environment, **unsure} if unsure else self.environment
        if self._frames and not lost:
            self._frames[-1].exported += frame.exported

    def _after(self, frame: _Frame) -> dict[str, Items | None]:
        now = {name: self.texts.get(name) for name in frame.before}
        if frame.kind == LOOP:
            return {
                name: before if all(v == before for v in frame.assigned.get(name, ())) else unknown_value(name)
                for name, before in frame.before.items()
            }
        if frame.kind not in (IF, CASE, LIST):
            return now
        paths = [*frame.ends, now] if frame.branching or frame.kind == LIST else frame.ends
        if not frame.complete:
            paths.append({})
        found = {}
        for name, before in frame.before.items():
            first, *others = (path.get(name, before) for path in paths)
            found[name] = first if all(other == first for other in others) else unknown_value(name)
        return found
