"""The control flow of a shell script: its simple commands, and where conditions, loops, functions, subshells and lists
(`&&`, `||`) begin, branch and end.

Owns reserved words and separators. What variables have as values is `shell_variables.py`'s. Unfinished and wrong
nesting is closed, so that steps are always nested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megaswift.compat.scripts.shell_syntax import NAME, SimpleCommand, UnexpandedWord
from megaswift.errors import ConfigError, Problem

IF = "if"
CASE = "case"
LOOP = "loop"
GROUP = "group"
SUBSHELL = "subshell"
FUNCTION = "function"
LIST = "list"
ARITHMETIC = "arithmetic"
OPENING = {"if": (IF, "fi"), "case": (CASE, "esac"), "{": (GROUP, "}")} | dict.fromkeys(
    ("for", "while", "until", "select"), (LOOP, "done")
)
"""Reserved word -> kind, and the word that ends it."""
BRANCHES = ("then", "elif", "else")
RESERVED = (*OPENING, *BRANCHES, "fi", "esac", "done", "}", "do", "!", "time")
SURE = ("true", ":", "export", "declare", "local", "readonly", "typeset")
"""Commands after which `&&` goes on."""
DECLARES = SURE[2:]
READS = ("read", "mapfile", "readarray", "getopts", "let", "unset", "printf")
"""Commands that give variables values that only a run knows, or none."""
TESTS = ("[", "[[", "test")
DEEPEST = 60
MOST_WORK = 1 << 22
"""Names of variables that are looked at; functions count once for each step of the script."""
_SEPARATORS = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|()\n]")
_ASSIGNS = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=")
_COUNTS = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)([A-Za-z_]\w*)")
_DEFAULT = re.compile(r"([A-Za-z_]\w*):?=")


@dataclass
class ControlStep:
    """Where something begins, branches or ends, or a command."""

    step: str
    """open | branch | close | command."""
    kind: str = ""
    """What is opened or closed. For a branch: `then`, `elif`, `else`; for a case: `pattern` (`next pattern`: after
    `;&`) with `last pattern` before it where it is `*`. For a command: its kind where it is not an ordinary one."""
    command: SimpleCommand | None = None
    """Without reserved words."""
    names: tuple[str, ...] = ()
    """For a command: the variables that it sets; for `open`: those that are set before it closes, and for a function
    those that are set later in the script."""
    piped: bool = False
    """For `close`: a part of a pipeline, or in the background: the variables that it sets are lost."""
    tested: bool = False
    """For a list: it follows a test, and not a command that is meant to succeed."""


@dataclass
class _Open:
    kind: str
    closer: str
    piped: bool
    pattern: bool = False
    """For a case: patterns are read."""
    header: bool = False
    """For `for` and `select`: before `do`."""
    parentheses: int = 0
    operator: str = ""
    """The operator of a list."""


@dataclass
class _FlowReader:
    steps: list[ControlStep] = field(default_factory=list)
    stack: list[_Open] = field(default_factory=list)
    connector: str = ""
    """`&&`, `||` or `|` before the next command."""
    defines: bool = False
    """The next group is a function's body."""
    named: bool = False
    """The last command was one word, which `()` makes a function's name."""
    sure: bool = False
    """The last command always succeeds."""
    tests: bool = False
    pattern: str = "pattern"
    """How the next pattern of a case is reached: `next pattern` after `;&`."""
    functions: set[str] = field(default_factory=set)

    def read(self, commands: Sequence[SimpleCommand]) -> list[ControlStep]:
        for command in commands:
            self._separators(command.before)
            self._words(command)
        if commands:
            self._separators(commands[-1].after)
        while self.stack:
            self._close("")
        return self.steps

    def _top(self) -> _Open:
        return self.stack[-1] if self.stack else _Open("", "", False)

    def _separators(self, text: str) -> None:
        tokens = _SEPARATORS.findall(text)
        for i, token in enumerate(tokens):
            top = self._top()
            if top.kind == ARITHMETIC or (top.header and token != "\n" and token != ";"):
                top.parentheses += (token == "(") - (token == ")")
                if top.kind == ARITHMETIC and top.parentheses == 0:
                    self._close("))")
            elif token in "()":
                self._parenthesis(token, tokens[i + 1 : i + 2])
            elif token in ("&&", "||", "|", "|&"):
                self.connector = token
            elif not (token == "\n" and self.connector):
                self._end_of_list()
                if token in (";;", ";&", ";;&") and self._top().kind == CASE:
                    self._top().pattern = True
                    self.pattern = "pattern" if token == ";;" else "next pattern"

    def _parenthesis(self, token: str, following: list[str]) -> None:
        top = self._top()
        if top.kind == CASE and top.pattern:
            top.pattern = token == "("
            if token == ")":
                self.steps.append(ControlStep("branch", self.pattern))
        elif token == ")" and self.defines:
            pass
        elif token == ")":
            self._close(")")
        elif self.named and following == [")"]:
            self._define(self.steps.pop().command)
        elif following == ["("]:
            self._open(ARITHMETIC, "))")
            self.stack[-1].parentheses = 1
        else:
            self._open(FUNCTION if self.defines else SUBSHELL, ")")

    def _define(self, name: SimpleCommand | None) -> None:
        self.defines = True
        self.named = False
        self.functions.add((name.words[0].literal or "") if name else "")

    def _words(self, command: SimpleCommand) -> None:
        words = list(command.words)
        self.named = False
        while words and (literal := words[0].literal) in RESERVED and not self._reads_other_words(literal):
            words.pop(0)
            if literal in OPENING:
                words = self._opened(literal, words, command)
            elif literal in BRANCHES and self._innermost(IF):
                self.steps.append(ControlStep("branch", literal))
            elif literal == "do":
                self._end_of_list()
                self._top().header = False
            elif literal in ("fi", "esac", "done", "}"):
                self._close(literal, command.after if not words else "")
        top = self._top()
        if words and top.kind == CASE and top.pattern:
            if any(word.literal == "*" for word in words):
                self.steps.append(ControlStep("branch", "last pattern"))
            return
        if not words:
            return
        if words[0].literal == "function" and len(words) > 1:
            self._define(SimpleCommand(command.line, (words[1],)))
            if words := words[2:]:
                self._words(SimpleCommand(command.line, tuple(words), "", command.after))
            return
        self._command(SimpleCommand(command.line, tuple(words), "", command.after))

    def _reads_other_words(self, literal: str | None) -> bool:
        """Where reserved words are none: patterns of a case, arithmetic."""
        top = self._top()
        return (top.kind == CASE and top.pattern and literal != "esac") or top.kind == ARITHMETIC

    def _innermost(self, kind: str) -> bool:
        self._end_of_list()
        return self._top().kind == kind

    def _opened(self, literal: str, words: list[UnexpandedWord], command: SimpleCommand) -> list[UnexpandedWord]:
        """The words that are still to be read."""
        kind, closer = OPENING[literal]
        named = literal in ("for", "select")
        self._open(FUNCTION if kind == GROUP and self.defines else kind, closer)
        if kind == CASE:
            self.stack[-1].pattern = True
            self.pattern = "pattern"
            asked = [w for w in words[:1] if w.parts]
            self.steps.append(ControlStep("command", "case", SimpleCommand(command.line, tuple(asked))))
            return words[2:]
        if named:
            self.stack[-1].header = True
            name = (words[0].literal or "") if words else ""
            self.steps.append(ControlStep("command", "for", names=(name,) if NAME.fullmatch(name) else ()))
            return []
        return words

    def _command(self, command: SimpleCommand) -> None:
        first = command.words[0].literal
        calculates = self._top().kind == ARITHMETIC or self._top().header
        if not calculates:
            self._connect()
        names = tuple(_counted(command.words) if calculates else assigned_names(command.words))
        kind = "call" if first in self.functions else ""
        if calculates:
            kind = "arithmetic"
        self.steps.append(ControlStep("command", kind, command, names))
        self.named = len(command.words) == 1 and first is not None and command.after.startswith("()")
        plain = all(map(assigned_name, command.words)) or first in SURE
        self.sure = plain and all(p.kind != "substitution" for w in command.words for p in w.parts)
        self.tests = first in TESTS

    def _connect(self) -> None:
        """Opens a list where the command may be left out."""
        operator = self.connector
        self.connector = ""
        top = self._top()
        if operator == "||" or (operator == "&&" and top.kind == LIST and top.operator == "||"):
            self._end_of_list()
        if operator in ("&&", "||") and self._top().kind != LIST and not (operator == "&&" and self.sure):
            self._push(_Open(LIST, "", False, operator=operator))
            self.steps[-1].tested = self.tests

    def _open(self, kind: str, closer: str) -> None:
        piped = self.connector.startswith("|") and self.connector != "||"
        self._connect()
        self._push(_Open(kind, closer, piped))
        self.defines = self.named = False

    def _push(self, opened: _Open) -> None:
        if len(self.stack) >= DEEPEST:
            raise ConfigError(Problem("the script", f"nests conditions and loops more than {DEEPEST} deep"))
        self.stack.append(opened)
        self.steps.append(ControlStep("open", opened.kind))

    def _end_of_list(self) -> None:
        self.connector = ""
        if self._top().kind == LIST:
            self._pop("")

    def _close(self, closer: str, after: str = "") -> None:
        """Up to the innermost one that ends so; the end of the script closes any."""
        if closer and all(opened.closer != closer for opened in self.stack):
            return
        while self.stack and self._top().closer != closer:
            self._pop("")
        if self.stack:
            self._pop(after)
        self.sure = self.tests = False

    def _pop(self, after: str) -> None:
        following = _SEPARATORS.findall(after)[:1]
        opened = self.stack.pop()
        self.steps.append(ControlStep("close", opened.kind, piped=opened.piped or following in (["|"], ["&"], ["|&"])))


