"""The board in a real browser, over real folders."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from megaswift.board.runs import find_runs
from megaswift.trainers.hooks.metrics import read_lines
from tests.browser import needs_browser
from tests.driven_browser import DrivenBrowser
from tests.run.report.runs import completion, line, write_folder
from tests.sources import ROOT
from tests.trainers.inputs import write_inputs

needs_gradio = pytest.mark.skipif(find_spec("gradio") is None, reason="needs gradio: pip install -e '.[board]'")
pytestmark = [needs_gradio, needs_browser, pytest.mark.process]

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


def cookie(address: str) -> str:
    """The header that a browser sends after it has opened the address."""
    return f"megaswift_board_{httpx.URL(address).port}={TOKEN}"


def serve(root: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A board of these runs, and its address."""
    code = "import sys; from megaswift.commands.board import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, str(root), "--port", str(free_port()), "--token", TOKEN, *options]
    board = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert board.stdout is not None
    return board, board.stdout.readline().strip()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[DrivenBrowser]:
    """A browser with a profile of its own."""
    found = DrivenBrowser(tmp_path / "driven")
    yield found
    found.close()


def document(browser: DrivenBrowser) -> str:
    """The page as markup."""
    return str(browser.run("document.documentElement.outerHTML"))


def files(root: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(root.rglob("*"))}


def test_the_page_shows_the_runs_and_changes_nothing(browser: DrivenBrowser, address: str, runs: Path) -> None:
    before = files(runs)
    browser.open(address)
    browser.wait("document.querySelector('iframe') && document.body.innerText.includes('ended without a report')")
    found = document(browser)
    assert "plain" in found and 'src="page?run=' in found
    assert EVIL not in found and "&lt;img src=x onerror" in found
    assert browser.run("document.title") == "megaswift board", "no text of a run ran as a script"
    assert files(runs) == before


def test_the_page_of_curves_is_that_of_the_runs_in_its_address(browser: DrivenBrowser, address: str) -> None:
    browser.open(address)
    browser.wait("document.querySelector('iframe')")
    key = re.findall(r'src="page\?run=([0-9a-f]{16})"', document(browser))[0]
    browser.open(address.replace("/?", f"/page?run={key}&"))
    browser.wait("document.querySelector('svg')")
    assert browser.run("document.title") == EVIL, "as text"
    assert EVIL not in re.sub(r"<script.*?</script>", "", document(browser), flags=re.DOTALL)
    browser.open(address.replace("/?", "/page?run=..%2F..%2Fetc&"))
    browser.wait("document.body?.innerText === 'no such run'")


@pytest.mark.slow
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


def visit(browser: DrivenBrowser, address: str, tab: str, width: int = 1280) -> None:
    """Open the page at a tab."""
    browser.open(address, width)
    browser.wait("document.body?.innerText?.includes('Curves and completions')")
    show(browser, tab)


def show(browser: DrivenBrowser, tab: str) -> None:
    """Choose a tab; on a narrow page from the menu of those that do not fit."""
    visible = "e => e.textContent.trim() === {0} && e.offsetParent && getComputedStyle(e).visibility !== 'hidden'"
    find = "[...document.querySelectorAll('{1}')].find(" + visible + ")"
    button = find.format(json.dumps(tab), "button[role=tab]")
    entry = find.format(json.dumps(tab), ".overflow-dropdown button")
    script = f"""(async () => {{
        const shown = {button};
        if (shown) return shown.click();
        document.querySelector('.overflow-menu button').click();
        await new Promise(done => setTimeout(done, 300));
        {entry}.click();
    }})()"""
    browser.run(script)


def fill(browser: DrivenBrowser, values: Mapping[str, str]) -> None:
    """Type into the form, once it holds what the browser has kept."""
    browser.wait("document.querySelector('#option-output_dir textarea')?.value")
    for name, value in values.items():
        browser.type(f"#option-{name} textarea", value)


def problems(browser: DrivenBrowser) -> list[str]:
    found: list[str] = browser.run("[...document.querySelectorAll('.problems')].map(e => e.innerText)")
    return found


