"""A conversation with the environment `glossary`, where verifiers is installed: a call, its result, and an answer."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megaswift.data.prompts.source import Prompt
from megaswift.rollout.sampler import SamplingParams
from megaswift.trainers.rl.chat_turns import ChatTurns
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors, load_environment_class
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, MultiTurnRunner
from tests.data import makers
from tests.trainers.rl.agents.test_endpoint import Says, check_segments


def check_call_and_answer() -> None:
    """Assert the environment's reward for a right answer, and that the tokens are those that the sampler gave."""
    tokenizer = makers.tokenizer("qwen", "qwen2_5")
    make = load_environment_class("verifiers:glossary")
    name, fact = next(iter(import_module("glossary.servers.facts").FACTS.items()))
    call = f'<tool_call>\n{{"name": "facts_lookup", "arguments": {{"name": "{name}"}}}}\n</tool_call>'
    sampler: Any = Says(tokenizer, call, f"<answer>{fact}</answer>")
    runner = MultiTurnRunner(
        lambda: EnvironmentWithNamedErrors("--environment verifiers:glossary", make()), ChatTurns(tokenizer), None
    )
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = Prompt(0, (1, 2), ({"role": "user", "content": "task 0"},), {"task": 0})
    (found,) = runner.write(sampler, SamplingParams(4000, stop_token_ids=(stop,)), [prompt], [1])
    assert isinstance(found, MultiTurnCompletion)
    assert found.reward == 1.0 and found.segments == ("first",) and found.turns == 2, found
    assert fact in found.messages[1]["content"] and found.messages[1]["role"] == "tool"
    check_segments(found, sampler.asked)