def control_steps(commands: Sequence[SimpleCommand]) -> list[ControlStep]:
    """The steps of a script, nested. ConfigError where they are nested too deep."""
    steps = _FlowReader().read(commands)
    last: dict[str, int] = {}
    by_functions: dict[str, None] = {}
    opened: list[tuple[ControlStep, dict[str, None]]] = []
    work = 0
    for i, step in enumerate(steps):
        if step.kind == "call":
            step.names = tuple(by_functions)
        if step.step == "open":
            opened.append((step, {}))
        elif step.step == "close":
            begin, inside = opened.pop()
            begin.names = tuple(inside)
            for names in (by_functions,) if step.kind == FUNCTION else [n for _, n in opened[-1:]]:
                names.update(inside)
        elif step.step == "command":
            last |= dict.fromkeys(step.names, i)
            for _, names in opened[-1:]:
                names.update(dict.fromkeys(step.names))
        if step.step == "open" and step.kind == FUNCTION:
            work += len(steps)
        work += len(step.names)
        if work > MOST_WORK:
            raise ConfigError(Problem("the script", "has too many functions and variables to be read"))
    for i, step in enumerate(steps):
        if step.step == "open" and step.kind == FUNCTION:
            step.names = tuple(name for name, place in last.items() if place > i)
    return steps


