"""completions.jsonl: completions with their rewards and advantages, written by rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaswift.trainers.hook import Run, StepRecord
from megaswift.trainers.hooks.metrics import JsonLinesHook
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion
from megaswift.trainers.rl.scorer import ScoredCompletion
from megaswift.trainers.rl.source import RolloutSource


class CompletionsLog(JsonLinesHook):
    """Writes a line for each completion, with the first step that trains on it."""

    def __init__(self, path: Path, source: RolloutSource, most: int | None) -> None:
        super().__init__(path)
        self.source = source
        self.most = most
        """Maximum lines of a generation; None: all."""

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Write the generation if this step is the first to use it."""
        if self.source.fresh:
            self.write(*(completion_line(step.number, *sample) for sample in self.source.fresh[: self.most]))


def completion_line(step: int, rollout: ScoredCompletion, advantage: float) -> dict[str, Any]:
    """Return the line of a completion."""
    rewards: dict[str, Any] = {f"rewards/{name}": value for name, value in rollout.rewards.items()}
    if rollout.tokens is not None:
        rewards["token_rewards"] = rollout.by_token
    if isinstance(rollout.completion, MultiTurnCompletion):
        rewards["turn_rewards"] = rollout.completion.rewards
    return {
        "step": step,
        "prompt": rollout.prompt.content,
        "completion": completion_text(rollout),
        "reward": rollout.total,
        **rewards,
        "advantage": advantage,
        "tokens": len(rollout.completion.token_ids),
        "finished": rollout.completion.finished,
    }


def completion_text(rollout: ScoredCompletion) -> Any:
    """Return the text of a completion; for a conversation its messages."""
    return list(rollout.completion.messages) if isinstance(rollout.completion, MultiTurnCompletion) else rollout.text
