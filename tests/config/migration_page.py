"""The tables of docs/migration.md as the code has them. `python -m tests.config.migration_page` writes them into it."""

from __future__ import annotations

import re

from megaswift.config.differing_toolkit_defaults import MEGATRON_SWIFT, PAGE, SWIFT, TRL, differing_default_table_rows
from megaswift.config.foreign_options import NAMES_ELSEWHERE, PRECISIONS, VALUES_ELSEWHERE
from megaswift.config.inference_other_names import HINTS_OF, NEUTRAL_OF, VALUES_ELSEWHERE_OF_INFERENCE
from megaswift.config.neutral_options import NEUTRAL
from megaswift.config.translated_options import RENAMED, SWITCHES, TASK_SPELLINGS
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
    values = [(f"`{option}: {value}`", advice) for (option, value), advice in sorted(VALUES_ELSEWHERE.items())]
    neutral = [
        (f"`{name}`", ", ".join(option.values) or "any value", option.reason)
        for name, option in sorted(NEUTRAL.items())
    ]
    translated = [(f"`{name}`", "`task`") for name in TASK_SPELLINGS]
    translated += [(f"`{name}`", f"`{option}`") for name, option in sorted(RENAMED.items())]
    translated += [(f"`{name}: true`", f"`{option}: {value}`") for name, (option, value) in sorted(SWITCHES.items())]
    translated += [(f"`{name}: true`", f"`torch_dtype: {dtype}`") for name, dtype in PRECISIONS.items()]
    found = {toolkit: rows(DEFAULTS, differing_default_table_rows(toolkit)) for toolkit in (SWIFT, MEGATRON_SWIFT, TRL)}
    found |= {"neutral": rows(("option", "values", "why"), neutral), "translated": rows(("there", "here"), translated)}
    found["inference neutral"] = rows(
        ("command", "option", "values", "why"),
        [
            (command, f"`{name}`", ", ".join(option.values) or "any value", option.reason)
            for command, table in NEUTRAL_OF.items()
            for name, option in sorted(table.items())
        ],
    )
    hints = [(c, f"`{name}`", text) for c, table in HINTS_OF.items() for name, text in sorted(table.items())]
    answers = [("all", f"`{name}: {value}`", text) for (name, value), text in VALUES_ELSEWHERE_OF_INFERENCE.items()]
    found["inference names"] = rows(("command", "there", "here"), [*hints, *answers])
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
