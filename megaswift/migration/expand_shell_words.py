"""The commands of a shell script with their words expanded, as far as the script itself sets its variables.

Owns variables, arrays, defaults (`${X:-1}`), integer arithmetic and what counts as the environment. What only a run
would know (`$1`, `$(date)`, a variable set elsewhere) stays as it is written, and the word says so. Nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megaswift.errors import ConfigError, Problem
from megaswift.migration.shell_syntax import NAME, UnexpandedWord, WordPart, simple_commands

OPENING = ("if", "for", "while", "until", "case", "select")
CLOSING = ("fi", "done", "esac")
KEYWORDS = ("then", "do", "else", "elif", "!", "{", "}", "time", *CLOSING)
MOST_CHARACTERS = 1 << 20
"""Of all words of a script together, expanded: `A=$A$A` doubles with every line."""
WORD = 16
"""What a word counts beside its characters."""
MOST_EXPORTS = 500
IN_CONDITION = "outside of a condition"
HIDDEN_BLANK = "\ue000"
LONGEST_SUM = 200
"""Characters of an arithmetic expression."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DEFAULT = re.compile(r"([A-Za-z_]\w*|[0-9]+)(:?[-=?+])(.*)", re.DOTALL)
_ARRAY = re.compile(r"([A-Za-z_]\w*)\[[@*]\]")
_TOKENS = re.compile(r"\s*(?:(\d{1,15})|([A-Za-z_]\w*)|([-+*/%()]))")
_EXPR = re.compile(r"expr\s+(.*)", re.DOTALL)


@dataclass(frozen=True)
class ExpandedWord:
    """One word; `unresolved`: the expansions that stand in it as they are written."""

    text: str
    unresolved: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShellCommand:
    """A command with its environment."""

    line: int
    words: tuple[ExpandedWord, ...]
    environment: dict[str, ExpandedWord]
    """What the script exports before, and what stands in front of the command."""
    conditional: bool = False
    """It stands in a condition or a loop."""


@dataclass
class _Variables:
    texts: dict[str, list[ExpandedWord]] = field(default_factory=dict)
    """An array; of any other variable one item."""
    exported: set[str] = field(default_factory=set)
    environment: dict[str, ExpandedWord] = field(default_factory=dict)
    """What commands get; replaced by a copy when it changes, because commands keep it."""
    characters: int = 0
    conditional: bool = False
    """The command stands in a condition or a loop, which a run may skip."""
    branch: int = 0
    """Of the outermost condition: 0 outside of it, then 1, 2, ... with each `then`, `elif` and `else`."""
    complete: bool = False
    """It has an `else`."""
    new_in: dict[str, set[int]] = field(default_factory=dict)
    """Variables that this condition is the first to set, and in which branches."""

    def end_condition(self) -> None:
        """What not every branch sets is left to the run from here on."""
        for name, branches in self.new_in.items():
            if name in self.texts and not (self.complete and len(branches) == self.branch):
                self._store(name, [_unknown(name)])
        self.branch, self.complete, self.new_in = 0, False, {}

    def set(self, name: str, items: list[ExpandedWord]) -> None:
        """An assignment; one of a condition that changes the value leaves it to the run."""
        changes = name in self.texts and self.texts[name] != items
        if self.branch and (name not in self.texts or name in self.new_in):
            self.new_in.setdefault(name, set()).add(self.branch)
        self._store(name, [_unknown(name)] if self.conditional and changes else items)

    def _store(self, name: str, items: list[ExpandedWord]) -> None:
        self.texts[name] = items
        if name in self.exported:
            self.environment = {**self.environment, name: _joined(items)}

    def export(self, name: str) -> None:
        """From now on commands get the variable."""
        self.exported.add(name)
        if name in self.texts:
            self.set(name, self.texts[name])
        if len(self.exported) > MOST_EXPORTS:
            raise ConfigError(Problem("the script", f"exports more than {MOST_EXPORTS} variables"))


def _unknown(name: str) -> ExpandedWord:
    return ExpandedWord(f"${name}", (f"${name} {IN_CONDITION}",))


