"""scripts/list_user_visible_texts.py: every command has its page in the listing, and messages are found with their
parts."""

from pathlib import Path

import pytest

from megaswift.cli import COMMANDS
from scripts.list_user_visible_texts import help_pages, listing, messages, new_entries


def test_every_command_has_a_page() -> None:
    pages = dict(help_pages())
    assert {f"megaswift {name} --help" for name in COMMANDS} <= pages.keys() and all(pages.values())
    assert "--verify" in pages["megaswift checkpoint ls --help"] and "--fp8_recipe" in pages["megaswift sft --help"]


def test_messages_are_listed_with_their_expressions(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def f(n):\n    raise DataError(Problem(f'row {n}', 'is empty' if n else 'is ' + 'short', fix))\n")
    assert [text for _, text in messages(file)] == ["Problem: row {n} | is empty / is short"]


def test_other_strings_are_listed_once_and_docstrings_not(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        '"""Not for users at all."""\nRULES = (("lr", "is above 1, which diverges"),)\n'
        'x = option(1, "on the help page already")\nwarn(f"{n} rows are left" + " out of many")\ny = "two words"\n'
    )
    assert [text for _, text in sorted(messages(file))] == [
        "is above 1, which diverges",
        "warn: {n} rows are left out of many",
    ]


def test_an_entry_of_help_is_printed_once() -> None:
    printed: set[str] = set()
    page = "title\n  --lr 1   Learning rate\n           of the run\n  --tp 1   Ranks"
    assert new_entries(page, printed) == page
    other = "title b\n  --lr 1   Learning rate\n           of the run\n  --tp 2   Ranks"
    assert new_entries(other, printed) == "title b\n  --tp 2   Ranks"


@pytest.mark.wide
def test_the_listing_has_rules_and_errors() -> None:
    lines = list(listing())
    assert any(line.startswith("megaswift/data/options/checks.py:") and "evaluation data" in line for line in lines)
    assert sum(line.startswith("megaswift/") for line in lines) > 900
