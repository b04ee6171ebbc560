"""`--help`: the options that most runs use on one page, and the rest by word and by section.

Owns the pages. Which options the first page has is marked at their declarations (`common`).
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaswift.config.sections import OPTIONS, SECTION_ALIASES, SECTIONS
from megaswift.config.swift_config import SwiftConfig
from megaswift.config.variants import variant_note
from megaswift.errors import ConfigError, Problem, did_you_mean_hint
from megaswift.losses.options.estimator_table import advantage_estimator_names
from megaswift.losses.options.loss_table import loss_names
from megaswift.losses.options.preference import beta_of, loss_types_of
from megaswift.options.option import Option
from megaswift.options.sources import normalize_name
from megaswift.options.tasks import ALIGNMENT, RL, TASKS
from megaswift.options.values import option_value_text
from megaswift.trainers.rl.options.derived import advantage_estimator_of, generations_per_prompt_of, policy_loss_of

USAGE = """\
megaswift {task}: {what}

  megaswift {task} --model DIR --dataset FILE
  megaswift {task} run.yaml --lr 2e-5     YAML or JSON file; flags override it
  NPROC_PER_NODE=8 megaswift {task} --tp 4 --model DIR --dataset FILE"""
RLHF_USAGE = """\
megaswift rlhf: run the task given by --rlhf_type

  megaswift rlhf --rlhf_type dpo --model DIR --dataset FILE      same as: megaswift dpo --model DIR --dataset FILE
  megaswift rlhf run.yaml                                        rlhf_type: dpo in the file

""" + "\n".join(f"  {name:<8}{TASKS[name]} (megaswift {name} --help)" for name in ALIGNMENT)
LEGEND = (
    "Each option is shown with its default and unit; CAPITALS: not set by default. Dashes and underscores are "
    "interchangeable. A boolean flag without a value means true."
)
ALL = "all"
"""The topic that lists every option."""
COLUMN = 36
"""Where descriptions begin on the first page."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Optimizer and learning-rate schedule": ("optim", "schedule"),
    "Reinforcement learning": ("preference", "rl", "rewards", "rollout", "placement", "critic"),
    "Output, evaluation, trackers": ("checkpoint", "evaluation", "trackers"),
    "Devices: parallel layout, engine, processes": ("parallel", "engine", "launch"),
}
"""Heading on the first page -> sections that share it. Any other section has its own."""


@dataclass(frozen=True)
class HelpPages:
    """The help of one command: pages about its options."""

    command: str
    """`sft`, `infer`, ..."""
    usage: str
    sections: Mapping[str, type]
    options: Sequence[Option]
    """Those of the command, in the order of their sections."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of a run without options, where they are not the declared defaults."""
    other_sections: Mapping[str, str] = field(default_factory=dict)
    """Other name of a section -> its name."""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Heading on the first page -> sections that share it."""
    note: Callable[[Option], str] = lambda option: ""
    """Returns what to add to the description of an option."""

    @property
    def common(self) -> list[Option]:
        """The options of the first page."""
        return [option for option in self.options if self.command in option.details.get("common", ())]

    def page(self, topic: str = "", width: int | None = None) -> str:
        """Return the page about a topic.

        Args:
            topic: Empty for the first page, `all`, a section, or a word: an option, or part of its name or text.
            width: Columns; None: as wide as the terminal, at most 120.

        Raises:
            ConfigError: No option has to do with the topic.
        """
        width = min(width or shutil.get_terminal_size((100, 24)).columns, 120)
        if not topic:
            lines = self._first_page(width)
        elif topic == ALL:
            lines = self._every_option(width)
        else:
            lines = self._about(topic, width)
        return "\n".join(line.rstrip() for line in lines)

    # ---- the pages

    def _first_page(self, width: int) -> list[str]:
        lines = [self.usage.rstrip(), ""]
        heading_of = {key: heading for heading, keys in self.groups.items() for key in keys}
        grouped: dict[str, list[Option]] = {}
        for option in self.common:
            own = section_title(self.sections[option.section])
            grouped.setdefault(heading_of.get(option.section, own), []).append(option)
        for heading, options in grouped.items():
            lines.append(heading)
            lines += [self._one_line(option, width) for option in options]
        keys = ", ".join(key for key in self.sections if any(option.section == key for option in self.options))
        rest = (
            f"CAPITALS: not set by default. These are {len(self.common)} of {len(self.options)} options. "
            f"`megaswift {self.command} --help all` prints every option, `--help WORD` an option or those with the "
            f"word in their text, `--help SECTION` a section: {keys}"
        )
        return [*lines, "", *textwrap.wrap(rest, width)]

    def _every_option(self, width: int) -> list[str]:
        lines = [self.usage.rstrip(), "", *textwrap.wrap(LEGEND, width)]
        common = self.common
        rest = [option for option in self.options if option not in common]
        for options, suffix in ((common, ""), (rest, ", further options" if common else "")):
            for key in self.sections:
                lines += self._section(key, [option for option in options if option.section == key], width, suffix)
        return lines

    def _about(self, topic: str, width: int) -> list[str]:
        word = normalize_name(topic)
        by_name = {name: option for option in self.options for name in option.names}
        section = self._section_named(word.lower())
        if section and (word in self.sections or word not in by_name):
            found = [option for option in self.options if option.section == section]
        elif word in by_name:
            found = [by_name[word]]
        else:
            texts = {option.name: " ".join((*option.names, option.help, *option.choices)) for option in self.options}
            wanted = topic.lstrip("-").lower()
            found = [o for o in self.options if any(w in texts[o.name].lower() for w in (word, wanted))]
        if not found:
            known = [*self.sections, *by_name]
            fix = did_you_mean_hint(word, known) or f"megaswift {self.command} --help all"
            raise ConfigError(Problem(f"--help {topic}", "is in no name and no description of an option", fix))
        lines = []
        for key in self.sections:
            lines += self._section(key, [option for option in found if option.section == key], width)
        others = [option.name for option in self.options if word in option.name and option not in found]
        if others:
            also = f"Also with {word} in their names: {' '.join(f'--{name}' for name in others)}"
            lines += ["", *textwrap.wrap(also, width, break_on_hyphens=False)]
        return lines[1:]

    # ---- parts of pages

    def _section_named(self, word: str) -> str:
        titles = {section_title(cls).lower().replace(" ", "_"): key for key, cls in self.sections.items()}
        keys = {key: key for key in self.sections}
        return (titles | dict(self.other_sections) | keys).get(word, "")

    def _section(self, key: str, options: Iterable[Option], width: int, suffix: str = "") -> list[str]:
        """Returns a section's heading and options; nothing without options."""
        entries = [line for option in options for line in self._entry(option, width)]
        return [*section_heading(self.sections[key].__doc__ or key, width, suffix), *entries] if entries else []

    def _entry(self, option: Option, width: int) -> Iterator[str]:
        column = 38 if width >= 96 else 30
        head = f"  --{option.name} {default_text(option, self._default(option))}".rstrip()
        text = option.help
        choices = option.choices_in(self.command)
        if len(choices) > 1:
            text += f" [{' | '.join(choices)}]"
        note = self.note(option)
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

    def _one_line(self, option: Option, width: int) -> str:
        """The option on the first page; what does not fit is on the others: the unit, what is unset, choices."""
        default = default_text(option, self._default(option))
        if len(option.name) + len(default) + 6 > COLUMN:
            default = "N" if default.isupper() else default.partition(" ")[0]
        head = f"  --{option.name} {default}".ljust(COLUMN - 1) + " "
        room = width - len(head)
        text = option.help
        for end in (";", " ("):
            if len(text) > room:
                text = text.partition(end)[0]
        choices = option.choices_in(self.command)
        for shown in range(len(choices), 1, -1):
            listed = " | ".join((*choices[:shown], *(["..."] if shown < len(choices) else [])))
            if len(f"{text} [{listed}]") <= room:
                return f"{head}{text} [{listed}]"
        return head + text

    def _default(self, option: Option) -> Any:
        return self.defaults.get(option.name, option.default)