def shell_commands(text: str) -> Iterator[ShellCommand]:
    """The commands of a script. ConfigError where its variables grow beyond all bounds."""
    known, depth = _Variables(), 0
    for command in simple_commands(text):
        words = list(command.words)
        begin = 0
        while begin < len(words) and (literal := words[begin].literal) in (*KEYWORDS, *OPENING):
            depth += (literal in OPENING) - (literal in CLOSING)
            begin += 1
            if depth == 1 and literal in ("then", "else") and (known.branch or literal == "then"):
                known.branch += 1
                known.complete |= literal == "else"
            elif depth == 0 and literal == "fi":
                known.end_condition()
            if literal in ("for", "select"):  # the variable has another value in each round
                known.texts.pop(words[begin].literal or "" if begin < len(words) else "", None)
                begin = len(words)
        words = words[begin:]
        known.conditional = depth > 0
        prefix, count = _assignments(words, known)
        rest = words[count:]
        if rest and rest[0].literal in ("export", "declare", "local", "readonly", "typeset"):
            _declare(rest, known)
            continue
        if not rest:
            for name, items in prefix.items():
                known.set(name, items)
            continue
        expanded = tuple(piece for word in rest for piece in _expanded(word, known))
        own = {name: _joined(items) for name, items in prefix.items()}
        environment = known.environment | own if own else known.environment
        yield ShellCommand(command.line, expanded, environment, depth > 0)


def _assignments(words: Sequence[UnexpandedWord], known: _Variables) -> tuple[dict[str, list[ExpandedWord]], int]:
    """The assignments that a command begins with, and how many words they are."""
    found: dict[str, list[ExpandedWord]] = {}
    for i, word in enumerate(words):
        if (pair := _assigned(word, known)) is None:
            return found, i
        found[pair[0]] = pair[1]
    return found, len(words)


def _assigned(word: UnexpandedWord, known: _Variables) -> tuple[str, list[ExpandedWord]] | None:
    first = word.parts[0] if word.parts else None
    match = _ASSIGNMENT.match(first.text) if first is not None and first.kind == "text" and not first.quoted else None
    if match is None or first is None:
        return None
    earlier = known.texts.get(match[1], []) if match[2] else []
    if word.items is not None:
        return match[1], [*earlier, *(piece for item in word.items for piece in _expanded(item, known))]
    parts = [WordPart("text", first.text[match.end() :], True), *word.parts[1:]]
    value = _joined([_piece(p, known) for p in parts], "")
    return match[1], [_joined([*earlier, value], "")]


def _declare(words: Sequence[UnexpandedWord], known: _Variables) -> None:
    """`export A=1 B`."""
    for word in words[1:]:
        pair = _assigned(word, known)
        name = pair[0] if pair else word.literal or ""
        if pair:
            known.set(name, pair[1])
        if words[0].literal == "export" and name:
            known.export(name)


def _expanded(word: UnexpandedWord, known: _Variables) -> list[ExpandedWord]:
    """A word as the words that it becomes: one without quotes is split at blanks, an array has an item for each."""
    done: list[list[ExpandedWord]] = []
    open_word = False
    for part in word.parts:
        if part.kind == "variable" and (array := _ARRAY.fullmatch(part.text)):
            pieces = known.texts.get(array[1]) or [ExpandedWord(f"${{{part.text}}}", (f"${{{part.text}}}",))]
            if array[1] in known.texts and not known.texts[array[1]]:
                pieces = []
        else:
            pieces = [_piece(part, known)]
            if part.kind != "text" and not part.quoted:
                open_word = open_word and not pieces[0].text[:1].isspace()
                pieces = list(_split(pieces[0]))
        for i, piece in enumerate(pieces):
            if i or not open_word:
                done.append([])
            done[-1].append(piece)
            open_word = True
    known.characters += sum(len(piece.text) + WORD for pieces in done for piece in pieces)
    if known.characters > MOST_CHARACTERS:
        raise ConfigError(Problem("the script", f"expands to more than {MOST_CHARACTERS >> 20} MiB of words"))
    return [_joined(pieces, "") for pieces in done]


def _split(word: ExpandedWord) -> Iterator[ExpandedWord]:
    """A word at its blanks, except those inside what is unresolved."""
    text = word.text
    for name in word.unresolved:
        text = text.replace(name, re.sub(r"\s", HIDDEN_BLANK, name))
    for piece in text.split():
        shown = piece.replace(HIDDEN_BLANK, " ")
        yield ExpandedWord(shown, tuple(n for n in word.unresolved if n.removesuffix(f" {IN_CONDITION}") in shown))


