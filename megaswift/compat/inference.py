"""Names and values of other toolkits in `infer`, `deploy` and `export`: what those commands hand to their parser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaswift.compat.explanation import unknown_option_advice, variable_problems
from megaswift.compat.names.answers import foreign_value_advice
from megaswift.compat.names.inference import (
    EVALUATION_TASKS,
    HINTS_OF,
    NEUTRAL_OF,
    PATTERNS,
    VALUES_ELSEWHERE_OF_INFERENCE,
)
from megaswift.compat.names.translated import JSON_TEXTS, PRECISIONS
from megaswift.compat.variables import unread_variables_notices
from megaswift.config.sections import SECTIONS
from megaswift.errors import Problem
from megaswift.options.given_options import unknown_option_problem
from megaswift.options.sources import AcceptedOption, ConfigSource, GivenOptionValue
from megaswift.options.values import FALSE, TRUE

EVALUATION_DATASET = "eval_dataset"
"""ms-swift's name of `--tasks`, whose values are EvalScope's names."""
JUDGES = ("orm_model", "prm_model")
"""ms-swift's names of what scores completions: a function, or a model."""
ENGINES = ("transformers", "pt", "vllm")
"""Values of ms-swift's `sampler_engine` that `--infer_backend` has."""
JUDGE_NAMES = {"math": "accuracy", "accuracy": "accuracy", "format": "format", "cosine": "cosine"}
"""ms-swift's functions for `orm_model` -> reward functions here."""


@dataclass(frozen=True)
class InferenceToolkits:
    """The names of one command."""

    command: str

    def translate(self, sources: Sequence[ConfigSource], known: Mapping[str, str]) -> list[ConfigSource]:
        """Return the sources in megaswift's terms: `bf16 true` is `torch_dtype bfloat16`."""
        return [self._translated(source, known) for source in sources]

    def explain(self, given: GivenOptionValue, known: Mapping[str, str], task: str | None) -> list[Problem]:
        """Return what is wrong with an option that the command does not have; empty where no table has the name."""
        neutral = NEUTRAL_OF[self.command].get(given.name)
        advice = self._advice(given.name)
        if neutral is not None:
            rule = f"is not supported: {neutral.reason}"
            return [Problem(given.label, rule, advice or neutral.otherwise or "leave it out")]
        if variables := variable_problems(given):
            return variables
        if not advice or str(given.value).strip().lower() in FALSE:
            advice = unknown_option_advice(given, known)
        return [unknown_option_problem(given, known, SECTIONS, self.command, advice)] if advice else []

    def instead(self, option: str, value: Any) -> str:
        """Return what to do in place of another toolkit's value of `option`; empty where no table has it."""
        text = str(value).strip().lower()
        return VALUES_ELSEWHERE_OF_INFERENCE.get((option, text)) or foreign_value_advice(option, text)

    def unread_variables(self, environ: Mapping[str, str]) -> Iterator[str]:
        """Yield a line for each kind of variables of ms-swift that are set."""
        return unread_variables_notices(environ)

    def _translated(self, source: ConfigSource, known: Mapping[str, str]) -> ConfigSource:
        givens: list[GivenOptionValue] = []
        accepted: list[AcceptedOption] = []
        for given in _translated_options(source.givens, self.command):
            neutral = None if given.name in known else NEUTRAL_OF[self.command].get(given.name)
            if neutral is not None and neutral.accepts(given.value):
                accepted.append(AcceptedOption(given.name, given.name, given.label, neutral.reason))
            else:
                givens.append(given)
        return replace(source, givens=tuple(givens), accepted=tuple(accepted))

    def _advice(self, name: str) -> str:
        """What replaces an option in this command alone."""
        hint = HINTS_OF[self.command].get(name)
        families = (text for rule, text, commands in PATTERNS if self.command in commands and re.fullmatch(rule, name))
        return hint or next(families, "")


def _translated_options(givens: Sequence[GivenOptionValue], command: str) -> Iterator[GivenOptionValue]:
    for given in givens:
        if command == "eval" and given.name == EVALUATION_DATASET:
            given = replace(given, value=_evaluation_tasks(given.value))
        if command == "sample" and given.name in JUDGES:
            given = replace(given, name="reward_model" if _names_folder(given.value) else "reward_funcs")
            given = given if given.name == "reward_model" else replace(given, value=_reward_functions(given.value))
        if command == "sample" and given.name == "sampler_engine" and str(given.value).lower() in ENGINES:
            given = replace(given, name="infer_backend")
        dtype = PRECISIONS.get(given.name)
        is_on = dtype is not None and str(given.value).strip().lower() in TRUE
        if given.name in JSON_TEXTS and isinstance(given.value, dict):
            yield replace(given, value=json.dumps(given.value))
        elif is_on:
            yield replace(given, name="torch_dtype", value=dtype)
        else:
            yield given


def _evaluation_tasks(value: Any) -> list[str]:
    """The names of benchmarks as tasks of lm-evaluation-harness."""
    words = value if isinstance(value, list | tuple) else [value]
    return [EVALUATION_TASKS.get(str(word).strip().lower(), str(word)) for word in words]


def _names_folder(value: Any) -> bool:
    """Whether a judge is a model rather than a function."""
    words = value if isinstance(value, list | tuple) else [value]
    return not all(str(word).lower() in JUDGE_NAMES or ".py:" in str(word) for word in words)


def _reward_functions(value: Any) -> list[str]:
    words = value if isinstance(value, list | tuple) else [value]
    return [JUDGE_NAMES.get(str(word).lower(), str(word)) for word in words]
