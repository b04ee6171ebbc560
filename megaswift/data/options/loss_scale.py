"""Reads `--loss_scale`: which turns carry loss, and tables that weigh parts of their text.

`turns[+TABLE...]`, as in ms-swift: `last_round+ignore_empty_think`, `hermes`, `default+weights.json`. The weights of
the named tables are those of ms-swift's `loss_scale/config` (the method: arXiv 2309.00986). Applying them to text
belongs to `data/templates/turn_weights.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift.config.sections import Sections
from megaswift.errors import ConfigError, Problem
from megaswift.options.option_json import read_option_json_file
from megaswift.options.tasks import PREFERENCES

TURNS = ("default", "last_round", "all")
"""The assistant's turns, those after the last user message, or every token."""
NAMED: dict[str, dict[str, Any]] = {
    "ignore_empty_think": {
        r"^<think>\s*</think>\s*": [0.0],
        r"^</think>\s*": [0.0],
        r"^</mm:think>\s*": [0.0],
        r"^<\|channel>thought\n<channel\|>": [0.0],
        r"^<seed:think><seed:cot_budget_reflect>[^<]*</seed:cot_budget_reflect>\n</seed:think>\s*": [0.0],
    },
    "ignore_think_prefix": {r"^<think>\n?": [0.0]},
    "hermes": {r"<tool_call>.+?</tool_call>": [2.0]},
    "react": {
        "Action:": [2.0, 2.0],
        "Action Input:": [2.0, 2.0],
        "Thought:": [1.0, 1.0],
        "Final Answer:": [1.0, 1.0],
        "Observation:": [2.0, 0.0],
    },
    "qwen": {
        "✿FUNCTION✿:": [2.0, 2.0],
        "✿ARGS✿:": [2.0, 2.0],
        "✿RETURN✿:": [1.0, 1.0],
        "✿RESULT✿:": [2.0, 0.0],
    },
    "alpha_umi": {
        "Action:": [2.0, 2.0],
        "Action Input:": [2.0, 2.0],
        "Thought:": [1.0, 1.0],
        "Final Answer:": [1.0, 1.0],
        "Observation:": [2.0, 0.0],
        "Next:": [2.0, 2.0],
    },
    "agentflan": {
        "response": {
            **dict.fromkeys(("Name:", "Action:", "ACTION:", "Tool:", "Command", "Arguments:"), [1.0, 3.0]),
            **dict.fromkeys(("action input", "ACTION_INPUT:", "Action Input:"), [1.0, 3.0]),
            "Thought:": [1.0, 1.0],
            "Final Answer:": [1.0, 1.0],
            "Observation:": [2.0, 0.0],
        },
        "query": dict.fromkeys(
            (
                "What is the tool you want to use",
                "What are the required parameter names",
                "What is the value of",
            ),
            [3.0],
        ),
    },
}
"""Text -> [weight] of what a regular expression matches, or [weight of the keyword, weight of the text up to the next
keyword]. `query`: a phrase of the user's message -> the weight of the whole answer."""
FORM = '{"REGULAR EXPRESSION": [WEIGHT]} or {"KEYWORD": [WEIGHT, WEIGHT OF WHAT FOLLOWS]}'


@dataclass(frozen=True)
class LossWeightTable:
    """Weights of parts of an assistant's turn."""

    keywords: dict[str, tuple[float, float]]
    """A literal text -> its own weight, and that of the text up to the next keyword."""
    patterns: dict[str, float]
    """A regular expression (`.` matches line ends, `^` the beginning of the turn) -> the weight of what it matches."""
    queries: dict[str, float]
    """A literal text of the user's message -> the weight of the whole turn."""

    @property
    def weights(self) -> set[float]:
        """Every weight in the table."""
        both = {weight for pair in self.keywords.values() for weight in pair}
        return both | set(self.patterns.values()) | set(self.queries.values())


@dataclass(frozen=True)
class LossScale:
    """A parsed `--loss_scale`."""

    turns: str
    """One of TURNS."""
    tables: tuple[LossWeightTable, ...] = ()
    """The weights of all of them are multiplied."""


ASSISTANT_TURNS = LossScale("default")


def parse_loss_scale(value: str) -> LossScale:
    """`value`, its tables read; ConfigError for a name that is unknown and for a file without a table."""
    first, *others = parts = value.split("+")
    turns, names = (first, others) if first in TURNS else (TURNS[0], parts)
    return LossScale(turns, tuple(_table(name, f"--loss_scale {value}") for name in names))


def _table(name: str, what: str) -> LossWeightTable:
    if name in NAMED:
        return _parse_table(NAMED[name], what)
    fix = f"use one of {', '.join((*TURNS, *NAMED))}, or FILE.json, joined by +"
    if not name.endswith(".json"):
        raise ConfigError(Problem(what, f"there is no loss scale {name!r}", fix))
    return _parse_table(read_option_json_file(Path(name).expanduser(), what, fix), what)


def _parse_table(entries: Mapping[str, Any], what: str) -> LossWeightTable:
    answers: Any = entries
    queries: Any = {}
    if isinstance(entries.get("response"), dict):
        answers = entries["response"]
        queries = entries.get("query", {})
    keywords: dict[str, tuple[float, float]] = {}
    patterns: dict[str, float] = {}
    for text, weights in _numbers(answers, what):
        if len(weights) == 2:
            keywords[text] = (weights[0], weights[1])
        else:
            patterns[text] = weights[0]
            _check_pattern(text, what)
    asked = {text: weights[0] for text, weights in _numbers(queries, what)}
    if not keywords and not patterns and not asked:
        raise ConfigError(Problem(what, "the file contains no weights", FORM))
    return LossWeightTable(keywords, patterns, asked)


def _numbers(entries: Any, what: str) -> Iterator[tuple[str, list[float]]]:
    if not isinstance(entries, dict):
        raise ConfigError(Problem(what, "the file contains no object of weights", FORM))
    for text, given in entries.items():
        weights = given if isinstance(given, list) else [given]
        valid = [w for w in weights if isinstance(w, (int, float)) and not isinstance(w, bool) and 0 <= w < math.inf]
        if not text or len(valid) != len(weights) or len(weights) not in (1, 2):
            raise ConfigError(Problem(what, f"{text!r}: {given!r} is not one or two weights of at least 0", FORM))
        yield text, [float(w) for w in weights]


def _check_pattern(text: str, what: str) -> None:
    try:
        re.compile(text, re.DOTALL)
    except re.error as error:
        raise ConfigError(Problem(what, f"{text!r} is not a regular expression: {error}", FORM)) from None


def loss_scale_problems(c: Sections, labels: Mapping[str, str], wrong: frozenset[str]) -> Iterator[Problem]:
    """What is wrong with `--loss_scale` itself, or with it in a preference task."""
    if "loss_scale" in wrong:
        return
    label = labels.get("loss_scale", f"--loss_scale {c.data.loss_scale}")
    try:
        scale = parse_loss_scale(c.data.loss_scale)
    except ConfigError as error:
        yield from (Problem(label, p.rule, p.fix) for p in error.problems)
        return
    if scale.turns == "all" and c.task in PREFERENCES:
        yield Problem(label, f"the prompt of a row carries no loss in {c.task}", "--loss_scale default or last_round")
