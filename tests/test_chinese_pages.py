"""The Chinese pages say what the English ones say: the same sections, commands, tables, options and links, in the same
order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sources import ROOT

PAGES = {
    "README.md": "README.zh-CN.md",
    "docs/migrating.md": "docs/migrating.zh-CN.md",
    "docs/troubleshooting.md": "docs/troubleshooting.zh-CN.md",
    "docs/launch.md": "docs/launch.zh-CN.md",
    "docs/index.md": "docs/index.zh-CN.md",
    "docs/commands.md": "docs/commands.zh-CN.md",
    "docs/features.md": "docs/features.zh-CN.md",
    "docs/rl.md": "docs/rl.zh-CN.md",
    "docs/rl_losses.md": "docs/rl_losses.zh-CN.md",
    "docs/inference.md": "docs/inference.zh-CN.md",
    "docs/layouts.md": "docs/layouts.zh-CN.md",
    "docs/memory.md": "docs/memory.zh-CN.md",
    "docs/lora.md": "docs/lora.zh-CN.md",
    "docs/training.md": "docs/training.zh-CN.md",
    "docs/data.md": "docs/data.zh-CN.md",
    "docs/install.md": "docs/install.zh-CN.md",
}
LINK = re.compile(r"\]\((?:docs/)?([\w-]+)\.md[)#]")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- [\w -]+ -->\n.*?<!-- end -->", re.DOTALL)
NAMES_OF_PRODUCTS = {
    "megaswift",
    "ms-swift",
    "TRL",
    "transformers",
    "Megatron-LM",
    "LLaMA-Factory",
    "LoRA",
    "QLoRA",
    "DoRA",
}
"""Headings that are the same in both languages."""


@pytest.mark.parametrize("page", PAGES.values())
def test_links_lead_to_chinese_pages(page: str) -> None:
    """Where there are any. The first lines name the English page, and tables that the code writes stand there alone."""
    text = GENERATED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if not line.startswith(("English | ", "[English]"))]
    linked = {name for line in lines for name in LINK.findall(line)}
    assert sorted(name for name in linked if (ROOT / f"docs/{name}.zh-CN.md").exists()) == []


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Blocks of code by language: their lines without comments; of a tree the names alone."""
    found = []
    for language, body in BLOCK.findall(text):
        lines = [re.split(r"(?:^|\s)#(?=\s)", line)[0].rstrip() for line in body.splitlines()]
        if not language:
            lines = [re.split(r"(?<=\S) {2,}|(?<=\S) (?=[^\x00-\x7f])", line)[0] for line in lines]
            lines = [line for line in lines if line and not line.startswith(" " * 10)]
        found.append((language, [line for line in lines if line]))
    return found


def sections(text: str) -> list[tuple[str, str]]:
    """Headings with their level, and the text below each."""
    plain = BLOCK.sub("", text)
    parts = re.split(r"^(#+ .*)$", plain, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[str]:
    """The first cells of all tables."""
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]


def links(text: str) -> list[str]:
    """Targets, those of a Chinese page as the English one's, without headings."""
    return sorted(
        target.partition("#")[0].replace(".zh-CN.md", ".md")
        for target in re.findall(r"\]\(([^)]+)\)", text)
        if not target.startswith("#")
    )


def code(text: str) -> list[str]:
    """Inline code, in any order: sentences are built differently."""
    return sorted(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text))


def read(page: str) -> str:
    """A page without its generated tables of other toolkits, for which the Chinese one links to the English one."""
    return GENERATED.sub("", (ROOT / page).read_text(encoding="utf-8"))


def differences(english: str, chinese: str) -> list[str]:
    """What the two do not share."""
    found = []
    if blocks(english) != blocks(chinese):
        pairs = zip(blocks(english), blocks(chinese), strict=False)
        found.append(f"code: {next((pair for pair in pairs if pair[0] != pair[1]), 'another number of blocks')}")
    ours, theirs = sections(english), sections(chinese)
    if [h.split(" ")[0] for h, _ in ours] != [h.split(" ")[0] for h, _ in theirs]:
        return [*found, "sections"]
    for (heading, text), (title, translated) in zip(ours, theirs, strict=True):
        name = title.lstrip("# ")
        if name not in NAMES_OF_PRODUCTS and not CHINESE.search(name):
            found.append(f"{heading}: the heading is not Chinese")
        if len(rows(text)) != len(rows(translated)):
            found.append(f"{heading}: {len(rows(text))} and {len(rows(translated))} lines of tables")
        if links(text) != links(translated):
            found.append(f"{heading}: links {set(links(text)) ^ set(links(translated))}")
        if code(text) != code(translated):
            found.append(f"{heading}: code {set(code(text)) ^ set(code(translated))}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_both_pages_say_the_same(page: str) -> None:
    english, chinese = read(page), read(PAGES[page])
    assert differences(english, chinese) == []
    assert len(blocks(english)) + len(rows(english)) >= 2 and len(CHINESE.findall(chinese)) > 250


@pytest.mark.parametrize("page", PAGES)
def test_each_page_links_to_the_other_in_its_first_lines(page: str) -> None:
    for own, other in ((page, PAGES[page]), (PAGES[page], page)):
        assert f"]({Path(other).name})" in "\n".join(read(own).splitlines()[:5])


def test_prose_is_chinese() -> None:
    """No English sentence is left outside of code, links and generated tables."""
    for page in PAGES.values():
        text = re.sub(r"<!--.*?-->.*?<!-- end.*?-->", "", BLOCK.sub("", read(page)), flags=re.DOTALL)
        text = re.sub(r"`[^`]*`|\([^)]*\)", "", text)
        assert re.findall(r"[a-z]{2,} [a-z]{2,} [a-z]{2,} [a-z]{2,}", text) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("megaswift doctor\n", "megaswift doctors\n"),
        ("megaswift convert verify out/hf latest-hf\n", ""),
        ("# Commands at a glance\n", ""),
        ("[migrating.md](migrating.md)", "migrating.md"),
        ("`data.jsonl`", "`rows.jsonl`"),
    ],
)
def test_a_difference_is_found(old: str, new: str) -> None:
    english, chinese = read("docs/commands.md"), read("docs/commands.zh-CN.md")
    assert old in english and differences(english, chinese) == []
    assert len(differences(english.replace(old, new), chinese)) >= 1


def test_a_missing_row_is_found() -> None:
    english, chinese = read("docs/features.md"), read("docs/features.zh-CN.md")
    row = "| checkpoints that can be resumed on another layout | yes |\n"
    assert row in english and differences(english, chinese) == []
    assert len(differences(english.replace(row, ""), chinese)) == 1