def last_step(out: Path) -> int:
    return int(lines[-1]["step"]) if (lines := list(read_lines(out / "metrics.jsonl"))) else 0


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
def test_a_run_from_the_form_to_the_chat(browser: DrivenBrowser, tmp_path: Path) -> None:
    """Typed, refused, started, left alone by page and board, stopped, resumed, and asked."""
    root = tmp_path / "runs"
    root.mkdir()
    options = dict(zip((words := write_inputs(tmp_path))[::2], words[1::2], strict=True))
    more = f"--dataset_cache_dir {options['--dataset_cache_dir']} --report_to none"
    out = root / "first"
    board, address = serve(root)
    try:
        # A value that will not do is refused at its field, and the form survives a reload.
        visit(browser, address, "New run")
        form = {"model": options["--model"], "dataset": options["--dataset"], "max_steps": "100000", "more": more}
        fill(browser, {**form, "learning_rate": "fast", "output_dir": str(out)})
        browser.click("button", "Start")
        browser.wait("document.body.innerText.includes('nothing was started')")
        assert any(told.startswith("--learning_rate fast: must be a number") for told in problems(browser))
        assert [*root.iterdir()] == []
        visit(browser, address, "New run")
        browser.wait(f"document.querySelector('#option-dataset textarea').value === {json.dumps(form['dataset'])}")
        # Outside the board's folders nothing is written.
        fill(browser, {"learning_rate": "1e-2", "output_dir": str(tmp_path / "elsewhere")})
        browser.click("button", "Start")
        browser.wait("document.body.innerText.includes('is outside the folders of this board')")
        assert not (tmp_path / "elsewhere").exists()
        # The run starts, and goes on without page and board.
        fill(browser, {"output_dir": str(out)})
        browser.press("Tab")
        browser.wait(f"document.body.innerText.includes('--output_dir {out}')")
        browser.click("button", "Start")
        browser.wait("document.body.innerText.includes('train.log of the first run shown')")
        browser.open("about:blank")
    finally:
        board.kill()
        board.wait()
    wait_for(lambda: last_step(out) > 0)
    seen = last_step(out)
    wait_for(lambda: last_step(out) > seen + 10)
    assert (out / "jobs" / "sft" / "run.yaml").read_text().startswith("task: sft\nmodel: ")
    board, address = serve(root)
    try:
        # Another board stops it; it saves its state.
        visit(browser, address, "Stop and resume")
        browser.wait("document.body.innerText.includes('first: running')")
        browser.click("button", "Stop")
        browser.wait("document.body.innerText.includes('The run saves its state after the present step, and ends.')")
        browser.wait("document.body.innerText.includes('first: interrupted after step')", 120)
        stopped = last_step(out)
        assert stopped < 100000 and any((out / "checkpoints").iterdir())
        # It is resumed, with another end.
        browser.type("#resume-more textarea", f"--max_steps {stopped + 20}")
        browser.press("Tab")
        browser.wait(f"document.body.innerText.includes('--max_steps {stopped + 20}')")
        browser.click("button", "Resume")
        browser.wait(f"document.body.innerText.includes('first: finished at step {stopped + 20}')", 240)
        # Its model answers; what is typed and what comes back is text.
        show(browser, "Chat")
        browser.type("#chat-message textarea", f"2+3? {EVIL}")
        browser.press("Enter")
        browser.wait("document.querySelectorAll('[data-testid=bot]').length === 1", 120)
        browser.wait("!document.querySelector('[data-testid=bot]').innerText.includes('...')", 120)
        assert EVIL in browser.run("document.querySelector('[data-testid=user]').innerText")
        assert browser.run("document.title") == "megaswift board"
    finally:
        board.kill()
        board.wait()


@pytest.mark.slow
def test_the_form_of_another_task(browser: DrivenBrowser, address: str) -> None:
    visit(browser, address, "New run")
    fill(browser, {"model": "m"})
    visible = "document.querySelector('#option-{}')?.offsetParent != null"
    assert browser.run(visible.format("warmup_ratio")) and not browser.run(visible.format("num_generations"))
    browser.run("document.querySelector('#task input').focus()")
    browser.wait("[...document.querySelectorAll('ul[role=listbox] li')].length > 5")
    entry = "[...document.querySelectorAll('ul[role=listbox] li')].find(e => e.innerText.includes('GRPO'))"
    browser.run(f"{entry}.dispatchEvent(new MouseEvent('mousedown', {{bubbles: true}}))")
    browser.wait(visible.format("num_generations"))
    assert not browser.run(visible.format("warmup_ratio"))
    assert browser.run("document.querySelector('#option-model textarea').value") == "m"
    browser.wait("document.body.innerText.includes('megaswift grpo --model m')")
    assert browser.run("document.querySelector('#option-output_dir textarea').value").endswith("grpo-1")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 420])
def test_every_tab_fits_the_screen(width: int, browser: DrivenBrowser, address: str, runs: Path) -> None:
    before = files(runs)
    visit(browser, address, "Log", width)
    for tab in (
        "Curves and completions",
        "Memory",
        "Checkpoints",
        "Configuration",
        "Chat",
        "Stop and resume",
        "New run",
    ):
        show(browser, tab)
        time.sleep(1)
        assert browser.run("document.documentElement.scrollWidth") <= width, tab
    show(browser, "Stop and resume")
    assert EVIL in browser.text() and browser.run("document.title") == "megaswift board"
    assert files(runs) == before, "looking changes nothing"


@pytest.mark.slow
def test_a_board_that_only_reads_has_neither_tabs_nor_routes_that_change_something(
    browser: DrivenBrowser, runs: Path
) -> None:
    board, address = serve(runs, "--read_only")
    try:
        visit(browser, address, "Log")
        assert (
            "New run" not in browser.text() and "Stop and resume" not in browser.text() and "Chat" not in browser.text()
        )
        names = httpx.get(address.partition("?")[0] + "config", headers={"cookie": cookie(address)}).json()
        assert {each["api_name"] for each in names["dependencies"] if each["backend_fn"]} == {
            "arrive",
            "choose",
            "look",
        }
    finally:
        board.kill()
        board.wait()


@pytest.mark.slow
def test_the_error_of_a_model_is_text(browser: DrivenBrowser, tmp_path: Path) -> None:
    """Gradio renders HTML in its messages, and a path may contain some."""
    hf = write_folder(tmp_path / "runs" / EVIL, [line(1)]) / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    board, address = serve(tmp_path / "runs")
    try:
        visit(browser, address, "Chat")
        browser.wait(f"document.body.innerText.split({json.dumps(EVIL)}).length > 2")  # the run is shown
        browser.type("#chat-message textarea", "2+3?")
        browser.press("Enter")
        browser.wait("document.body.innerText.includes('The model cannot be served')", 120)
        assert browser.run("document.title") == "megaswift board"
        assert f"{EVIL}/hf" in browser.text() and "Fatal Python error" not in browser.text()
    finally:
        board.kill()
        board.wait()
