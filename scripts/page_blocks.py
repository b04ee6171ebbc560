"""Blocks of pages that scripts write, between two marks."""

from __future__ import annotations


def replaced(text: str, name: str, block: str, script: str) -> str:
    """Return a page with another block.

    Args:
        text: The page.
        name: The name of the block.
        block: What comes between its marks.
        script: The script that writes it, as the first mark says.
    """
    begin = f"<!-- {name}: scripts/{script} writes this -->"
    end = f"<!-- end of {name} -->"
    assert begin in text and end in text, f"the page has no place for {name}"
    return text[: text.index(begin) + len(begin)] + f"\n\n{block}\n\n" + text[text.index(end) :]
