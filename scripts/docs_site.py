"""Hooks of mkdocs (mkdocs.yml): what the site shows besides the text of docs/.

The tables of options are written from their declarations, in place of a comment. A link to a file of the repository
outside docs/ becomes that file's path, because the site has no address of a repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megaswift import deploy, export, infer, sample  # noqa: E402
from megaswift import eval as evaluate  # noqa: E402
from megaswift.config.help import default_text  # noqa: E402
from megaswift.config.sections import TRAINING  # noqa: E402
from megaswift.options.option import Option  # noqa: E402

LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#]+)(#[^)]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LANGUAGE_LINE = re.compile(r"^(English \| \[简体中文\]|\[English\]).*\n+", re.MULTILINE)
"""The line of a page that leads to its other language: the site has a menu for that."""
INLINE = re.compile(r"(?<!<pre>)(?<!</span>)<code>([^<]*--[^<]*)</code>")
MARKED = '<span class="option">{}</span>'
OPTION = re.compile(r"(?<![\w-])--[\w-]+")
COMMANDS = {"infer": infer, "deploy": deploy, "export": export, "eval": evaluate, "sample": sample}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in the tables of options, and replace links that leave docs/."""
    for comment, write in TABLES.items():
        if comment in markdown:
            markdown = markdown.replace(comment, "\n".join(write()))
    folder = (ROOT / "docs" / page.file.src_uri).parent
    parts = FENCE.split(LANGUAGE_LINE.sub("", markdown, count=1))
    return "".join(part if part.startswith("```") else LINK.sub(lambda m: _link(m, folder), part) for part in parts)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Mark names of options, which a browser would break after their hyphens."""
    return INLINE.sub(_marked, html)


def _marked(match: re.Match[str]) -> str:
    if OPTION.fullmatch(match[1]):
        return MARKED.format(match[0])
    return f"<code>{OPTION.sub(lambda name: MARKED.format(name[0]), match[1])}</code>"


def _link(match: re.Match[str], folder: Path) -> str:
    target = (folder / match[2]).resolve()
    if target.is_relative_to(ROOT / "docs") or not target.exists():
        return match[0]
    path = f"`{target.relative_to(ROOT)}`"
    return path if match[1].strip("`") == path.strip("`") else f"{match[1]} ({path})"


def training_options() -> Iterator[str]:
    """Yield a table of options for each section of a training configuration."""
    for heading, cls in TRAINING.sections.items():
        title, _, note = (cls.__doc__ or heading).strip().partition("\n\n")
        yield f"## {heading}: {title}\n"
        if note:
            yield " ".join(note.split()) + "\n"
        yield from _table(option for option in TRAINING.options.values() if option.section == heading)


def inference_options() -> Iterator[str]:
    """Yield a table of options for each command of inference."""
    for command, module in COMMANDS.items():
        yield f"## megaswift {command}\n"
        yield from _table(module.COMMAND.table.options.values())


def _table(options: Iterable[Option]) -> Iterator[str]:
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for option in options:
        choices = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
        aliases = f" Also {', '.join(f'`--{alias}`' for alias in option.aliases)}." if option.aliases else ""
        tasks = option.details.get("tasks", ())
        only = f" Tasks: {', '.join(tasks)}." if tasks else ""
        cells = (f"`--{option.name}`", default_text(option, option.default), f"{option.help}.{choices}{aliases}{only}")
        yield f"| {' | '.join(cell.replace('|', '&#124;').replace('<', '&lt;') for cell in cells)} |"
    yield ""


TABLES = {"<!-- training options -->": training_options, "<!-- inference options -->": inference_options}
"""Comment of a page -> what replaces it."""
