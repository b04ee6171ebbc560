"""The data formats: each module of this package parses the rows of one format into a `UntokenizedSample`, or for
preferences into
a `PreferenceExample`, for embedding models and rerankers into a `RetrievalExample`.

To add one: a file here that registers a `RowFormat`. A row's format is the first, in order of `rank`, whose columns the
row has and whose `detect` agrees; nothing else is to be touched.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaswift.base.registry import Registry
from megaswift.base.user_code import convert_user_code_errors
from megaswift.data.groups.rows import RetrievalExample
from megaswift.data.preference.rows import PreferenceExample
from megaswift.data.untokenized_sample import RowError, UntokenizedSample
from megaswift.errors import CONTROL, DataError, Problem
from megaswift.options.tasks import RL, SFT

Row = Mapping[str, Any]
Parsed = UntokenizedSample | PreferenceExample | RetrievalExample
"""What a row means."""
OTHER_NAMES = {
    "query": (
        *("question", "user", "input", "instruction", "problem", "human", "prompt", "ask", "context", "q", "src"),
        *("问题", "提问", "用户", "输入", "指令", "题目", "问"),
    ),
    "response": (
        *("answer", "output", "completion", "assistant", "reply", "target", "solution", "gpt", "bot", "generation"),
        *("ground_truth", "chosen", "a", "tgt", "回答", "答案", "输出", "回复", "助手", "答"),
    ),
    "instruction": ("question", "query", "prompt", "problem", "user", "指令", "问题", "提问"),
    "input": ("context", "passage", "document", "article", "background", "输入", "上下文", "背景"),
    "output": ("response", "answer", "completion", "reply", "target", "输出", "回答", "答案", "回复"),
    "system": ("system_prompt", "system_message", "系统", "系统提示", "系统提示词"),
    "messages": (
        *("conversation", "conversations", "dialog", "dialogue", "chat", "turns", "history", "chat_messages"),
        *("对话", "消息"),
    ),
    "text": (
        *("content", "document", "body", "article", "passage", "raw_content", "markdown", "code", "story", "page"),
        *("文本", "内容", "正文"),
    ),
    "prompt": ("question", "query", "problem", "instruction", "input", "user", "task", "问题", "提示词", "题目"),
    "chosen": (
        "preferred",
        "accepted",
        "positive",
        "better",
        "win",
        "winner",
        "good",
        "response_chosen",
        "answer_chosen",
    ),
    "label": ("is_good", "desirable", "thumbs_up", "good"),
    "rejected": ("dispreferred", "negative", "worse", "lose", "loser", "bad", "response_rejected", "answer_rejected"),
}
"""A format's column: what other data sets call it. Only proposed to the user, never read without --columns."""
LISTS = ("messages",)
SUGGESTED = {
    "sft": (("messages",), ("instruction", "input", "output"), ("query", "response")),
    "pt": (("text",),),
    "kto": (("query", "response", "label"),),
    "rl": (("messages",), ("prompt",)),
    "preference": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
}
"""By task: columns of the formats that are proposed when a row is of none."""


ADDED = ("system",)
"""Optional columns that are proposed beside them."""
BESIDE = re.compile(
    r"_*(id|idx|index|uid|uuid|guid|index_level_\d+)_*|\w+_id|category|categories|subset|split|source|data_source|"
    r"dataset|dataset_name|topic|subject|domain|type|tag|tags|language|lang|locale|difficulty|level|license|url|date|"
    r"timestamp|created_at|model|model_name"
)
"""Columns that say where a row comes from and are no part of a conversation. Where the format of a row is a guess by
common names (`question`, `answer`), a further column with a value makes it ambiguous unless its name matches."""


_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values of a column that says nothing; 0 and false say something."""


def has_nothing_besides(row: Row, read: Iterable[str]) -> bool:
    """Return whether all columns of a row are read, or say nothing about a conversation (`BESIDE`), or are empty."""
    return all(name in read or value in _NOTHING or BESIDE.fullmatch(name.lower()) for name, value in row.items())


def _any_row(row: Row) -> bool:
    return True


@dataclass(frozen=True)
class RowFormat:
    """How to know a format by its columns, and how to read it."""

    name: str
    required: tuple[str, ...]
    parse: Callable[[Row], Parsed]
    optional: tuple[str, ...] = ()
    tasks: tuple[str, ...] = SFT + RL
    detect: Callable[[Row], bool] = _any_row
    """For formats that share a column: a look at the value."""
    rank: int = 0
    """Formats of a lower rank are asked first. Below 0: the columns leave no doubt, and for other tasks the row is
    refused."""

    beside: tuple[str, ...] = ()
    """For messages: the columns of another format that this one reads too, or one of that sort."""

    common: bool = False
    """Its columns say little by themselves: for other tasks the row is of no known format."""

    def columns(self) -> str:
        """The columns for a message: required ones, then [optional ones]."""
        return ", ".join((*self.beside, *self.required)) + (f" [{', '.join(self.optional)}]" if self.optional else "")


FORMATS: Registry[RowFormat] = Registry("data format", __name__)


def _ordered(formats: Iterable[RowFormat]) -> list[RowFormat]:
    return sorted(formats, key=lambda f: (f.rank, f.name))


def known_formats_text(task: str) -> str:
    """The formats of a task with their columns, for a message; of two common columns, these alone."""
    known = [f for f in _ordered(FORMATS) if task in f.tasks]
    return "; ".join(f.name if f.common and len(f.required) > 1 else f"{f.name}: {f.columns()}" for f in known)


def recognize_format(row: Row, task: str) -> RowFormat:
    """The format of a row; RowError that lists the known ones when its columns fit none."""
    present = {k for k, v in row.items() if v is not None}
    fitting = _ordered(
        f for f in FORMATS if present.issuperset(f.required) and f.detect(row) and (task in f.tasks or not f.common)
    )
    usable = [f for f in fitting if task in f.tasks]
    if usable and (fitting[0].rank >= 0 or fitting[0] is usable[0]):
        return usable[0]
    columns = set(row)
    null = set(row) - present
    named = [f for f in FORMATS if task in f.tasks and columns.issuperset(f.required) and null & set(f.required)]
    if empty := _ordered(f for f in named if f.detect(row)):
        return empty[0]  # a column that the task needs is null in this row: the format's own parser names it
    if fitting:
        f = fitting[0]
        names = sorted({g.name for g in FORMATS if task in g.tasks})
        raise RowError(
            ", ".join(f.required),
            f"the format {f.name} is for megaswift {', '.join(f.tasks)}, not for {task}",
            f"a row of {' or '.join(names)}",
        )
    raise UnknownFormat(row, task)


class UnknownFormat(RowError):
    """A row whose columns fit no format of the task."""

    def __init__(self, row: Row, task: str) -> None:
        known = f"one of {known_formats_text(task)} (rename columns with --columns)"
        super().__init__(", ".join(row) or "(none)", "no format has these columns", known)
        self.fix = columns_option_suggestion(row, task)

    @property
    def where(self) -> str:
        """The row's columns, for messages."""
        noun = "columns" if ", " in self.column else "column"
        return f"{noun} {self.column}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Goes from rank to rank, where its text is all that is read."""
        return _again, (self.column, self.found, self.expected, self.fix)


