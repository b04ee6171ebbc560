"""A page can be pasted from top to bottom: no two of its commands write to the same folder."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.sources import ROOT

PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md")])
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```[ ]*$", re.M | re.S)
"""A block of code with its language."""
SHELL = ("", "bash", "sh", "shell")
AGAIN = ("--overwrite_output_dir", "--resume_from_checkpoint", "--dry_run")
"""Options with which a command takes a folder that is there already."""
WRITES = re.compile(r"--(?:output_dir|output|result_path) (\S+)|merge[-_]lora(?:\.py)? \S+ \S+ (\S+)|to-hf \S+ (\S+)")
OTHERS = {"migrate"}
"""Commands whose output is a file that they replace."""


def written(page: str) -> list[str]:
    """The folders that the commands of a page write to, in order."""
    found = []
    for language, block in FENCE.findall(page):
        if language not in SHELL:
            continue
        for command in block.replace("\\\n", " ").splitlines():
            command = command.partition("  #")[0].strip()
            if command.startswith("#") or any(word in command for word in AGAIN) or OTHERS & {*command.split()}:
                continue
            found += [next(filter(None, groups)) for groups in WRITES.findall(command)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_folder_is_written_twice(page: Path) -> None:
    twice = [name for name, count in Counter(written(page.read_text())).items() if count > 1]
    assert not twice, f"{page.name}: {', '.join(twice)}"


def test_repeated_folders_are_seen() -> None:
    one = "```bash\nmegaswift sft --model M \\\n  --output_dir OUT\n```\n"
    page = f"{one}text\n```\nmegaswift sft --output_dir OUT  # another\n```\n"
    assert written(page) == ["OUT", "OUT"]
    assert written("```\nmegaswift sft --output_dir OUT --resume_from_checkpoint latest\n```\n") == []
    assert written(f"```python\na = 1\n```\n{one}```python\nb = 2\n```\n{one}") == ["OUT", "OUT"]
    assert written("```\nmegaswift convert merge-lora M A MERGED\n```\n") == ["MERGED"]
