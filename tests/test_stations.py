"""docs/architecture.md follows a run through the source: the stations of a step, the paths of a batch, an option and a
weight, and a tree with the layer of every folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.sources import ROOT
from tests.test_layers import LAYERS, NO_TORCH, TOP
from tests.trainers.inputs import write_inputs

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
DECLARATIONS = {"engine/options/optimizer.py", "families/qwen3.py"}
"""Files of the paths that only declare: they are read when they are imported and have no function that a run calls."""
TRAINERS = 8
"""Files of trainers/ that a step may enter at most."""


def files_of_section(heading: str) -> list[str]:
    """The files that a section's numbered lists name, in order."""
    section = PAGE.split(f"### {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]
    return re.findall(r"`([\w/]+\.py)`", section[section.index("1. ") :])


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[list[str]]]:
    """The files that a run of five steps enters: until its first step, and in each step."""
    folder = tmp_path_factory.mktemp("stations")
    words = [*write_inputs(folder, "1e-3"), "--output_dir", str(folder / "run"), "--max_steps", "5"]
    alone = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests/stations.py", folder / "trace.json", *words, "--dataloader_num_workers", "0"],
        env=os.environ | alone,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    return found["start"], found["steps"]


@pytest.mark.process
def test_the_stations_are_those_of_a_steady_step(trace: tuple[list[str], list[list[str]]]) -> None:
    steps = trace[1]
    assert len(steps) == 5 and steps[1] == steps[2] == steps[3]
    assert files_of_section("Stations of one SFT step") == steps[2]
    assert len([name for name in steps[2] if name.startswith("trainers/")]) <= TRAINERS


@pytest.mark.process
def test_a_run_goes_through_the_files_of_the_paths(trace: tuple[list[str], list[list[str]]]) -> None:
    start, steps = trace
    entered = DECLARATIONS.union(start, *steps)
    named = files_of_section("One batch, one option, one weight")
    assert len(named) > 15 and [name for name in named if name not in entered] == []


def test_the_tree_has_every_folder_with_its_layer() -> None:
    tree = re.search(r"^megaswift/ .*?^```", PAGE, re.DOTALL | re.MULTILINE)
    assert tree is not None
    rows = re.findall(r"^  (\S+(?: \S+)*) +(\d)(\*?) +\S", tree[0], re.MULTILINE)
    drawn = {
        name.removesuffix("/").removesuffix(".py"): (int(level), bool(star))
        for names, level, star in rows
        for name in names.split()
        if name != "..."
    }
    packages = {file.parent.name for file in (ROOT / "megaswift").glob("*/__init__.py")}
    assert packages | set(LAYERS) <= set(drawn)
    assert [
        name for name, (level, star) in drawn.items() if (level, star) != (LAYERS.get(name, TOP), name in NO_TORCH)
    ] == []
