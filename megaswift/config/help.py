"""`--help`: every option of a task by section, with its default, unit, choices, other spellings and one line."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from megaswift.config.sections import OPTIONS, SECTIONS
from megaswift.config.variants import variant_note
from megaswift.losses.options.estimator_table import advantage_estimator_names
from megaswift.losses.options.loss_table import loss_names
from megaswift.options.option import Option
from megaswift.options.tasks import ALIGNMENT, TASKS
from megaswift.options.values import option_value_text

USAGE = """\
megaswift {task}: {what}

  megaswift {task} run.yaml --lr 2e-5     YAML or JSON file; flags override it
  NPROC_PER_NODE=8 megaswift {task} --tp 4 --model DIR --dataset FILE
  torchrun --nproc_per_node 8 megaswift/{task}.py --model DIR --dataset FILE"""
RLHF_USAGE = """\
megaswift rlhf: run the task given by --rlhf_type

  megaswift rlhf --rlhf_type dpo --model DIR --dataset FILE      same as: megaswift dpo --model DIR --dataset FILE
  megaswift rlhf run.yaml                                        rlhf_type: dpo in the file

""" + "\n".join(f"  {name:<8}{TASKS[name]} (megaswift {name} --help)" for name in ALIGNMENT)
LEGEND = (
    "Each option is shown with its default and unit; CAPITALS: not set by default. Dashes and underscores are "
    "interchangeable. A boolean flag without a value means true. Files take the same names, flat or by section."
)


def task_help(task: str, width: int | None = None) -> str:
    """The help page of `task`, `width` columns wide (None: as wide as the terminal, at most 120)."""
    width = min(width or shutil.get_terminal_size((100, 24)).columns, 120)
    lines = [USAGE.format(task=task, what=TASKS[task]), "", *textwrap.wrap(LEGEND, width)]
    for key, cls in SECTIONS.items():
        mine = [option for option in OPTIONS.values() if option.section == key and option.belongs_to(task)]
        if mine:
            lines += section_heading(cls.__doc__ or key, width)
        for option in mine:
            lines += option_lines(option, width, task)
    return "\n".join(line.rstrip() for line in lines)


def section_heading(docstring: str, width: int) -> list[str]:
    """The lines above the options of a section: its title, and the note below it."""
    title, _, note = docstring.strip().partition("\n\n")
    return ["", title, "-" * len(title), *textwrap.wrap(" ".join(note.split()), width)]


def option_lines(option: Option, width: int, task: str | None = None) -> Iterator[str]:
    """The lines of one option, as `task` has it."""
    column = 38 if width >= 96 else 30
    head = f"  --{option.name} {default_text(option)}".rstrip()
    text = option.help
    choices = option.choices_in(task)
    if len(choices) > 1:
        text += f" [{' | '.join(choices)}]"
    if task is not None:
        variants = {"loss_type": loss_names(task), "advantage_estimator": advantage_estimator_names(task)}
        note = variant_note(option, variants)
        text += f"; {note}" if note else ""
    body = textwrap.wrap(text, width - column, break_on_hyphens=False)
    if len(head) >= column:
        yield head
    else:
        yield head.ljust(column) + body.pop(0)
    for line in body:
        yield " " * column + line
    if option.aliases:
        also = "also " + " ".join(f"--{a}" for a in option.aliases)
        for line in textwrap.wrap(also, width - column, break_on_hyphens=False):
            yield " " * column + line


def default_text(option: Option) -> str:
    """The default with its unit as it could be typed, or a word in capitals when nothing is set."""
    details = option.details
    if option.default in (None, (), {}):
        return (
            details.get("metavar")
            or option.unit.upper()
            or {"bool": "auto", "list": "NAME..."}.get(option.kind, "VALUE")
        )
    unit = option.unit
    if option.default == 1 and unit:
        unit = unit.removesuffix("es") if unit.endswith("sses") else unit.removesuffix("s")
    return f"{option_value_text(option.default)} {unit}".strip()
