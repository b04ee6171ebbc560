"""Commands of the README and of the tutorials run in the order of the page, as pasted, and print what it shows.

The commands of other pages: tests/test_page_commands.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.process]
TUTORIALS = ROOT / "docs/tutorials"
PAGES = [ROOT / "README.md", *sorted(page for page in TUTORIALS.glob("*.md") if "zh-CN" not in page.name)]
"""A Chinese page has the commands of the English one (tests/test_chinese_pages.py)."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DONE = re.compile(
    r"^(git clone|bash scripts/(quickstart|test)\.sh|source \.venv/bin/activate|pip install -e) ?.*\n", re.MULTILINE
)
"""Lines that the test has run in another way: an installation (tests/test_wheel.py), the quickstart, which the fixture
runs, and all tests."""
ROWS_OF_THE_READER = 8
SCRIPT_OF_THE_READER = "swift sft --model DIR --dataset data.jsonl --train_type lora --lora_rank 8 --max_length 128\n"
CHANGING = re.compile(r"chatcmpl-\w+|[\d.,:e+-]*\d[\d.,:e+-]*")
"""Numbers and ids, which differ from run to run."""
STARTER = """\
set -eum -o pipefail
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
"""
"""As in a terminal, except that the first failure ends the page, with the servers that it has started."""


def make_checkout(folder: Path) -> Path:
    """A folder that looks like a checkout after the quickstart, with a model, data and a script of the reader's."""
    for name in ("scripts", "configs", "megaswift", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    command = ["bash", "scripts/quickstart.sh", "--env", sys.prefix, "--output", str(folder / "quickstart-output")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900, stdout=subprocess.DEVNULL)
    (folder / "DIR").symlink_to("quickstart-output/run/hf")
    rows = (folder / "scripts/quickstart/data/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "data.jsonl").write_text("".join(rows[:ROWS_OF_THE_READER]), encoding="utf-8")
    (folder / "train.sh").write_text(SCRIPT_OF_THE_READER)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("tutorial"))


def blocks(page: Path, language: str) -> list[str]:
    return [body for written, body in BLOCK.findall(page.read_text(encoding="utf-8")) if written == language]


def pasted(page: Path) -> str:
    """All commands of a page as one script."""
    return STARTER + DONE.sub("", "".join(blocks(page, "bash")))


def shown(page: Path) -> list[str]:
    """Patterns of the lines that a page shows, numbers aside. Blocks of commands for another place are left out."""
    found = []
    for body in blocks(page, "text"):
        if re.match(r"(megaswift|torchrun) ", body):
            continue
        for line in body.splitlines():
            begin = line.partition(" ...")[0].strip()
            if begin not in ("", "..."):
                found.append(r"\s+".join(map(re.escape, CHANGING.sub("\0", begin).split())).replace("\0", r"\S+?"))
    return found


def missing(page: Path, told: str) -> list[str]:
    """The lines of a page that were not printed."""
    return [line for line in shown(page) if not re.search(line, told)]


def run_page(page: Path, folder: Path) -> str:
    """What the commands of a page print; AssertionError where one fails."""
    environ = os.environ | {
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MEGASWIFT_CACHE": str(folder / "cache"),
    }
    log = folder / "output.txt"
    with log.open("w") as output:  # a pipe would stay open as long as a server that the page starts
        process = subprocess.Popen(
            ["bash", "-c", pasted(page)],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # tests in the background inherit "ignored"
        )
        try:
            code = process.wait(900)
        finally:
            process.terminate()
    told = log.read_text(encoding="utf-8").replace(f"{folder}/", "")
    assert code == 0, told[-6000:]
    return told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_runs(page: Path, checkout: Path, tmp_path: Path) -> None:
    told = run_page(page, shutil.copytree(checkout, tmp_path / "page", symlinks=True))
    assert missing(page, told) == []
    assert page.parent != TUTORIALS or len(shown(page)) > 3
