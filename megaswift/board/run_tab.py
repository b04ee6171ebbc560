"""The tab that stops and resumes a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import gradio as gr

from megaswift.board.jobs import Done, Jobs, is_alive, newest_job, resume_text
from megaswift.board.new_run import command_box, good_html, problems_html
from megaswift.board.runs import BoardRun
from megaswift.errors import Problem
from megaswift.trainers.checkpoints import CheckpointStore

BY_HAND = (
    "This run is no job of this machine: it was started in a terminal or on another machine. Stop it there: Ctrl-C, "
    "megaswift jobs cancel, or the cluster's own tool. It saves its state then, too."
)


def run_tab(jobs: Jobs, chosen: gr.Dropdown, run_of: Callable[[Sequence[str]], BoardRun | None]) -> list[Any]:
    """Build the content of the tab.

    Returns:
        The widgets that change with the run: their values are those of `run_facts`.
    """
    facts = gr.HTML()
    stop = gr.Button("Stop", variant="stop", interactive=False)
    hint = "--name value ..., such as --max_steps 2000"
    more = gr.Textbox(label="more options to resume with", info=hint, lines=1, elem_id="resume-more")
    command = command_box("The command line that continues the run")
    resume = gr.Button("Resume", variant="primary", interactive=False)
    result = gr.HTML()

    def text(keys: list[str], more: str) -> str:
        run = run_of(keys)
        try:
            return resume_text(run.folder, shlex.split(more)) if run else ""
        except ValueError:  # a quote that is still open
            return ""

    def stopped(keys: list[str]) -> str:
        run = run_of(keys)
        return _done_html(jobs.stop(run.folder)) if run else ""

    def resumed(keys: list[str], more: str) -> str:
        run = run_of(keys)
        if run is None:
            return ""
        try:
            words = shlex.split(more)
        except ValueError as error:
            return problems_html([Problem("more options", f"cannot be read: {error}", "close the quotes")])
        return _done_html(jobs.resume(run.folder, words))

    stop.click(stopped, [chosen], result, show_progress_on=[result])
    resume.click(resumed, [chosen, more], result, show_progress_on=[result])
    gr.on([more.input, more.blur, chosen.change], text, [chosen, more], command, show_progress="hidden")
    chosen.input(lambda: "", None, result, show_progress="hidden")
    return [facts, stop, resume]


def run_facts(run: BoardRun | None) -> list[Any]:
    """Return the updates of the widgets for a run."""
    if run is None:
        return ["<p>No run is shown.</p>", gr.update(interactive=False), gr.update(interactive=False)]
    status = run.status()
    job = newest_job(run.folder)
    alive = is_alive(job)
    lines = [f"<b>{escape(run.name)}</b>: {escape(status)}", f"Folder: {escape(str(run.folder))}"]
    if job is not None:
        lines.append(f"Job: {escape(job.folder)}")
    ended = not alive and not status.startswith("running")
    saved = CheckpointStore(run.folder / "checkpoints").latest() is not None
    if not alive and not ended:
        lines.append(escape(BY_HAND))
    if ended and not saved:
        lines.append("It has no checkpoint to resume from.")
    text = "".join(f"<p>{line}</p>" for line in lines)
    return [text, gr.update(interactive=alive), gr.update(interactive=ended and saved)]


def _done_html(done: Done) -> str:
    return (
        good_html("Done.", done.text) if done.folder is not None else problems_html(done.problems, "Nothing was done.")
    )
