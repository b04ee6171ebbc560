"""The pictures of the tutorials, from runs of their commands: python -m tests.tutorial_pictures draws them all."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.browser import picture
from tests.sources import ROOT
from tests.test_tutorials import PAGES, make_checkout, run_page

IMAGES = ROOT / "docs/images"
WIDTH = 1100
NO_PLACE = """
const line = document.querySelector(".sub");
line.textContent = line.textContent.replace(/ · \\/.*/, "");
"""
"""Leaves out the folder of the machine that drew the picture."""
FROM = """
const first = [...document.querySelectorAll("h2")].find((heading) => heading.textContent.startsWith("FIRST"));
if (first.parentElement.id === "completions") first.parentElement.replaceWith(...first.parentElement.children);
while (first.previousElementSibling) first.previousElementSibling.remove();
"""
"""Leaves out what stands before a heading."""
STEP_4 = """
const slider = document.querySelector("[name=step]");
slider.value = 3;
slider.dispatchEvent(new Event("input"));
"""


@dataclass(frozen=True)
class Picture:
    """The top of a page that a tutorial's commands write."""

    name: str
    tutorial: str
    page: str
    height: int
    script: str


PICTURES = (
    Picture("samples", "lora", "samples.html", 775, FROM.replace("FIRST", "tokens per sample")),
    Picture("lora-report", "lora", "lora-out/report.html", 1010, NO_PLACE),
    Picture("grpo-report", "grpo", "grpo-out/report.html", 1010, NO_PLACE),
    Picture("grpo-completions", "grpo", "grpo-out/report.html", 640, STEP_4 + FROM.replace("FIRST", "Completions")),
    Picture("cluster-report", "cluster", "cluster-out/report.html", 855, FROM.replace("FIRST", "The run")),
)


def main(folder: Path) -> None:
    """Runs the tutorials in a folder, and draws."""
    for tutorial in dict.fromkeys(wanted.tutorial for wanted in PICTURES):
        run_page(next(page for page in PAGES if page.stem == tutorial), folder)
    for wanted in PICTURES:
        picture(folder / wanted.page, IMAGES / f"{wanted.name}.png", WIDTH, wanted.height, wanted.script)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(make_checkout(Path(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(make_checkout(Path(made)))
