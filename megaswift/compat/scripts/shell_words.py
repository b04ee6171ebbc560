"""The commands of a shell script with their words expanded, as far as the script itself sets its variables.

Owns words: variables, arrays, defaults (`${X:-1}`) and integer arithmetic. What only a run would know (`$1`, `$(date)`,
a variable set elsewhere) stays as it is written, and the word says so. Nothing is run, and sourced files are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megaswift.compat.scripts.control_flow import (
    CASE,
    DECLARES,
    FUNCTION,
    IF,
    LOOP,
    READS,
    assigned_name,
    control_steps,
    read_names,
)
from megaswift.compat.scripts.shell_syntax import NAME, SimpleCommand, UnexpandedWord, WordPart, simple_commands
from megaswift.compat.scripts.shell_variables import (
    IN_CONDITION,
    MOST_CHARACTERS,
    ExpandedWord,
    ShellVariables,
    joined_word,
)
from megaswift.errors import ConfigError, Problem

WORD = 16
"""What a word counts beside its characters."""
HIDDEN_BLANK = "\ue000"
LONGEST_SUM = 200
"""Characters of an arithmetic expression."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DEFAULT = re.compile(r"([A-Za-z_]\w*|[0-9]+)(:?[-=?+])(.*)", re.DOTALL)
_ARRAY = re.compile(r"([A-Za-z_]\w*)\[[@*]\]")
_TOKENS = re.compile(r"\s*(?:(\d{1,15})|([A-Za-z_]\w*)|([-+*/%()]))")
_EXPR = re.compile(r"expr\s+(.*)", re.DOTALL)


@dataclass(frozen=True)
class ShellCommand:
    """A command with its environment."""

    line: int
    words: tuple[ExpandedWord, ...]
    environment: dict[str, ExpandedWord]
    """What the script exports before, and what stands in front of the command."""
    conditional: bool = False
    """It stands in a condition, a loop or a function."""
    stray_lines: tuple[int, ...] = ()
    """Lines that begin with an option without a backslash before them, and are read as part of the command."""


def shell_commands(text: str) -> Iterator[ShellCommand]:
    """The commands of a script. ConfigError where its variables grow beyond all bounds.

    A line that begins with an option starts no command: a backslash is missing before it.
    """
    last: ShellCommand | None = None
    for command in _separate_commands(text):
        if last is not None and command.words[0].text[:2] == "--":
            last = replace(last, words=last.words + command.words, stray_lines=(*last.stray_lines, command.line))
            continue
        if last is not None:
            yield last
        last = command
    if last is not None:
        yield last


def _separate_commands(text: str) -> Iterator[ShellCommand]:
    known = ShellVariables()
    conditions: list[bool] = []
    for step in control_steps(list(simple_commands(text))):
        if step.step == "open":
            known.open(step.kind, step.names)
            conditions.append(step.kind in (IF, CASE, LOOP, FUNCTION) or step.tested)
        elif step.step == "close":
            known.close(step.piped)
            conditions.pop()
        elif step.step == "branch":
            known.branch(step.kind)
        elif step.kind == "for":
            for name in step.names:
                known.set(name, [ExpandedWord(f"${name}", (f"${name}",))])
        elif step.kind == "case":
            for word in step.command.words if step.command else ():
                _expanded(word, known)
        elif step.kind != "arithmetic" and step.command is not None and (made := _performed(step.command, known)):
            yield replace(made, conditional=any(conditions))
        if step.kind in ("arithmetic", "call"):
            known.leave_to_the_run(step.names)


def _performed(command: SimpleCommand, known: ShellVariables) -> ShellCommand | None:
    """What a command does to variables; the command, where it is more than that."""
    prefix, count = _assignments(command.words, known)
    rest = command.words[count:]
    first = rest[0].literal if rest else None
    if not rest:
        for name, items in prefix.items():
            known.set(name, items)
        return None
    if first in DECLARES:
        _declare(rest, known)
        return None
    if first == "unset":
        for name in read_names(rest):
            known.set(name, None)
    elif first in READS:
        known.leave_to_the_run(read_names(rest))
    elif element := assigned_name(rest[0]):  # A[0]=x
        known.leave_to_the_run([element])
    expanded = tuple(piece for word in rest for piece in _expanded(word, known))
    own = {name: joined_word(items) for name, items in prefix.items()}
    return ShellCommand(command.line, expanded, known.environment | own if own else known.environment)


def _assignments(words: Sequence[UnexpandedWord], known: ShellVariables) -> tuple[dict[str, list[ExpandedWord]], int]:
    """The assignments that a command begins with, and how many words they are."""
    found: dict[str, list[ExpandedWord]] = {}
    for i, word in enumerate(words):
        if (pair := _assigned(word, known)) is None:
            return found, i
        found[pair[0]] = pair[1]
    return found, len(words)


