"""Conversations on ranks that share an engine: all of them ask it for the same, whatever the environment answers."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from megaswift.data.prompts.source import Prompt
from megaswift.errors import Problem, RewardError, UserError
from megaswift.rollout.sampler import Completion, SamplingParams
from megaswift.trainers.rl.chat_turns import ChatTurns
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors
from megaswift.trainers.rl.multi_turn import MultiTurnRunner
from megaswift.trainers.rl.shared_engine import EngineRanks
from tests.data import makers
from tests.parity.pool import shared

RANKS, ENGINE = 4, 2
PLAYED, ENVIRONMENT, SAMPLER = "played", "environment", "sampler"


class World:
    """Answers by chance, after a time by chance: no two ranks would have the same conversation."""

    fails = False

    def reset(self, prompt: Any, **columns: Any) -> None:
        self.chance = random.Random(os.urandom(8))

    def step(self, answer: str) -> Any:
        if self.fails:
            raise ValueError("no answer")
        time.sleep(self.chance.random() / 20)
        return [{"role": "user", "content": str(self.chance.random())}], 0.5, self.chance.random() < 0.2


@dataclass
class Part:
    """A rank's part of an engine: its calls wait for the other ranks' calls."""

    group: Any
    end: int
    fails: bool = False
    calls: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def generate(self, prompts: Any, sampling: SamplingParams, seeds: Any) -> list[Completion]:
        dist.barrier(self.group)
        if self.fails:
            raise UserError(Problem("the engine", "failed"))
        self.calls.append(([*prompts], sampling, [*seeds]))
        return [Completion((20 + seed % 50, self.end), (-0.5, -0.5), True) for seed in seeds]


def go(rank: int, world: int, _: None) -> dict[str, tuple[list[Any], list[Any] | str]]:
    """The calls of a rank, and the conversations or the error; first two that fail."""
    from megaswift.engine.process_group import init_default_and_gloo_process_groups

    init_default_and_gloo_process_groups("gloo", 60)
    tokenizer = makers.tokenizer("qwen", "qwen2_5")
    said = ({"role": "user", "content": "go"},)
    ids = tuple(tokenizer.apply_chat_template(list(said), add_generation_prompt=True, return_dict=False))
    prompts = [Prompt(row, ids, said, {}) for row in range(8)]
    ranks = EngineRanks(ENGINE, 60)
    found: dict[str, tuple[list[Any], list[Any] | str]] = {}
    for what in (ENVIRONMENT, SAMPLER, PLAYED):
        sampler: Any = Part(ranks.group, tokenizer.convert_tokens_to_ids("<|im_end|>"), what == SAMPLER)
        made = type("Made", (World,), {"fails": what == ENVIRONMENT})
        runner = MultiTurnRunner(lambda made=made: EnvironmentWithNamedErrors("w", made()), ChatTurns(tokenizer), 9)  # type: ignore[misc]

        def work(leading: Any, runner: MultiTurnRunner = runner) -> list[Any]:
            return runner.write(leading, SamplingParams(400), prompts, range(8 * rank, 8 * rank + 8))

        outcome: list[Any] | str
        try:
            outcome = ranks.lead(sampler, work)
        except UserError as error:
            outcome = type(error).__name__
        found[what] = (sampler.calls, outcome)
    return found


@pytest.mark.process
def test_ranks_of_an_engine_ask_it_for_the_same() -> None:
    """Also after an environment or the engine has failed."""
    ranks = shared().run("tests.trainers.rl.test_shared_engine:go", None, RANKS, timeout=120.0)
    for what in (ENVIRONMENT, SAMPLER, PLAYED):
        calls = [found[what][0] for found in ranks]
        assert calls[::ENGINE] == calls[1::ENGINE]
    leading, following = ([found[what][1] for what in (ENVIRONMENT, SAMPLER)] for found in ranks[:ENGINE])
    assert leading == [RewardError.__name__, UserError.__name__] and following == [[], UserError.__name__]
    played = [found[PLAYED] for found in ranks]
    assert played[0][0] != played[ENGINE][0] and len(played[0][0]) > 2
    assert [len(conversations) for _, conversations in played] == [8, 0] * (RANKS // ENGINE)
