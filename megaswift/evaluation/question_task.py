"""A file of questions as a task of lm-evaluation-harness, which asks the model.

Answers are scored by exact match and F1, choices by which one is likeliest (as it is, and by its length in bytes),
plain texts by perplexity: of lm-evaluation-harness's words, bytes and bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import bits_per_byte, mean, weighted_perplexity
from lm_eval.api.task import Task
from lm_eval.config.task import TaskConfig

from megaswift.evaluation import scores
from megaswift.evaluation.questions import ANSWER, CHOICE, TEXT, Question

MAX_NEW_TOKENS = 256
"""Tokens of an answer where no option says otherwise."""
PARAGRAPH = "\n\n"
"""The end of an answer by a model without a chat template."""
_REQUESTS = {ANSWER: "generate_until", CHOICE: "multiple_choice", TEXT: "loglikelihood_rolling"}
_WEIGHTED: Mapping[str, tuple[Callable[[Any], float], str]] = {
    "word_perplexity": (weighted_perplexity, "perplexity"),
    "byte_perplexity": (weighted_perplexity, "perplexity"),
    "bits_per_byte": (bits_per_byte, "bits"),
}
"""Scores of texts: their aggregation, and the name of its function in `scores.TRANSFORMS`."""
_METRICS = {ANSWER: ("exact_match", "f1"), CHOICE: ("acc", "acc_norm"), TEXT: tuple(_WEIGHTED)}
LOWER_IS_BETTER = frozenset(("perplexity", *_WEIGHTED))
"""Scores of texts in general: also of tasks with tokens' perplexity."""


class QuestionTask(Task):
    """The questions of one file."""

    VERSION = 1

    def __init__(self, name: str, questions: Sequence[Question], chat: bool) -> None:
        """`chat`: whether questions go into the chat template, which `template` applies once there is a model."""
        self.questions = [{"number": i, "question": row.text or row.plain} for i, row in enumerate(questions)]
        self.rows = questions
        self.kind = questions[0].kind
        self.chat = chat
        self.template: Callable[..., Any] | None = None
        self.OUTPUT_TYPE = _REQUESTS[self.kind]
        super().__init__()
        generation = {"until": [] if chat else [PARAGRAPH], "do_sample": False, "max_gen_toks": MAX_NEW_TOKENS}
        answers = {"generation_kwargs": generation} if self.kind == ANSWER else {}
        self._config = TaskConfig(task=name, output_type=self.OUTPUT_TYPE, num_fewshot=0, **answers)

    def download(self, data_dir: Any = None, cache_dir: Any = None, download_mode: Any = None) -> None:
        """Nothing: the rows have been read."""

    def has_training_docs(self) -> bool:
        """There are none."""
        return False

    def has_validation_docs(self) -> bool:
        """There are none."""
        return False

    def has_test_docs(self) -> bool:
        """The rows."""
        return True

    def test_docs(self) -> list[dict[str, Any]]:
        """The rows, by number."""
        return self.questions

    def _row(self, doc: Mapping[str, Any]) -> Question:
        return self.rows[doc["number"]]

    def doc_to_text(self, doc: Mapping[str, Any]) -> str:
        """The question as text."""
        return self._row(doc).plain

    def doc_to_target(self, doc: Mapping[str, Any]) -> Any:
        """The right answer."""
        row = self._row(doc)
        return {ANSWER: list(row.references), CHOICE: row.label, TEXT: row.text}[self.kind]

    def fewshot_context(self, doc: Mapping[str, Any], num_fewshot: int, **how: Any) -> Any:
        """The prompt: the conversation by the chat template, or its text and a line for the answer."""
        row = self._row(doc)
        if self.kind == TEXT:
            return ""
        system = how.get("system_instruction")
        own = row.messages[0]["role"] == "system"
        messages = [{"role": "system", "content": system}, *row.messages] if system and not own else [*row.messages]
        if self.chat:
            assert self.template is not None, "set before the tasks run"
            return self.template(messages)
        return "".join(f"{message['content']}\n" for message in messages)

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **how: Any) -> Any:
        """What the model is asked of a row."""
        row = self._row(doc)
        metadata = {"metadata": how["metadata"]}
        if self.kind == ANSWER:
            arguments: tuple[Any, ...] = (ctx, dict(self.config.generation_kwargs))
            return Instance(request_type="generate_until", doc=doc, arguments=arguments, idx=0, **metadata)
        if self.kind == TEXT:
            return Instance(request_type="loglikelihood_rolling", doc=doc, arguments=(row.text,), idx=0, **metadata)
        return [
            Instance(request_type="loglikelihood", doc=doc, arguments=(ctx, choice), idx=i, **metadata)
            for i, choice in enumerate(row.choices)
        ]

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """The scores of a row."""
        row = self._row(doc)
        if self.kind == ANSWER:
            answer = results[0]
            return {
                "exact_match": scores.exact_match(answer, row.references),
                "f1": scores.f1(answer, row.references),
            }
        if self.kind == CHOICE:
            likely = [logprob for logprob, _ in results]
            by_byte = [p / len(choice.encode()) for p, choice in zip(likely, row.choices, strict=True)]
            return {
                "acc": float(likely.index(max(likely)) == row.label),
                "acc_norm": float(by_byte.index(max(by_byte)) == row.label),
            }
        (logprob,) = results
        sizes = len(row.text.encode())
        words = len(re.split(r"\s+", row.text))
        return {
            "word_perplexity": (logprob, words),
            "byte_perplexity": (logprob, sizes),
            "bits_per_byte": (logprob, sizes),
        }

    def aggregation(self) -> dict[str, Callable[[Any], float]]:
        """How the scores of rows make the task's."""
        return {name: _WEIGHTED[name][0] if name in _WEIGHTED else mean for name in _METRICS[self.kind]}

    def higher_is_better(self) -> dict[str, bool]:
        """For each score."""
        return {name: name not in LOWER_IS_BETTER for name in _METRICS[self.kind]}


def transform_of(metric: str) -> str:
    """Return the function of sums in `scores.TRANSFORMS` that makes a score of (value, weight) pairs."""
    return _WEIGHTED[metric][1] if metric in _WEIGHTED else "mean"


def task_name(file: str) -> str:
    """Return the name of a file of questions: that of the file, without folder and suffix."""
    return Path(file.partition("#")[0]).stem
