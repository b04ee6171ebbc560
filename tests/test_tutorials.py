"""Tutorials can be pasted from top to bottom: their commands run, in the order of the page, and print what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.process]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INSTALLED = re.compile(r"^(bash scripts/quickstart\.sh|source \.venv/bin/activate)\n", re.MULTILINE)
"""Lines that the test has run in another way: an installation, and the quickstart, which has a test of its own."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkout after the quickstart."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name in ("scripts", "configs", "megaswift", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    environment = Path(sys.executable).parents[1]
    command = [
        "bash",
        "scripts/quickstart.sh",
        "--env",
        str(environment),
        "--output",
        str(folder / "quickstart-output"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900, stdout=subprocess.DEVNULL)
    return folder


def pasted(page: str) -> str:
    """All commands of a page as one script."""
    text = (ROOT / "docs/tutorials" / page).read_text(encoding="utf-8")
    blocks = [body for language, body in BLOCK.findall(text) if language == "bash"]
    assert len(blocks) > 3
    return "set -eum -o pipefail\n" + INSTALLED.sub("", "".join(blocks))


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs/tutorials").glob("*.md")))
def test_the_page_runs(page: str, checkout: Path, tmp_path: Path) -> None:
    if "zh-CN" in page:
        pytest.skip("has the commands of the English page, which another test compares")
    folder = shutil.copytree(checkout, tmp_path / "page", symlinks=True)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    log = tmp_path / "output.txt"
    with log.open("w") as output:  # a pipe would stay open as long as a server that the page starts
        done = subprocess.run(
            ["bash", "-c", pasted(page)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
        )
    told = log.read_text(encoding="utf-8")
    assert done.returncode == 0, told[-6000:]
    assert len(promised(page)) > 0
    for line in promised(page):
        assert re.search(line, told), line


def promised(page: str) -> list[str]:
    """Some of the lines that a page shows, numbers aside."""
    text = (ROOT / "docs/tutorials" / page).read_text(encoding="utf-8")
    shown = [line for language, body in BLOCK.findall(text) if language == "text" for line in body.splitlines()]
    lines = [line for line in shown if line.startswith(("megaswift: wrote", "megaswift: exported", "megaswift: next"))]
    return [re.escape(line) for line in lines]
