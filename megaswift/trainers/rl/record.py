"""completions.jsonl: what was sampled, with its rewards and advantages. Rank 0 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaswift.trainers import agree
from megaswift.trainers.hook import Hook, Step
from megaswift.trainers.metrics import drop_after
from megaswift.trainers.rl.conversation import Conversation
from megaswift.trainers.rl.judge import Rollout
from megaswift.trainers.rl.source import RolloutSource

if TYPE_CHECKING:
    from megaswift.trainers.loop import Loop


class Record(Hook):
    """A table of samples: a line a completion, written with the first step that trains on it."""

    def __init__(self, path: Path, source: RolloutSource, most: int | None) -> None:
        self.path, self.source, self.most = path, source, most
        """`most`: lines of a generation; None: all."""

    def on_start(self, loop: Loop) -> None:
        """Drops the lines past the checkpoint."""
        if agree.rank() == 0:
            drop_after(self.path, loop.step)

    def on_step(self, loop: Loop, step: Step) -> None:
        """The generation that this step was the first to use."""
        if agree.rank() != 0 or not (rollouts := self.source.fresh):
            return
        with self.path.open("a", encoding="utf-8") as file:
            for r, advantage in rollouts[: self.most]:
                line: dict[str, Any] = {"step": step.number, "prompt": r.prompt.said, "completion": said(r), "reward": r.total}
                line |= {f"rewards/{name}": value for name, value in r.rewards.items()}
                line |= {"advantage": advantage, "tokens": len(r.completion.token_ids), "finished": r.completion.finished}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def said(rollout: Rollout) -> Any:
    """The text; of a conversation its messages."""
    return list(rollout.completion.messages) if isinstance(rollout.completion, Conversation) else rollout.text
