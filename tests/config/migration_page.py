"""The tables of docs/migration.md as the code has them. `python -m tests.config.migration_page` writes them into it."""

from __future__ import annotations

import re

from megaswift.config.differing_toolkit_defaults import MEGATRON_SWIFT, PAGE, SWIFT, TRL, differing_default_table_rows
from megaswift.config.foreign_options import NAMES_ELSEWHERE, PRECISIONS, VALUES_ELSEWHERE, foreign_option_advice
from megaswift.config.sections import NAMES
from tests.sources import ROOT

DEFAULTS = ("option", "there", "here", "where")
NAMES_HEAD = ("name or value there", "here")


def rows(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, tuple("---" for _ in head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables() -> dict[str, str]:
    """Each table by the name in its marks."""
    names = [(f"`{name}`", advice) for name, advice in sorted(NAMES_ELSEWHERE.items())]
    names += [(f"`{name}: true`", foreign_option_advice(name, "true", NAMES)) for name in PRECISIONS]
    values = [(f"`{option}: {value}`", advice) for (option, value), advice in sorted(VALUES_ELSEWHERE.items())]
    found = {toolkit: rows(DEFAULTS, differing_default_table_rows(toolkit)) for toolkit in (SWIFT, MEGATRON_SWIFT, TRL)}
    return found | {"names": rows(NAMES_HEAD, [*names, *values])}


def written(text: str) -> str:
    """The page with its tables as the code has them."""
    for name, body in tables().items():
        mark = re.escape(f"<!-- {name} -->")
        text, count = re.subn(
            rf"({mark}\n).*?(\n<!-- end -->)", lambda m, b=body: m[1] + b + m[2], text, flags=re.DOTALL
        )
        assert count == 1, f"{PAGE} has no place for {name}"
    return text


if __name__ == "__main__":
    page = ROOT / PAGE
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
