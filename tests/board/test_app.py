"""The board in a real browser, over real folders."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from megaswift.board.runs import find_runs
from megaswift.trainers.hooks.metrics import read_lines
from tests.browser import CHROMIUM, FLAGS, needs_browser
from tests.run.report.runs import completion, line, write_folder
from tests.sources import ROOT
from tests.trainers.inputs import write_inputs

pytest.importorskip("gradio", reason="needs gradio: pip install -e '.[board]'")
pytestmark = [needs_browser, pytest.mark.process]

TOKEN = "a-secret-of-the-test"
EVIL = "<img src=x onerror=document.title=1>"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one with markup wherever a user or a model may write some."""
    root = tmp_path_factory.mktemp("runs")
    text = f"</script><script>document.title=1</script>{EVIL}"
    rows = [completion(2, prompt=text, completion=text, token_texts=[text], token_logprobs=[-1.0])]
    evil = write_folder(root / EVIL, [line(i) for i in (1, 2)], completions=rows, config=f"task: {text}\n")
    (evil / "train.log").write_text(f"2026-11-29 13:53:22   memory      {EVIL} weights 1.5 GiB\n{text}\n")
    write_folder(root / "plain", [line(i) for i in range(1, 9)])
    os.utime(root / "plain" / "metrics.jsonl", (1, 1))
    return root


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """The board of these runs."""
    board, where = serve(runs)
    yield where
    board.kill()
    board.wait()


def serve(root: Path) -> tuple[subprocess.Popen[str], str]:
    """A board of these runs, and its address."""
    code = "import sys; from megaswift.commands.board import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, str(root), "--port", str(free_port()), "--token", TOKEN]
    board = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert board.stdout is not None
    return board, board.stdout.readline().strip()


def document(address: str, profile: Path) -> str:
    """The document after eight seconds of the page's own time."""
    assert CHROMIUM is not None
    words = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=8000", "--dump-dom", address]
    for _ in range(3):
        found = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
        if "plain" in found:
            return found
        time.sleep(2)  # the server has not answered within the page's time
    return found


def files(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(root.rglob("*"))}


def test_the_page_shows_the_runs_and_changes_nothing(address: str, runs: Path, tmp_path: Path) -> None:
    before = files(runs)
    found = document(address, tmp_path / "profile")
    assert "<title>megaswift board</title>" in found, "no text of a run ran as a script"
    assert "plain" in found and "ended without a report" in found and 'src="page?run=' in found
    assert EVIL not in found and "&lt;img src=x onerror" in found
    assert files(runs) == before


def test_the_page_of_curves_is_that_of_the_runs_in_its_address(address: str, runs: Path, tmp_path: Path) -> None:
    key = re.findall(r'src="page\?run=([0-9a-f]{16})"', document(address, tmp_path / "profile"))[0]
    page = address.replace("/?", f"/page?run={key}&")
    found = document(page, tmp_path / "other")
    assert "&lt;img src=x onerror=document.title=1&gt;</title>" in found and "<svg" in found
    assert EVIL not in re.sub(r"<script.*?</script>", "", found, flags=re.DOTALL)
    assert "no such run" in document(address.replace("/?", "/page?run=..%2F..%2Fetc&"), tmp_path / "third")


def test_a_board_that_is_watched_and_killed_changes_no_run(tmp_path: Path) -> None:
    """The metrics of a run are those of one that nobody watched, bit for bit."""
    inputs = write_inputs(tmp_path)
    options = [*inputs, "--max_steps", "12", "--report_to", "none", "--logging_steps", "1"]

    def started(out: Path) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "megaswift", "sft", *options, "--output_dir", str(out)]
        return subprocess.Popen(words, cwd=ROOT, text=True)

    def figures(out: Path) -> list[tuple[float, float]]:
        return [(each["loss"], each["grad_norm"]) for each in read_lines(out / "metrics.jsonl")]

    watched = tmp_path / "outputs" / "watched"
    watched.parent.mkdir()
    board, address = serve(watched.parent)
    run = started(watched)
    looks = 0
    try:
        with httpx.Client(follow_redirects=True) as browser:
            browser.get(address)
            key = ""
            while run.poll() is None and len(figures(watched)) < 8:
                key = key or next((found.key for found in find_runs([watched.parent])), "")
                looks += browser.get(address.partition("?")[0] + f"data?run={key}").status_code == 200
    finally:
        board.kill()
        board.wait()
    assert run.wait(timeout=300) == 0 and looks > 0
    alone = tmp_path / "alone"
    assert started(alone).wait(timeout=300) == 0
    assert figures(watched) == figures(alone) and len(figures(alone)) == 12
