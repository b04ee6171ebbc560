"""scripts/list_texts.py: every command has its page in the listing, and messages are found with their parts."""

from pathlib import Path

from megaswift.cli import COMMANDS
from scripts.list_texts import help_pages, listing, messages


def test_every_command_has_a_page() -> None:
    pages = dict(help_pages())
    assert {f"megaswift {name} --help" for name in COMMANDS} <= pages.keys() and all(pages.values())
    assert "--verify" in pages["megaswift checkpoint ls --help"] and "--lr" in pages["megaswift sft --help"]


def test_messages_are_listed_with_their_expressions(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f(n):\n    raise DataError(Problem(f'row {n}', 'is empty' if n else 'is ' + 'short', fix))\n")
    assert [text for _, text in messages(file)] == ["Problem: row {n} | is empty / is short"]


def test_the_listing_has_rules_and_errors() -> None:
    lines = list(listing())
    assert any(line.startswith("megaswift/config/rules.py:") and "evaluation data" in line for line in lines)
    assert sum(line.startswith("megaswift/") for line in lines) > 900
