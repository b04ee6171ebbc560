"""All texts that users may read, in one file: every command's `--help`, an entry that was there before left out, then
errors, warnings and other messages with their places. For reading from top to bottom; docs/glossary.md has the words.

    python scripts/list_user_visible_texts.py > texts.txt
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megaswift.cli import COMMANDS, main
from megaswift.options.tasks import TASKS

PACKAGE = Path(__file__).resolve().parents[1] / "megaswift"
SUBCOMMANDS = {
    "checkpoint": ("ls", "verify", "rm"),
    "convert": ("hf-to-megatron", "megatron-to-hf", "verify", "merge-lora"),
    "data": ("show",),
}
MESSAGES = frozenset(
    {
        *("Problem", "Finding", "IgnoredOption", "ConflictingOptions"),
        *("warn", "info", "print", "print_line", "print_result", "print_warning", "result"),
    }
)
"""Calls whose strings are messages, besides those of exception classes."""
LONG = 3
"""Words of a string that is listed wherever it is."""
PAGED = (*TASKS, "infer", "deploy", "export", "eval", "sample")
"""Commands whose `--help` is the first of two pages."""


def help_pages() -> Iterator[tuple[str, str]]:
    """(command line, its page) of every command and subcommand."""
    lines = [[], *([name] for name in COMMANDS), *([name, sub] for name, subs in SUBCOMMANDS.items() for sub in subs)]
    for words in lines:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):  # argparse exits after its page
            main([*words, "--help"])
            if words[0:1] and words[0] in PAGED:
                main([*words, "--help", "all"])
        yield " ".join(["megaswift", *words, "--help"]), out.getvalue()


def text_of(node: ast.expr) -> str:
    """A string literal, an f-string with its expressions in braces, the parts of a conditional; empty for others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (
            "{" + ast.unparse(v.value) + "}" if isinstance(v, ast.FormattedValue) else text_of(v) for v in node.values
        )
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (text_of(node.body), text_of(node.orelse))))
    return ""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each call in a source file whose strings users may read, and of every other string of three words
    or more: rows of tables, parts of messages."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    listed = docstrings(tree)
    for node in ast.walk(tree):  # outer nodes first
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            texts = [text_of(argument) for argument in (*node.args, *(k.value for k in node.keywords))]
            if name == "option":  # on the help pages
                listed |= nodes_within(node)
            if (name in MESSAGES or name.endswith("Error")) and any(texts):
                yield node.lineno, f"{name}: " + " | ".join(filter(None, texts))
                listed |= nodes_within(node)
        elif isinstance(node, ast.expr) and node not in listed and len((text := text_of(node)).split()) >= LONG:
            yield node.lineno, text
            listed |= nodes_within(node)


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """The strings that are statements."""
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def nodes_within(node: ast.AST) -> set[ast.AST]:
    """The node and all below it."""
    return {*ast.walk(node)}


def new_entries(page: str, printed: set[str]) -> str:
    """The page without the entries in `printed`, to which it adds the others. An entry is a line and the lines below it
    that are indented deeper than an option."""
    entries = re.split(r"\n(?! {3})", page)
    fresh = [entry for entry in entries if entry not in printed]
    printed.update(fresh)
    return "\n".join(fresh)


def listing() -> Iterator[str]:
    """The lines of the whole file."""
    printed: set[str] = set()
    for line, page in help_pages():
        yield from (f"$ {line}", new_entries(page, printed), "")
    for path in sorted(PACKAGE.rglob("*.py")):
        for number, text in sorted(messages(path)):
            yield f"{path.relative_to(PACKAGE.parent)}:{number}: {text}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in listing())
