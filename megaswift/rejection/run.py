"""Samples, scores and selects: each step goes on from the journal, and the model is released before rewards are
computed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaswift import log
from megaswift.base.atomic_writes import atomic_file, write_atomically
from megaswift.evaluation.scores import bootstrap
from megaswift.rejection.journal import PromptScores, SampledCompletion, SampleJournal
from megaswift.rejection.options.sampling import SampledCompletionOptions, SelectionOptions
from megaswift.rejection.prompts import PromptToSample
from megaswift.rejection.selection import SampledPrompt, is_too_easy, pass_at_k, passes, rows_of
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.scoring import RewardFunction, RewardScores, score_rewards

SCORED_TOGETHER = 64
"""Completions that rewards get in one call, at least those of one prompt."""
ITERATIONS = 1000
Sampler = Callable[[Sequence[tuple[PromptToSample, int]], int], list[SampledCompletion]]
"""Completions of (prompt, number) pairs with a seed."""


@dataclass(frozen=True)
class SampleRun:
    """One data set to write."""

    prompts: Sequence[PromptToSample]
    journal: SampleJournal
    completions: SampledCompletionOptions
    selection: SelectionOptions
    functions: Sequence[RewardFunction]
    weights: Sequence[float]
    result: Path

    def run(self, make: Callable[[], Sampler]) -> dict[str, Any]:
        """Do what is left; return the summary. `make` loads the model, if a completion is left."""
        self.journal.open()
        self._sample(make)
        self._score()
        summary = self._write()
        self.journal.close(remove=True)
        return summary

    def _batches(self) -> list[list[tuple[int, int]]]:
        """(prompt, number) of each batch: neighbours in length, the longest first."""
        order = sorted(range(len(self.prompts)), key=lambda p: (-len(self.prompts[p].tokens.ids), p))
        flat = [(p, n) for p in order for n in range(self.completions.num_return_sequences)]
        size = self.completions.batch_size
        return [flat[i : i + size] for i in range(0, len(flat), size)]

    def _sample(self, make: Callable[[], Sampler]) -> None:
        """Sample the batches that are left. A batch has a seed of its own, so that a run that goes on draws what the
        whole run would have drawn."""
        done = self.journal.completions
        batches = list(enumerate(self._batches()))
        left = [(i, b) for i, b in batches if any(n not in done.get(p, {}) for p, n in b)]
        total = len(self.prompts) * self.completions.num_return_sequences
        if len(left) < len(batches):
            log.info(
                f"{total - sum(len(b) for _, b in left)} of {total} completions are in {self.journal.path}; going on"
            )
        if not left:
            return
        sample = make()
        began = time.monotonic()
        made = 0
        for i, batch in left:
            seed = self.completions.seed + i * self.completions.batch_size
            answers = sample([(self.prompts[p], n) for p, n in batch], seed)
            self.journal.add_completions(dict(zip(batch, answers, strict=True)))
            made += len(batch)
            rate = made / (time.monotonic() - began)
            log.info(f"{sum(map(len, done.values()))} of {total} completions, {rate:.2f} completions/s")

    def _score(self) -> None:
        """Score the prompts that are left."""
        if not self.functions:
            return
        left = [p for p in range(len(self.prompts)) if p not in self.journal.scores]
        together = max(1, SCORED_TOGETHER // self.completions.num_return_sequences)
        for start in range(0, len(left), together):
            chosen = left[start : start + together]
            inputs = [self._input(p, one) for p in chosen for one in self._of(p)]
            scored = score_rewards(self.functions, self.weights, inputs)
            size = self.completions.num_return_sequences
            for i, p in enumerate(chosen):
                self.journal.add_scores(p, _scores(scored, range(i * size, (i + 1) * size)))
            log.info(f"{start + len(chosen)} of {len(left)} prompts scored")

    def _of(self, prompt: int) -> list[SampledCompletion]:
        found = self.journal.completions[prompt]
        return [found[n] for n in range(self.completions.num_return_sequences)]

    def _input(self, number: int, completion: SampledCompletion) -> RewardInput:
        prompt = self.prompts[number]
        plain = isinstance(prompt.content, str)
        content: Any = completion.text if plain else [{"role": "assistant", "content": completion.text}]
        asked: Any = prompt.content if plain else list(prompt.content)
        return RewardInput(asked, content, completion.token_ids, completion.finished, prompt.columns)

    def _write(self) -> dict[str, Any]:
        """Write all completions, the summary and the result, each whole or not at all; return the summary."""
        sampled = [
            SampledPrompt(p.content, p.columns, p.tools, self._of(i), self.journal.scores.get(i))
            for i, p in enumerate(self.prompts)
        ]
        self.result.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.result.with_suffix(".samples.jsonl")) as fresh, fresh.open("w", encoding="utf-8") as file:
            for i, prompt in enumerate(sampled):
                for line in _lines(self.prompts[i].place, prompt):
                    file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        rows = 0
        with_rows = 0
        with atomic_file(self.result) as fresh, fresh.open("w", encoding="utf-8") as file:
            for i, prompt in enumerate(sampled):
                found = rows_of(prompt, self.selection, self.prompts[i].free_columns)
                rows += len(found)
                with_rows += bool(found)
                for row in found:
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        summary = summary_of(sampled, self.selection, self.completions.seed)
        summary |= {"rows": rows, "prompts_with_rows": with_rows}
        write_atomically(self.result.with_suffix(".summary.json"), json.dumps(summary, indent=1) + "\n")
        return summary


def _scores(scored: RewardScores, which: range) -> PromptScores:
    return PromptScores(
        {name: [_known(values[k]) for k in which] for name, values in scored.per_function.items()},
        [_known(scored.total[k]) for k in which],
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _lines(place: str, prompt: SampledPrompt) -> list[dict[str, Any]]:
    """A line for each completion, with its rewards."""
    scores = prompt.scores
    return [
        {
            "row": place,
            "prompt": prompt.content,
            "completion": one.text,
            "finished": one.finished,
            "tokens": len(one.token_ids),
            **({} if scores is None else {"reward": scores.total[n]}),
            **({} if scores is None else {"rewards": {name: v[n] for name, v in scores.per_function.items()}}),
        }
        for n, one in enumerate(prompt.completions)
    ]


def summary_of(sampled: Sequence[SampledPrompt], options: SelectionOptions, seed: int) -> dict[str, Any]:
    """Return counts, the mean reward and pass@k with intervals over prompts."""
    count = len(sampled[0].completions)
    completions = [one for prompt in sampled for one in prompt.completions]
    summary: dict[str, Any] = {
        "prompts": len(sampled),
        "completions": len(completions),
        "truncated": sum(not one.finished for one in completions),
    }
    if sampled[0].scores is None:
        return summary
    rewards = [r for prompt in sampled if prompt.scores for r in prompt.scores.total if r is not None]
    summary["mean_reward"] = sum(rewards) / len(rewards) if rewards else None
    passed = [passes(prompt, options.pass_threshold) for prompt in sampled]
    summary["pass_threshold"] = options.pass_threshold
    summary["pass@k"] = {str(k): _pass_figures(count, passed, k, seed) for k in pass_sizes(count)}
    summary["left_out_as_easy"] = sum(is_too_easy(prompt, options) for prompt in sampled)
    return summary


def pass_sizes(count: int) -> list[int]:
    """Return the k of pass@k: powers of two below the number of completions, and that number."""
    return sorted({*(2**i for i in range(count.bit_length()) if 2**i <= count), count})


def _pass_figures(count: int, passed: Sequence[int], k: int, seed: int) -> Mapping[str, float]:
    found = bootstrap([(pass_at_k(count, c, k), 1.0) for c in passed], "mean", ITERATIONS, seed)
    return {"value": found.value, "low": found.low, "high": found.high}