def task_pages(task: str) -> HelpPages:
    """Return the help of a training command."""
    options = [option for key in SECTIONS for option in OPTIONS.values() if option.section == key]
    variants = {"loss_type": loss_names(task), "advantage_estimator": advantage_estimator_names(task)}
    return HelpPages(
        task,
        USAGE.format(task=task, what=TASKS[task]),
        SECTIONS,
        [option for option in options if option.belongs_to(task)],
        task_defaults(task),
        SECTION_ALIASES,
        {heading: keys for heading, keys in GROUPS.items() if "rl" not in keys or task in RL},
        lambda option: variant_note(option, variants),
    )


def task_help(task: str, topic: str = "", width: int | None = None) -> str:
    """Return a help page of `task`: the first one, or that of a topic (see `HelpPages.page`)."""
    return task_pages(task).page(topic, width)


def task_defaults(task: str) -> dict[str, Any]:
    """Return the values of a run of `task` without options, those included that follow from the task."""
    bare = SwiftConfig(task=task)
    values = {name: bare.value(name) for name in OPTIONS if bare.value(name) is not None}
    if OPTIONS["beta"].belongs_to(task):
        values["beta"] = beta_of(bare)
    if OPTIONS["loss_type"].belongs_to(task):
        values["loss_type"] = (policy_loss_of(bare),) if task in RL else loss_types_of(bare)
    if task in RL:
        values["advantage_estimator"] = advantage_estimator_of(bare)
        values["num_generations"] = generations_per_prompt_of(bare)
    return values


def section_title(cls: type) -> str:
    """Return the title of a section: the first line of its docstring."""
    return (cls.__doc__ or "").strip().partition("\n")[0]


def section_heading(docstring: str, width: int, suffix: str = "") -> list[str]:
    """Return the lines above the options of a section: its title, and the note below it."""
    title, _, note = docstring.strip().partition("\n\n")
    title += suffix
    note = "" if suffix else note
    return ["", title, "-" * len(title), *textwrap.wrap(" ".join(note.split()), width)]


def default_text(option: Option, default: Any) -> str:
    """Return a default with its unit as it could be typed, or a word in capitals when nothing is set."""
    details = option.details
    if default in (None, (), {}):
        return (
            details.get("metavar")
            or option.unit.upper()
            or {"bool": "BOOL", "list": "NAME..."}.get(option.kind, "VALUE")
        )
    unit = option.unit
    if default == 1 and unit:
        unit = unit.removesuffix("es") if unit.endswith("sses") else unit.removesuffix("s")
    return f"{option_value_text(default)} {unit}".strip()
