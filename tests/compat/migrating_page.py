"""The tables of docs/migrating.md and its Chinese page as the code has them. `python -m tests.compat.migrating_page`
writes them."""

from __future__ import annotations

import re

from megaswift.compat.defaults import (
    LLAMA_FACTORY,
    MEGATRON_LM,
    MEGATRON_SWIFT,
    PAGE,
    SWIFT,
    TRANSFORMERS,
    TRL,
    differing_default_table_rows,
)
from megaswift.compat.names.absent import UNSUPPORTED
from megaswift.compat.names.answers import NAMES_ELSEWHERE, PRECISIONS, VALUES_ELSEWHERE
from megaswift.compat.names.inference import (
    HINTS_OF,
    NEUTRAL_OF,
    VALUES_ELSEWHERE_OF_INFERENCE,
)
from megaswift.compat.names.megatron_lm import UNSUPPORTED_OF_MEGATRON
from megaswift.compat.names.neutral import NEUTRAL, NeutralOption
from megaswift.compat.translation import RENAMED, SWITCHES, TASK_SPELLINGS
from tests.sources import ROOT

CHINESE_PAGE = PAGE.replace(".md", ".zh-CN.md")
TOOLKITS = (SWIFT, MEGATRON_SWIFT, TRL, TRANSFORMERS, MEGATRON_LM, LLAMA_FACTORY)
CHINESE = {
    "option": "选项",
    "there": "原工具",
    "here": "megaswift",
    "command": "命令",
    "where": "适用范围",
    "values": "接受的取值",
    "why": "原因",
    "options": "选项",
    "instead": "替代办法",
    "name or value there": "原名称或取值",
}
"""Heads of columns. The cells are the program's own words and stay as it prints them."""
DEFAULTS = ("option", "there", "here", "where")
NAMES_HEAD = ("name or value there", "here")


def rows(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, tuple("---" for _ in head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _accepted(option: NeutralOption) -> str:
    other, value = option.true_with
    return (", ".join(option.values) or "any value") + (f"; true with `{other}: {value}`" if other else "")


def tables() -> dict[str, str]:
    """Each table by the name in its marks."""
    names = [(f"`{name}`", advice) for name, advice in sorted(NAMES_ELSEWHERE.items())]
    values = [(f"`{option}: {value}`", advice) for (option, value), advice in sorted(VALUES_ELSEWHERE.items())]
    neutral = [(f"`{name}`", _accepted(option), option.reason) for name, option in sorted(NEUTRAL.items())]
    translated = [(f"`{name}`", "`task`") for name in TASK_SPELLINGS]
    translated += [(f"`{name}`", f"`{option}`") for name, option in sorted(RENAMED.items())]
    translated += [(f"`{name}: true`", f"`{option}: {value}`") for name, (option, value) in sorted(SWITCHES.items())]
    translated += [(f"`{name}: true`", f"`torch_dtype: {dtype}`") for name, dtype in PRECISIONS.items()]
    found = {toolkit: rows(DEFAULTS, differing_default_table_rows(toolkit)) for toolkit in TOOLKITS}
    found |= {"neutral": rows(("option", "values", "why"), neutral), "translated": rows(("there", "here"), translated)}
    found["absent"] = rows(
        ("options", "values", "why", "instead"),
        [
            (
                ", ".join(f"`{n}`" for n in names.split()),
                ", ".join(filter(None, values)) or "any value",
                why,
                fix,
            )
            for names, values, why, fix in (*UNSUPPORTED, *UNSUPPORTED_OF_MEGATRON)
        ],
    )
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


def in_chinese(table: str) -> str:
    """A table with the heads of its columns in Chinese."""
    head, rest = table.split("\n", 1)
    names = [CHINESE[name.strip()] for name in head.strip("|").split("|")]
    return "| " + " | ".join(names) + " |\n" + rest


def written(text: str, chinese: bool = False) -> str:
    """The page with its tables as the code has them."""
    for name, body in tables().items():
        mark = re.escape(f"<!-- {name} -->")
        table = in_chinese(body) if chinese else body
        text, count = re.subn(
            rf"({mark}\n).*?(\n<!-- end -->)", lambda m, t=table: m[1] + t + m[2], text, flags=re.DOTALL
        )
        assert count == 1, f"the page has no place for {name}"
    return text


if __name__ == "__main__":
    for page in (PAGE, CHINESE_PAGE):
        path = ROOT / page
        path.write_text(written(path.read_text(encoding="utf-8"), page == CHINESE_PAGE), encoding="utf-8")