def _again(column: str, found: str, expected: str, fix: str) -> RowError:
    error = RowError(column, found, expected)
    error.fix = fix
    return error


def parse_into_known_format(name: str, parse: Callable[[Row], Any], tasks: Sequence[str]) -> Callable[[Row], Parsed]:
    """The `parse` of a format of `--external_plugins`: what the user's function makes of a row, and of another row what
    its own format makes of that. RowError for what the function raises."""

    def parsed(row: Row) -> Parsed:
        where = ", ".join(row)
        try:
            with convert_user_code_errors(lambda trace: DataError(Problem(name, trace))):
                made = parse(row)
        except DataError as error:
            raise RowError(where, f"format {name} failed\n{error.problems[0].rule}", "a row that it reads") from None
        if not isinstance(made, Mapping):
            if not isinstance(made, Parsed):
                raise RowError(where, f"format {name} returned {type(made).__name__}", "a row of a known format")
            return made
        known = [f for f in _ordered(FORMATS) if f.name != name and set(f.tasks) & set(tasks)]
        present = {k for k, v in made.items() if v is not None}
        fitting = next((f for f in known if present.issuperset(f.required) and f.detect(made)), None)
        if fitting is None:
            raise RowError(
                ", ".join(made), f"format {name} returned a row of no known format", known_formats_text(tasks[0])
            )
        return fitting.parse(made)

    return parsed


def columns_option_suggestion(row: Row, task: str) -> str:
    """`--columns question=query answer=response` where the row's columns are known by other names, else by a part of
    them (`user_message`), followed by the names of columns that are not read; else nothing."""
    lower = {name.lower().replace(" ", "_"): name for name, value in reversed(list(row.items())) if value is not None}
    for known_as in (_whole_name, _part_of_name):
        for wanted in SUGGESTED.get(task, SUGGESTED["rl" if task in RL else "preference"]):
            candidates = {
                new: next((lower[n] for n in known_as(new, lower) if _fits(new, row[lower[n]])), None) for new in wanted
            }
            if all(candidates.values()) and len(set(candidates.values())) == len(candidates):
                return _proposal({old: new for new, old in candidates.items() if old is not None}, row, task)
    return ""


def _proposal(columns: Mapping[str, str], row: Row, task: str) -> str:
    """The option that renames these columns, and what becomes of the others."""
    lower = {name.lower().replace(" ", "_"): name for name, value in row.items() if isinstance(value, str)}
    if "text" not in columns.values():
        for new in ADDED:
            old = next((lower[n] for n in _whole_name(new, lower) if lower[n] not in columns), None)
            columns = {**columns, old: new} if old is not None and new not in row else columns
    pairs = shlex.join(f"{old}={new}" for old, new in columns.items() if old != new)
    renamed = {**row, **{new: row[old] for old, new in columns.items()}}
    form = next((f for f in _ordered(FORMATS) if task in f.tasks and renamed.keys() >= {*f.required}), None)
    optional = () if form is None else form.optional
    others = [name for name in row if name not in {*columns, *columns.values(), *optional}]
    rest = f" ({'for reward functions' if task in RL else 'not read'}: {', '.join(others)})" if others else ""
    return "" if CONTROL.search(pairs + rest) else f"--columns {pairs}{rest}"


def _whole_name(new: str, lower: Mapping[str, str]) -> list[str]:
    return [name for name in (new, *OTHER_NAMES[new]) if name in lower]


def _part_of_name(new: str, lower: Mapping[str, str]) -> list[str]:
    return [
        name
        for word in (new, *OTHER_NAMES[new])
        for name in reversed(list(lower))
        if word in re.split(r"[_.\W]+", name)
    ]


def _fits(new: str, value: Any) -> bool:
    """Whether a column's value may be what is read under its new name."""
    if new in LISTS:
        return isinstance(value, list) or str(value).lstrip().startswith("[")
    return new == "label" or isinstance(value, str)


def parse_sample(row: Row, task: str) -> UntokenizedSample:
    """The sample of a row, for a task whose formats give one."""
    sample = recognize_format(row, task).parse(row)
    assert isinstance(sample, UntokenizedSample)
    return sample