def assigned_names(words: Sequence[UnexpandedWord]) -> Iterator[str]:
    """The variables that a command sets."""
    for word in words:
        yield from (m[1] for p in word.parts if p.kind == "variable" and (m := _DEFAULT.match(p.text)))
    rest = list(words)
    names = []
    while rest and (name := assigned_name(rest[0])):
        names.append(name)
        rest.pop(0)
    if not rest:
        yield from names
    elif rest[0].literal in DECLARES:
        yield from filter(None, map(assigned_name, rest[1:]))
    elif rest[0].literal in READS:
        yield from read_names(rest)


def assigned_name(word: UnexpandedWord) -> str:
    """The variable of `X=1`, `X+=1`, `X[0]=1`; empty for any other word."""
    first = word.parts[0] if word.parts else None
    if first is None or first.kind != "text" or first.quoted:
        return ""
    found = _ASSIGNS.match("".join(p.text for p in word.parts))
    return found[1] if found else ""


def read_names(words: Sequence[UnexpandedWord]) -> Iterator[str]:
    """The variables of `read`, `unset` and their kin."""
    if words[0].literal == "let":
        yield from _counted(words[1:])
    elif words[0].literal != "printf":
        yield from (name for word in words[1:] if NAME.fullmatch(name := word.literal or ""))
    elif len(words) > 2 and words[1].literal == "-v" and NAME.fullmatch(name := words[2].literal or ""):
        yield name


def _counted(words: Sequence[UnexpandedWord]) -> Iterator[str]:
    """The variables that arithmetic sets."""
    for found in _COUNTS.finditer(" ".join(p.text for word in words for p in word.parts)):
        yield found[1] or found[2]
