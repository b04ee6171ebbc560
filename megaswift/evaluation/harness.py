"""Runs tasks by lm-evaluation-harness: on a model in this process, as its own backend `hf` does, or on a server.

The scores are lm-evaluation-harness's own. Added are intervals, where a score is a function of sums over questions.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import ClientError
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.utils import handle_non_serializable

from megaswift import log
from megaswift.base.atomic_writes import write_atomically
from megaswift.errors import Problem, UserError, first_line
from megaswift.evaluation.question_task import MAX_NEW_TOKENS, QuestionTask
from megaswift.evaluation.results import EvaluationResult, QuestionScores, TaskScore
from megaswift.evaluation.scores import TRANSFORMS, Weighted, bootstrap
from megaswift.evaluation.task_library import REFUSALS, kept_random_state, quiet_harness

ROUNDING = 1e-9
"""A score is the function of its questions' sums that is equal to it up to this share."""
PLAIN = "none"
"""lm-evaluation-harness's name of no filter."""


@dataclass(frozen=True)
class HarnessRun:
    """How tasks are run."""

    num_fewshot: int | None = None
    limit: float | None = None
    batch_size: int = 8
    seed: int = 1234
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of generation over those of the tasks."""
    confirm_run_unsafe_code: bool = False
    bootstrap_iters: int = 1000
    shows_bars: bool = True
    """Whether bars of progress go to standard error."""


def local_model(model: Any, tokenizer: Any, batch_size: int, **how: Any) -> HFLM:
    """Return a transformers model as lm-evaluation-harness sees models of its backend `hf`."""
    with quiet_harness(), kept_random_state():
        sees = getattr(model.config, "vision_config", None) is not None
        backend = "causal" if sees else "default"
        return HFLM(pretrained=model, tokenizer=tokenizer, backend=backend, batch_size=batch_size, **how)


def server_model(
    base_url: str, name: str, tokenizer: Path | None, token: str | None, batch_size: int, **how: Any
) -> LocalCompletionsAPI:
    """Return a model behind OpenAI's API. Without a tokenizer only conversations are answered, and nothing is scored
    by log-probabilities."""
    address = base_url.rstrip("/")
    header = {"Authorization": f"Bearer {token}"} if token else None
    with quiet_harness():
        if tokenizer is None:
            url = f"{address}/chat/completions"
            return LocalChatCompletion(base_url=url, model=name, header=header, batch_size=1, **how)
        return LocalCompletionsAPI(
            base_url=f"{address}/completions",
            model=name,
            tokenizer=str(tokenizer),
            tokenizer_backend="huggingface",
            header=header,
            batch_size=batch_size,
            **how,
        )


def run_tasks(lm: Any, tasks: Mapping[str, Any], run: HarnessRun) -> dict[str, Any]:
    """Run loaded tasks; return the results as lm-evaluation-harness has them."""
    try:
        with quiet_harness() as notes, kept_random_state(), _bars(run.shows_bars):
            random.seed(run.seed)
            np.random.seed(run.seed)
            torch.manual_seed(run.seed)
            for task in tasks["tasks"].values():
                _configure(task, lm, run)
            found = evaluator.evaluate(
                lm,
                tasks,
                limit=run.limit,
                bootstrap_iters=run.bootstrap_iters,
                system_instruction=run.system,
                apply_chat_template=run.apply_chat_template,
                fewshot_as_multiturn=run.fewshot_as_multiturn,
                confirm_run_unsafe_code=run.confirm_run_unsafe_code,
            )
    except torch.OutOfMemoryError as error:
        raise UserError(Problem("GPU memory", first_line(error), "use a smaller --batch_size")) from None
    except (*REFUSALS, ClientError) as error:
        raise UserError(Problem("--tasks", f"lm-evaluation-harness fails: {_reason(error)}", _fix(error))) from error
    if notes.cut:
        log.warn("some questions are longer than the model's context: their beginning was cut off (--max_length)")
    assert found is not None, "this process evaluates alone"
    return dict(found)


def _bars(shown: bool) -> AbstractContextManager[Any]:
    """A context that drops bars of progress; lm-evaluation-harness has no switch for them here."""
    return nullcontext() if shown else redirect_stderr(io.StringIO())


def _configure(task: Any, lm: Any, run: HarnessRun) -> None:
    """Apply the options to a task, by lm-evaluation-harness's rules: a task that says 0 examples gets none."""
    if task.get_config("output_type") == "generate_until":
        arguments = dict(run.gen_kwargs)
        if isinstance(task, QuestionTask):
            arguments = {"max_gen_toks": min(MAX_NEW_TOKENS, max(1, lm.max_length // 2))} | arguments
        if arguments:
            task.set_config(key="generation_kwargs", value=arguments, update=True)
    fewshot = task.get_config("num_fewshot")
    if run.num_fewshot is not None and fewshot != 0:
        task.set_config(key="num_fewshot", value=run.num_fewshot)
    elif fewshot is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=run.seed)
    if isinstance(task, QuestionTask):
        task.template = lm.apply_chat_template


def _reason(error: BaseException) -> str:
    """The first line of an error, with its kind, where it is a server's or says little."""
    return f"{type(error).__name__}: {first_line(error)}"


def _fix(error: BaseException) -> str:
    if "confirm_run_unsafe_code" in str(error):
        return "--confirm_run_unsafe_code true, where programs of the model may run on this machine"
    return "--limit 1 finds the task that fails"


def result_of(model: str, found: Mapping[str, Any], run: HarnessRun, settings: Mapping[str, Any]) -> EvaluationResult:
    """Return scores with intervals from the results of lm-evaluation-harness."""
    scores: list[TaskScore] = []
    questions: dict[str, dict[str, QuestionScores]] = {}
    for task, values in found["results"].items():
        better = found["higher_is_better"].get(task, {})
        samples = found.get("samples", {}).get(task, ())
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            shown = metric if kind == PLAIN else key
            stderr = values.get(f"{metric}_stderr,{kind}")
            scored = _question_scores(samples, metric, kind, float(value))
            low = high = None
            if scored is not None and run.bootstrap_iters:
                interval = bootstrap(list(scored.items.values()), scored.transform, run.bootstrap_iters, run.seed)
                low, high = interval.low, interval.high
            if scored is not None:
                questions.setdefault(task, {})[shown] = scored
            scores.append(
                TaskScore(
                    task,
                    shown,
                    float(value),
                    float(stderr) if isinstance(stderr, int | float) else None,
                    low,
                    high,
                    int(values.get("sample_len") or len({s["doc_id"] for s in samples})),
                    better.get(metric) is not False,
                )
            )
    return EvaluationResult(model, tuple(scores), questions, settings)


def _question_scores(samples: Sequence[Any], metric: str, kind: str, value: float) -> QuestionScores | None:
    """The scores of the questions; None where the task's score is no function of sums over them."""
    items: dict[str, Weighted] = {}
    for sample in samples:
        if sample["filter"] != kind or metric not in sample:
            continue
        item = sample[metric]
        pair = item if isinstance(item, tuple | list) else (item, 1)
        if len(pair) != 2 or not all(isinstance(one, int | float | np.number) for one in pair):
            return None
        items[f"{sample['doc_id']}-{sample['doc_hash'][:12]}"] = (float(pair[0]), float(pair[1]))
    total = sum(weight for _, weight in items.values())
    if not total:
        return None
    ratio = sum(number for number, _ in items.values()) / total
    for name, transform in TRANSFORMS.items():
        with np.errstate(over="ignore"):
            if math.isclose(float(transform(ratio)), value, rel_tol=ROUNDING):
                return QuestionScores(name, items)
    return None


def write_samples(folder: Path, found: Mapping[str, Any]) -> None:
    """Write samples_TASK.jsonl: the prompt, answer and scores of each question."""
    for task, samples in found.get("samples", {}).items():
        lines = [json.dumps(s, default=handle_non_serializable, ensure_ascii=False) + "\n" for s in samples]
        write_atomically(folder / f"samples_{task.replace('/', '_')}.jsonl", "".join(lines))
