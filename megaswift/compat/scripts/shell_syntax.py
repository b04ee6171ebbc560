"""Splits the text of a shell script into simple commands, whose words are not yet expanded.

Owns quoting, comments, joined lines, here-documents, redirections and arrays. Values of variables are
`shell_words.py`'s. Nothing is run, and the time is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

NAME = re.compile(r"[A-Za-z_]\w*")
ARRAY = re.compile(r"([A-Za-z_]\w*)\+?=")
SPECIAL = re.compile(r"[0-9@*#?$!-]")
BLANK = " \t\r"
END = ";&|()\n"
JOINED = re.compile(r"\\[ \t]*\r?\n|\\[ \t]+#[^\n]*(?:\n|$)|\\#[^\n]{0,999}\n(?=[ \t]*-)")
"""A line that goes on. Guides print a comment behind the backslash, which a shell would not read so."""
JOINED_IN_WORD = re.compile(r"\\\r?\n|\\[ \t]{0,99}#[^\n]{0,999}\n(?=[ \t]*-)")
"""The same directly after a word: before a line that begins with an option, so that `a\\ #b` stays a word."""
DEEPEST = 40
"""Substitutions inside substitutions."""


@dataclass(frozen=True)
class WordPart:
    """A piece of a word: text, or an expansion for the shell."""

    kind: str
    """text | variable (`$X`, `${...}`) | substitution (`$(...)`, backticks) | arithmetic."""
    text: str
    quoted: bool


@dataclass
class UnexpandedWord:
    """One word; `items` where it assigns an array: `ARGS=(a b)`."""

    parts: list[WordPart] = field(default_factory=list)
    items: list[UnexpandedWord] | None = None

    @property
    def literal(self) -> str | None:
        """The text of a word without quotes and expansions; None for any other."""
        plain = all(p.kind == "text" and not p.quoted for p in self.parts)
        return "".join(p.text for p in self.parts) if plain else None


@dataclass(frozen=True)
class SimpleCommand:
    """The words of one command and the line where it begins."""

    line: int
    words: tuple[UnexpandedWord, ...]
    before: str = ""
    """The separators between the command before and this one, without blanks: `;`, `&&` and a line break, `()`."""
    after: str = ""


def simple_commands(text: str, first_line: int = 1) -> Iterator[SimpleCommand]:
    """The commands of a script in the order of the text."""
    return _ShellReader(text, first_line).commands()


class _ShellReader:
    def __init__(self, text: str, first_line: int) -> None:
        self.text = text
        self.at = 0
        self.first_line = first_line
        self.counted = 0
        self.lines = 0
        self.documents: list[tuple[str, bool]] = []

    def commands(self) -> Iterator[SimpleCommand]:
        words: list[UnexpandedWord] = []
        line = 0
        before = ""
        separators = ""
        complete: SimpleCommand | None = None
        while self.at < len(self.text):
            if self._skip_blank(bool(words)):
                continue
            char = self.text[self.at]
            if char in END and not self.text.startswith("&>", self.at):
                self.at += 1
                if words:
                    complete = SimpleCommand(line, tuple(words), before)
                    words = []
                    separators = ""
                separators += char
                if char == "\n":
                    self._skip_documents()
                continue
            if self._skip_redirection():
                continue
            if not words:
                if complete is not None:
                    yield replace(complete, after=separators)
                line = self._line()
                before = separators
                separators = ""
                complete = None
            words.append(self._word())
        if words:
            complete = SimpleCommand(line, tuple(words), before)
        if complete is not None:
            yield replace(complete, after=separators)

    def _line(self) -> int:
        self.lines += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.first_line + self.lines

    def _skip_blank(self, inside: bool) -> bool:
        """Blanks, a joined line, or a comment; a comment between joined lines does not end a command."""
        start = self.at
        joined = False
        while self.at < len(self.text):
            if self.text[self.at] in BLANK:
                self.at += 1
            elif found := JOINED.match(self.text, self.at):
                self.at = found.end()
                joined = True
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end + (joined and inside)
            else:
                break
        return self.at > start

    def _skip_redirection(self) -> bool:
        found = re.compile(r"\d*(<<<|<<-?|&?>{1,2}[&|]?|<&?)").match(self.text, self.at)
        if found is None:
            return False
        self.at = found.end()
        while self.at < len(self.text) and self.text[self.at] in BLANK:
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] not in END:
            target = self._word()
            if found[1] in ("<<", "<<-"):
                self.documents.append(("".join(p.text for p in target.parts), found[1] == "<<-"))
        return True

    def _skip_documents(self) -> None:
        """The bodies of here-documents, which begin on the next line."""
        for name, tabs in self.documents:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = end + 1
                if (line.lstrip("\t") if tabs else line).rstrip("\r") == name:
                    break
        self.documents = []

    def _word(self) -> UnexpandedWord:
        word = UnexpandedWord()
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "(" and word.literal and ARRAY.fullmatch(word.literal):
                word.items = self._array()
                break
            if char in BLANK + END + "<>":
                break
            if (found := JOINED_IN_WORD.match(self.text, self.at)) is not None:
                self.at = found.end()
                if "#" in found[0]:
                    break
            elif char == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                word.parts.append(WordPart("text", self.text[self.at + 1 : end], True))
                self.at = end + 1
            elif char == '"':
                self._double_quoted(word)
            elif char == "\\":
                word.parts.append(WordPart("text", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif char in "$`":
                word.parts.append(self._expansion(False))
            else:
                found = re.compile(r"[^ \t\r;&|()\n<>'\"\\$`]+").match(self.text, self.at)
                assert found is not None, "every other character was handled above"
                word.parts.append(WordPart("text", found[0], False))
                self.at = found.end()
        return word

    def _array(self) -> list[UnexpandedWord]:
        self.at += 1
        items: list[UnexpandedWord] = []
        while self.at < len(self.text):
            if self._skip_blank(True):
                continue
            char = self.text[self.at]
            if char == ")":
                self.at += 1
                break
            if char in END + "<>":
                self.at += 1
            else:
                items.append(self._word())
        return items

    def _double_quoted(self, word: UnexpandedWord) -> None:
        self.at += 1
        word.parts.append(WordPart("text", "", True))  # "" is a word
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                escaped = self.text[self.at + 1]
                word.parts.append(WordPart("text", "" if escaped == "\n" else escaped, True))
                self.at += 2
            elif char in "$`":
                word.parts.append(self._expansion(True))
            else:
                found = re.compile(r'\\|[^"\\$`]+').match(self.text, self.at)
                assert found is not None, "every other character was handled above"
                word.parts.append(WordPart("text", found[0], True))
                self.at = found.end()
        self.at += 1

    def _expansion(self, quoted: bool) -> WordPart:
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            end = len(self.text) if end < 0 else end
            part = WordPart("substitution", self.text[self.at + 1 : end], quoted)
            self.at = end + 1
            return part
        for opening, closing, kind in (
            ("$((", "))", "arithmetic"),
            ("$(", ")", "substitution"),
            ("${", "}", "variable"),
        ):
            if self.text.startswith(opening, self.at):
                return WordPart(kind, self._balanced(opening, closing), quoted)
        found = NAME.match(self.text, self.at + 1) or SPECIAL.match(self.text, self.at + 1)
        if found is None:
            self.at += 1
            return WordPart("text", "$", quoted)
        self.at = found.end()
        return WordPart("variable", found[0], quoted)

    def _balanced(self, opening: str, closing: str) -> str:
        """The text between two brackets, with those inside it; quotes hide brackets."""
        start = self.at = self.at + len(opening)
        depth = 1
        opens = opening[-1]
        closes = closing[-1]
        depth = len(closing) if opening == "$((" else depth
        while self.at < len(self.text) and depth:
            found = re.compile(r"'[^']*'|\\.|[^'\\(){}]+|[(){}'\\]", re.DOTALL).match(self.text, self.at)
            assert found is not None, "any character matches"
            depth += (found[0] == opens) - (found[0] == closes)
            self.at = found.end()
        return self.text[start : self.at - len(closing) if not depth else self.at]
