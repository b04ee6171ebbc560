"""The tab with the form of a new run: fields, problems at the fields, the command line, the button that starts it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from megaswift.board import form
from megaswift.board.browser_memory import BrowserMemory
from megaswift.board.jobs import Jobs
from megaswift.errors import Problem
from megaswift.options.option import Option
from megaswift.options.tasks import TASKS

FIRST_TASK = "sft"
FIELD_WIDTH = 250
"""Pixels; on a narrow screen there is one field a row."""
PLACES = "Relative paths begin in the folder in which the board was started."


@dataclass(frozen=True)
class Field:
    """The widgets of an option."""

    option: Option
    column: gr.Column
    value: Any
    problem: gr.HTML


def new_run_tab(page: gr.Blocks, jobs: Jobs) -> gr.State:
    """Build the content of the tab.

    Returns:
        The folder of the run that was started last, empty before.
    """
    memory = BrowserMemory(f"megaswift-board-form-{_version_of_form()}")
    started = gr.State("")
    names = [(f"{task}: {text}", task) for task, text in TASKS.items()]
    task = gr.Dropdown(names, value=FIRST_TASK, label="Task", filterable=False, elem_id="task")
    groups: list[gr.Accordion] = []
    fields: list[Field] = []
    for heading, options in form.all_fields().items():
        own = any(option in form.fields(FIRST_TASK) for option in options)
        with gr.Accordion(heading, open=True, visible=own) as group, gr.Row(elem_classes="fields"):
            fields += [_field(option) for option in options]
        groups.append(group)
    facts: dict[str, Any] = {"info": "as on a command line: --name value ...", "elem_id": f"option-{form.MORE}"}
    more = gr.Textbox(label="more options", lines=2, max_lines=8, **facts)
    more_problem = gr.HTML(visible=False)
    command = command_box("The run's command line")
    problems = gr.HTML(visible=False)
    with gr.Row():
        check = gr.Button("Check")
        start = gr.Button("Start", variant="primary")
    gr.HTML(f"<p>{PLACES} The run goes on when the page or the board is closed.</p>")

    given = [task, *(field.value for field in fields), more]
    told = [*(field.problem for field in fields), more_problem, problems]
    filled = [task, *groups, *(field.column for field in fields), *(field.value for field in fields), more, command]

    def values_of(given: Sequence[Any]) -> dict[str, Any]:
        return {field.option.name: value for field, value in zip(fields, given, strict=True)}

    def text_of(task: str, values: Mapping[str, Any], more: str) -> str:
        return form.command_text(task, form.command_words(task, values, more or "")[0])

    def fill(task: str, values: Mapping[str, Any], more: str) -> list[Any]:
        """Return the updates of `filled`."""
        own = form.fields(task)
        headings = form.all_fields().values()
        return [
            task,
            *(gr.update(visible=any(option in own for option in options)) for options in headings),
            *(gr.update(visible=field.option in own) for field in fields),
            *(_update(task, field.option, values.get(field.option.name)) for field in fields),
            more,
            text_of(task, values, more),
        ]

    def recalled(kept: list[Any]) -> list[Any]:
        if len(kept) != len(given) or kept[0] not in TASKS:
            return fill(FIRST_TASK, {"output_dir": form.suggested_folder(jobs.roots[0], FIRST_TASK)}, "")
        return fill(kept[0], values_of(kept[1:-1]), str(kept[-1] or ""))

    def typed(task: str, *rest: Any) -> str:
        return text_of(task, values_of(rest[:-1]), rest[-1])

    def other_task(task: str, *rest: Any) -> list[Any]:
        values = values_of(rest[:-1])
        if values["output_dir"] in {form.suggested_folder(jobs.roots[0], each) for each in TASKS}:
            values["output_dir"] = form.suggested_folder(jobs.roots[0], task)
        return fill(task, values, rest[-1] or "")[1:]

    def shown(found: Sequence[Problem], task: str, values: Mapping[str, Any], good: str) -> list[Any]:
        """Return the updates of `told`."""
        of_field: dict[str, list[Problem]] = {}
        for problem in found:
            of_field.setdefault(form.field_of(problem, task, values), []).append(problem)
        own = [problems_html(of_field.pop(field.option.name, [])) for field in fields]
        own.append(problems_html(of_field.pop(form.MORE, [])))
        count = f"{len(found)} problem{'s' if len(found) > 1 else ''}: nothing was started. See the fields above."
        rest = problems_html(of_field.pop("", []), count) if found else good
        return [gr.update(value=text, visible=bool(text)) for text in (*own, rest)]

    def checked(task: str, *rest: Any) -> list[Any]:
        values = values_of(rest[:-1])
        words, unread = form.command_words(task, values, rest[-1] or "")
        found = unread or jobs.check(task, words).problems
        return shown(found, task, values, good_html("No problem found. The run can start."))

    def go(task: str, *rest: Any) -> list[Any]:
        values = values_of(rest[:-1])
        words, unread = form.command_words(task, values, rest[-1] or "")
        if unread:
            return [*shown(unread, task, values, ""), gr.skip(), gr.skip(), gr.skip()]
        done = jobs.start(task, words)
        if done.folder is None:
            return [*shown(done.problems, task, values, ""), gr.skip(), gr.skip(), gr.skip()]
        good = good_html(f"Started in {done.folder}.", done.text)
        values["output_dir"] = form.suggested_folder(jobs.roots[0], task)  # of the next one
        return [*shown((), task, values, good), str(done.folder), values["output_dir"], text_of(task, values, rest[-1])]

    output_dir = next(field.value for field in fields if field.option.name == "output_dir")
    quiet: Any = {"show_progress": "hidden"}
    task.input(other_task, given, filled[1:], **quiet)
    edited = [widget.input for widget in given]
    left = [widget.blur for widget in given]  # `input` of Gradio 6.31 leaves out what is pasted
    gr.on([*edited, *left], typed, given, command, trigger_mode="always_last", **quiet)
    memory.keep([*edited, *left, started.change], given)
    memory.recall(page, recalled, filled)
    running = {"show_progress_on": [problems, start, check]}
    check.click(checked, given, told, **running)
    start.click(go, given, [*told, started, output_dir, command], **running)
    return started


def _version_of_form() -> str:
    """A text that changes with the fields, whose values the browser keeps in their order."""
    names = [option.name for options in form.all_fields().values() for option in options]
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:8]


def command_box(label: str) -> gr.Code:
    """Return a box with a command line that can be copied."""
    facts: dict[str, Any] = {"show_line_numbers": False, "wrap_lines": True, "interactive": False}
    return gr.Code(label=label, language="shell", lines=1, buttons=["copy"], **facts)


def _field(option: Option) -> Field:
    shown = option in form.fields(FIRST_TASK)
    with gr.Column(min_width=FIELD_WIDTH, visible=shown) as column:
        facts = _facts(FIRST_TASK, option)
        if form.choices_of(FIRST_TASK, option):
            value: Any = gr.Dropdown(multiselect=option.kind in form.LISTS, allow_custom_value=True, **facts)
        else:
            value = gr.Textbox(lines=1, max_lines=4, **facts)
        return Field(option, column, value, gr.HTML(visible=False))


def _facts(task: str, option: Option) -> dict[str, Any]:
    """Return label, help and choices or placeholder of a widget."""
    default = form.default_of(task, option)
    facts: dict[str, Any] = {"label": option.name, "info": option.help, "elem_id": f"option-{option.name}"}
    choices = form.choices_of(task, option)
    if not choices:
        return {**facts, "placeholder": default}
    if option.kind in form.LISTS:
        return {**facts, "choices": [*choices], "info": f"{option.help} (default: {default})", "value": []}
    return {**facts, "choices": [(f"default: {default}", ""), *choices], "value": ""}


def _update(task: str, option: Option, value: Any) -> Any:
    """Return the update of a widget for a task; a value of another kind than its widget's is left out."""
    facts = {name: fact for name, fact in _facts(task, option).items() if name != "elem_id"}
    several = option.kind in form.LISTS and bool(form.choices_of(task, option))
    empty: Any = [] if several else ""
    return gr.update(**{**facts, "value": value if value and isinstance(value, list) == several else empty})


def problems_html(problems: Sequence[Problem], above: str = "") -> str:
    """Return problems as a box; empty for none."""
    rows = [_problem_html(problem) for problem in problems]
    if above:
        rows.insert(0, f"<p>{escape(above)}</p>")
    return f'<div class="problems">{"".join(rows)}</div>' if rows else ""


def _problem_html(problem: Problem) -> str:
    what = "" if problem.what == form.MORE else f"<b>{escape(problem.what)}</b>: "
    fix = f"<br>Try: {escape(problem.fix)}" if problem.fix else ""
    return f"<p>{what}{escape(problem.rule)}{fix}</p>"


def good_html(text: str, said: str = "") -> str:
    """Return good news as a box, with what a command said."""
    more = f"<pre>{escape(said)}</pre>" if said else ""
    return f'<div class="good"><p>{escape(text)}</p>{more}</div>'
