"""The board's web application: Gradio's components around the report's page of curves and completions.

Owns the page of the runs; the form of a new run and the chat have files of their own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gradio as gr
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from megaswift.base.byte_size import bytes_text
from megaswift.board.access import TokenMiddleware
from megaswift.board.browser_memory import BrowserMemory
from megaswift.board.chat import Chat
from megaswift.board.chat_tab import chat_tab
from megaswift.board.jobs import Jobs
from megaswift.board.new_run import new_run_tab
from megaswift.board.run_tab import run_facts, run_tab
from megaswift.board.runs import BoardRun, find_runs
from megaswift.run.report.comparison import comparison_html
from megaswift.run.report.loss_png import primary_metric
from megaswift.run.report.page import json_for_script, page_data
from megaswift.trainers.checkpoints import CheckpointStore

HEAD = ["run", "status", "step", "loss or reward", "tokens/s", "memory, GiB", "last line"]
WIDTHS = [200, 230, 90, 160, 110, 130, 190]
"""Pixels of the columns: on a narrow screen the table scrolls, and no word is broken."""
STEPS = ["step", "saved", "size", ""]
RENEWAL_SECONDS = 5
FRAME = '<iframe title="curves" src="{}" style="width:100%;height:82vh;border:0"></iframe>'
LOG_TAB = "log"
NEW_TAB = "new"
_CSS = (Path(__file__).parent / "board.css").read_text(encoding="utf-8")
_LIVE = (Path(__file__).parent / "live.js").read_text(encoding="utf-8")


class Board:
    """The runs below some folders, found anew whenever somebody looks."""

    def __init__(self, roots: Sequence[Path], read_only: bool) -> None:
        self.roots = roots
        self.jobs = None if read_only else Jobs(roots)
        """Starts and ends runs; None for a board that only reads."""
        self.chat = Chat()

    def runs(self) -> list[BoardRun]:
        """Return the runs, the most recently written first."""
        return find_runs(self.roots)

    def chosen(self, keys: Sequence[str] | None) -> list[BoardRun]:
        """Return the runs of these keys; keys of no run are left out, so an address leads to no other folder."""
        known = {run.key: run for run in self.runs()}
        return [known[key] for key in keys or () if key in known]

    def first(self, keys: Sequence[str] | None) -> BoardRun | None:
        """Return the first of these runs."""
        return next(iter(self.chosen(keys)), None)

    def folder(self, keys: Sequence[str] | None) -> Path | None:
        """Return the folder of the first of these runs."""
        run = self.first(keys)
        return run.folder if run else None

    def table(self) -> list[list[str]]:
        """Return a row of each run."""
        return [self._row(run) for run in self.runs()]

    def _row(self, run: BoardRun) -> list[str]:
        line = run.last_line()
        watched = line.get(primary_metric([line]))
        return [
            run.name,
            run.status(),
            f"{line['step']:,}" if "step" in line else "",
            "" if watched is None else f"{watched:.4g}",
            f"{line['tokens_per_second']:,.0f}" if "tokens_per_second" in line else "",
            f"{line['memory_gib']:.2f}" if "memory_gib" in line else "",
            _when(run.folder / "metrics.jsonl"),
        ]

    def choices(self) -> list[tuple[str, str]]:
        """Return name and key of each run."""
        return [(run.name, run.key) for run in self.runs()]


def checkpoint_rows(folder: Path) -> list[list[str]]:
    """Return a row of each checkpoint of a run."""
    store = CheckpointStore(folder / "checkpoints")
    latest = store.latest()
    return [
        [
            f"{saved.step:,}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved.saved_at)),
            bytes_text(sum(entry["bytes"] for entry in saved.files.values())),
            "latest" if saved.path == latest else "",
        ]
        for saved in store.complete()
    ]


def memory_html(run: BoardRun) -> str:
    """Render the memory of each part of the model on the largest rank, and the peak of all."""
    parts = run.memory_parts()
    peak = run.last_line().get("memory_gib")
    rows = [(name, size) for name, size in parts.items()]
    if peak is not None:
        rows.append(("peak of the process so far", int(peak * 2**30)))
    if not rows:
        return "<p>The run has not said yet how much memory it needs.</p>"
    most = max(size for _, size in rows) or 1
    return f"<table style='width:100%'>{''.join(_bar_row(name, size, most) for name, size in rows)}</table>"


def _bar_row(name: str, size: int, most: int) -> str:
    style = "background:var(--color-accent);height:9px;border-radius:4px;min-width:2px"
    bar = f'<div style="{style};width:{100 * size / most:.1f}%"></div>'
    return f"<tr><td>{escape(name)}</td><td>{bytes_text(size)}</td><td style='width:60%'>{bar}</td></tr>"


def board_page(board: Board) -> gr.Blocks:
    """Build the page."""
    with gr.Blocks(title="megaswift board", analytics_enabled=False, fill_width=True) as page:
        memory = BrowserMemory("megaswift-board-shown")
        table = gr.Dataframe(headers=HEAD, datatype="str", interactive=False, label="Runs", column_widths=[*WIDTHS])
        chosen = gr.Dropdown([], multiselect=True, label="Shown", interactive=True)
        with gr.Tabs() as tabs:
            with gr.Tab("Curves and completions"):
                frame = gr.HTML()
            with gr.Tab("Log", id=LOG_TAB):
                log = gr.Textbox(lines=28, max_lines=28, label="train.log of the first run shown", interactive=False)
                output = gr.Textbox(lines=8, max_lines=28, label="Output of its job", interactive=False, visible=False)
            with gr.Tab("Memory"):
                parts = gr.HTML()
            with gr.Tab("Checkpoints"):
                steps = gr.Dataframe(headers=STEPS, datatype="str", interactive=False)
            with gr.Tab("Configuration"):
                config = gr.Textbox(lines=28, max_lines=28, label="config.yaml", interactive=False)
            started = None
            controls: list[Any] = []
            if board.jobs is not None:
                with gr.Tab("Chat"):
                    chat_tab(board.chat, chosen, board.folder)
                with gr.Tab("Stop and resume"):
                    controls = run_tab(board.jobs, chosen, board.first)
                with gr.Tab("New run", id=NEW_TAB):
                    started = new_run_tab(page, board.jobs)
        details = [log, output, parts, steps, config, *controls]

        def look(keys: list[str]) -> list[Any]:
            """Return what changes while a run goes on, without the curves, which renew themselves."""
            run = board.first(keys)
            own = run_facts(run) if controls else []
            return [board.table(), gr.update(choices=board.choices()), *_details(run), *own]

        def choose(keys: list[str]) -> list[Any]:
            keys = [run.key for run in board.chosen(keys)]
            address = f"page?{urlencode([('run', key) for key in keys])}"
            return [FRAME.format(escape(address)) if keys else "", *look(keys)[2:]]

        def arrive(kept: list[list[str]]) -> list[Any]:
            keys = [run.key for run in board.chosen(kept[0] if kept else [])] or [run.key for run in board.runs()[:1]]
            return [board.table(), gr.update(choices=board.choices(), value=keys), *choose(keys)]

        def show(folder: str) -> list[Any]:
            """Show the run that was just started, with its log."""
            keys = [run.key for run in board.runs() if str(run.folder) == folder]
            return [*arrive([keys]), gr.Tabs(selected=LOG_TAB)]

        arrived = [table, chosen, frame, *details]
        memory.keep([chosen.change], [chosen])
        memory.recall(page, arrive, arrived)
        chosen.input(choose, [chosen], [frame, *details], show_progress="hidden")
        gr.Timer(RENEWAL_SECONDS).tick(look, [chosen], [table, chosen, *details], show_progress="hidden")
        if started is not None:
            started.change(show, [started], [*arrived, tabs], show_progress="hidden")
    return page


def _details(run: BoardRun | None) -> list[Any]:
    """The values of log, output, memory, checkpoints and configuration."""
    if run is None:
        return ["", gr.update(value="", visible=False), "", [], ""]
    log = run.log()
    said = run.output()
    last = said.strip().rpartition("\n")[2]
    output = gr.update(value=said, visible=bool(last) and last not in log)  # such as a library's error
    return [log, output, memory_html(run), checkpoint_rows(run.folder), run.config()]


def board_app(roots: Sequence[Path], token: str, port: int, local: bool, read_only: bool) -> TokenMiddleware:
    """Build the application: Gradio's page, and the page of curves in it with its numbers.

    Args:
        read_only: Whether the page only shows runs; otherwise it also starts them.
    """
    board = Board(roots, read_only)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/page")
    def curves(request: Request) -> HTMLResponse:
        runs = board.chosen(request.query_params.getlist("run"))
        if not runs:
            return HTMLResponse("no such run", 404)
        return HTMLResponse(comparison_html([run.files for run in runs], _LIVE))

    @app.get("/data")
    def numbers(request: Request) -> Response:
        runs = board.chosen(request.query_params.getlist("run"))
        if not runs:
            return JSONResponse({}, 404)
        signature = _signature(runs)
        if request.query_params.get("seen") == signature:
            return Response(status_code=204)
        text = json_for_script(page_data([run.files for run in runs]))
        return Response(text, media_type="application/json", headers={"etag": signature})

    font = ["system-ui", "sans-serif"]
    mono = ["ui-monospace", "monospace"]
    theme = gr.themes.Default(font=font, font_mono=mono)
    facts: dict[str, Any] = {
        "theme": theme,
        "css": _CSS,
        "footer_links": [],
        "ssr_mode": False,
        "run_history": False,
        "show_error": False,
    }
    mounted = gr.mount_gradio_app(app, board_page(board), path="/", **facts)
    return TokenMiddleware(mounted, token, port, local)


def _signature(runs: Sequence[BoardRun]) -> str:
    """A text that changes with the logs of the runs."""
    digest = hashlib.sha256()
    for run in runs:
        for path in (run.files.metrics, run.files.evaluation, run.files.completions):
            try:
                facts = path.stat()
                digest.update(f"{facts.st_size} {facts.st_mtime_ns}".encode())
            except OSError:
                digest.update(b"none")
    return digest.hexdigest()[:16]


def _when(path: Path) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    except OSError:
        return ""