def _assigned(word: UnexpandedWord, known: ShellVariables) -> tuple[str, list[ExpandedWord]] | None:
    first = word.parts[0] if word.parts else None
    match = _ASSIGNMENT.match(first.text) if first is not None and first.kind == "text" and not first.quoted else None
    if match is None or first is None:
        return None
    earlier = known.texts.get(match[1], []) if match[2] else []
    if word.items is not None:
        return match[1], [*earlier, *(piece for item in word.items for piece in _expanded(item, known))]
    parts = [WordPart("text", first.text[match.end() :], True), *word.parts[1:]]
    value = joined_word([_piece(p, known) for p in parts], "")
    return match[1], [joined_word([*earlier, value], "")]


def _declare(words: Sequence[UnexpandedWord], known: ShellVariables) -> None:
    """`export A=1 B`."""
    for word in words[1:]:
        pair = _assigned(word, known)
        name = pair[0] if pair else word.literal or ""
        if pair:
            known.set(name, pair[1])
        if words[0].literal == "export" and name:
            known.export(name)


def _expanded(word: UnexpandedWord, known: ShellVariables) -> list[ExpandedWord]:
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
    return [joined_word(pieces, "") for pieces in done]


def _split(word: ExpandedWord) -> Iterator[ExpandedWord]:
    """A word at its blanks, except those inside what is unresolved."""
    text = word.text
    for name in word.unresolved:
        text = text.replace(name, re.sub(r"\s", HIDDEN_BLANK, name))
    for piece in text.split():
        shown = piece.replace(HIDDEN_BLANK, " ")
        yield ExpandedWord(shown, tuple(n for n in word.unresolved if n.removesuffix(f" {IN_CONDITION}") in shown))


def _piece(part: WordPart, known: ShellVariables, depth: int = 0) -> ExpandedWord:
    if part.kind == "text":
        return ExpandedWord(part.text)
    if part.kind == "variable":
        return _variable(part.text, known, depth)
    return _computed(part, known)


def _variable(text: str, known: ShellVariables, depth: int) -> ExpandedWord:
    written = f"${text}" if NAME.fullmatch(text) or len(text) == 1 else f"${{{text}}}"
    if text in ("@", "*"):
        return ExpandedWord("")
    if text in known.texts:
        return joined_word(known.texts[text])
    match = _DEFAULT.fullmatch(text)
    if match is None or depth > 5:
        return ExpandedWord(written, (written,))
    value = joined_word(known.texts[match[1]]) if match[1] in known.texts else None
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
        return joined_word(known.texts[match[1]])
    return default


def _inner(text: str, known: ShellVariables, depth: int) -> ExpandedWord:
    """The text after `:-`."""
    command = next(iter(simple_commands(f'"{text}"' if '"' not in text else text)), None)
    parts = command.words[0].parts if command and len(command.words) == 1 else []
    return joined_word([_piece(p, known, depth + 1) for p in parts], "") if parts else ExpandedWord(text)


def _computed(part: WordPart, known: ShellVariables) -> ExpandedWord:
    """`$((A * 2))` and `$(expr 16 / 4)`; any other substitution stays as it is written."""
    written = f"$(({part.text}))" if part.kind == "arithmetic" else f"$({part.text})"
    text: str | None = part.text
    if part.kind == "substitution":
        found = _EXPR.fullmatch(part.text.strip())
        text = found[1].replace("\\*", "*") if found else None
    value = None if text is None or len(text) > LONGEST_SUM else _integer(re.sub(r"[${}]", " ", text), known)
    return ExpandedWord(written, (written,)) if value is None else ExpandedWord(str(value))


def _integer(text: str, known: ShellVariables) -> int | None:
    """The value of an expression of integers and variables; None where there is none."""
    tokens: list[str] = []
    at = 0
    while text[at:].strip():
        found = _TOKENS.match(text, at)
        if found is None:
            return None
        token = found[1] or found[3]
        if found[2]:
            token = joined_word(known.texts.get(found[2], [])).text.strip()
            if not re.fullmatch(r"\d{1,15}", token):
                return None
        tokens.append(token)
        at = found.end()
    value = _sum(tokens, 0)
    return value if not tokens else None


def _sum(tokens: list[str], depth: int) -> int | None:
    total = _product(tokens, depth)
    while total is not None and tokens[:1] in (["+"], ["-"]):
        sign = tokens.pop(0)
        right = _product(tokens, depth)
        if right is None:
            return None
        total = total + right if sign == "+" else total - right
    return total


def _product(tokens: list[str], depth: int) -> int | None:
    value = _factor(tokens, depth)
    while value is not None and tokens[:1] in (["*"], ["/"], ["%"]):
        sign = tokens.pop(0)
        right = _factor(tokens, depth)
        if right is None or (sign != "*" and right == 0):
            return None
        if sign == "*":
            value *= right
        elif sign == "/":
            value //= right
        else:
            value %= right
    return value


def _factor(tokens: list[str], depth: int) -> int | None:
    if not tokens or depth > 20:
        return None
    token = tokens.pop(0)
    if token == "(":
        value = _sum(tokens, depth + 1)
        return value if tokens and tokens.pop(0) == ")" else None
    return int(token) if token.isdigit() else None