def _joined(pieces: Sequence[ExpandedWord], between: str = " ") -> ExpandedWord:
    text = between.join(p.text for p in pieces)
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(Problem("the script", f"expands to more than {MOST_CHARACTERS >> 20} MiB of words"))
    return ExpandedWord(text, tuple(dict.fromkeys(u for p in pieces for u in p.unresolved)))


def _piece(part: WordPart, known: _Variables, depth: int = 0) -> ExpandedWord:
    if part.kind == "text":
        return ExpandedWord(part.text)
    if part.kind == "variable":
        return _variable(part.text, known, depth)
    return _computed(part, known)


def _variable(text: str, known: _Variables, depth: int) -> ExpandedWord:
    written = f"${text}" if NAME.fullmatch(text) or len(text) == 1 else f"${{{text}}}"
    if text in ("@", "*"):
        return ExpandedWord("")
    if text in known.texts:
        return _joined(known.texts[text])
    match = _DEFAULT.fullmatch(text)
    if match is None or depth > 5:
        return ExpandedWord(written, (written,))
    value = _joined(known.texts[match[1]]) if match[1] in known.texts else None
    given = value is not None and (value.text or match[2][0] != ":")
    if match[2][-1] == "+":
        return _inner(match[3], known, depth) if given else ExpandedWord("")
    if given and value is not None:
        return value
    if match[2][-1] == "?":
        return ExpandedWord(f"${match[1]}", (f"${match[1]}",))
    default = _inner(match[3], known, depth)
    if match[2][-1] == "=":
        known.set(match[1], [default])
        return _joined(known.texts[match[1]])
    return default


def _inner(text: str, known: _Variables, depth: int) -> ExpandedWord:
    """The text after `:-`."""
    command = next(iter(simple_commands(f'"{text}"' if '"' not in text else text)), None)
    parts = command.words[0].parts if command and len(command.words) == 1 else []
    return _joined([_piece(p, known, depth + 1) for p in parts], "") if parts else ExpandedWord(text)


def _computed(part: WordPart, known: _Variables) -> ExpandedWord:
    """`$((A * 2))` and `$(expr 16 / 4)`; any other substitution stays as it is written."""
    written = f"$(({part.text}))" if part.kind == "arithmetic" else f"$({part.text})"
    text: str | None = part.text
    if part.kind == "substitution":
        found = _EXPR.fullmatch(part.text.strip())
        text = found[1].replace("\\*", "*") if found else None
    value = None if text is None or len(text) > LONGEST_SUM else _integer(re.sub(r"[${}]", " ", text), known)
    return ExpandedWord(written, (written,)) if value is None else ExpandedWord(str(value))


def _integer(text: str, known: _Variables) -> int | None:
    """The value of an expression of integers and variables; None where there is none."""
    tokens: list[str] = []
    at = 0
    while text[at:].strip():
        found = _TOKENS.match(text, at)
        if found is None:
            return None
        token = found[1] or found[3]
        if found[2]:
            token = _joined(known.texts.get(found[2], [])).text.strip()
            if not re.fullmatch(r"\d{1,15}", token):
                return None
        tokens.append(token)
        at = found.end()
    value = _sum(tokens, 0)
    return value if not tokens else None


def _sum(tokens: list[str], depth: int) -> int | None:
    total = _product(tokens, depth)
    while total is not None and tokens[:1] in (["+"], ["-"]):
        sign, right = tokens.pop(0), _product(tokens, depth)
        total = None if right is None else total + right if sign == "+" else total - right
    return total


def _product(tokens: list[str], depth: int) -> int | None:
    value = _factor(tokens, depth)
    while value is not None and tokens[:1] in (["*"], ["/"], ["%"]):
        sign, right = tokens.pop(0), _factor(tokens, depth)
        if right is None or (sign != "*" and right == 0):
            return None
        value = value * right if sign == "*" else value // right if sign == "/" else value % right
    return value


def _factor(tokens: list[str], depth: int) -> int | None:
    if not tokens or depth > 20:
        return None
    token = tokens.pop(0)
    if token == "(":
        value = _sum(tokens, depth + 1)
        return value if tokens and tokens.pop(0) == ")" else None
    return int(token) if token.isdigit() else None
