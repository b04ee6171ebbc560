"""Completions that nobody sampled: known from prompt and seed alone, for runs whose samples must be those of another
toolkit.

`write_task` makes what such runs read. `run` is `runs.run` with the transformers sampler replaced, on the ranks, by one
that plays; `played` says what it plays.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaswift.rollout.sampler import BatchImages, Completion, SamplerOptions, SamplingParams
from tests.parity.models import build as build_model
from tests.parity.pool import shared
from tests.trainers.inputs import write_model

SPECIAL, DIGITS, STOP = 4, range(30, 40), 1
"""Of the tokenizer of `inputs.write_model`: special tokens, the tokens of 0 to 9, the end of a turn."""


REWARD = '''"""Rewards that differ."""


def worth(completions, weight, **_):
    """The mean of the digits, by how much the row's column says."""
    digits = [[int(d) for d in c[0]["content"] if d.isdigit()] for c in completions]
    return [w * sum(some) / (9 * len(some)) for some, w in zip(digits, weight)]
'''


def write_task(folder: Path, prompts: int) -> None:
    """model/ and moe/, prompts of different lengths in rows with a column, and a file of rewards."""
    write_model(folder / "model")
    build_model("moe", folder / "moe")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / "model" / name, folder / "moe" / name)
    rows = [
        {
            "prompt": [{"role": "user", "content": "+".join(str((3 * i + k) % 10) for k in range(1 + i % 4))}],
            "weight": 1 + i % 3,
        }
        for i in range(prompts)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")


def played(seed: int, length: int | None = None) -> Completion:
    """Two to eight digits, or `length` tokens, of which the last is the end of the turn in two of three."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(3, 9)) if length is None else length
    ids = draw.choice(DIGITS, count).tolist()
    finished = length is not None or bool(draw.integers(3))
    if finished:
        ids[-1] = STOP
    return Completion(tuple(ids), tuple((-1.0 - draw.random(count)).astype(np.float32).tolist()), finished)


class Player:
    """A sampler without a model."""

    def __init__(self, length: int | None) -> None:
        self.length = length

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """What belongs to the seeds."""
        return [played(seed, self.length) for _, seed in zip(prompts, seeds, strict=True)]

    def generate_with_images(
        self, prompts: Sequence[Sequence[int]], images: BatchImages, sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """The same, whatever the images."""
        assert len(images.of) == len(prompts)
        return self.generate(prompts, sampling, seeds)

    def update_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Takes them all: the stream is collective."""
        for _ in weights:
            pass

    def update_adapter(self, folder: Path) -> None:
        """They are there, and nobody reads them."""
        assert (folder / "adapter_model.safetensors").is_file()

    def sleep(self) -> None:
        """Nothing to give back."""

    wake = close = sleep


def run(
    inputs: Sequence[str], out: Path, *options: object, ranks: int = 2, length: int | None = None, task: str = "grpo"
) -> str:
    """A run of a policy on played completions that succeeds; what its ranks printed."""
    words = [*inputs, "--output_dir", str(out), *map(str, options)]
    return shared().logged("tests.trainers.played:work", (task, words, length), ranks, timeout=240.0)


def work(rank: int, world: int, command: tuple[str, list[str], int | None]) -> None:
    """The life of a worker (on the ranks)."""
    from megaswift.commands.training import main
    from megaswift.rollout.backends import transformers_sampler

    task, words, length = command

    def build(folder: Path, options: SamplerOptions) -> Any:
        return Player(length)

    transformers_sampler.build = build  # type: ignore[assignment]
    sys.argv = [f"megaswift/{task}.py", *words]
    code = main(task, words)
    assert code == 0, f"exit code {code}"
