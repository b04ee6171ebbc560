"""Tokens that are trained on are the tokens that were sampled, after the tokens that the sampler was given, whatever
the chat template: 64 kinds of published templates, 10,000 dialogues with tools and reasoning.

Covers: megaswift/trainers/rl/multi_turn.py, megaswift/trainers/rl/chat_turns.py, megaswift/data/prompts/collate.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megaswift.data.batches.collate import PaddingShape
from megaswift.data.prompts.collate import RolloutCollator
from megaswift.data.prompts.source import Prompt
from megaswift.losses.contract import Batch
from megaswift.rollout.sampler import SamplingParams
from megaswift.run.policy_task import rl_settings
from megaswift.trainers.rl.chat_turns import ChatTurns
from megaswift.trainers.rl.environment import EnvironmentWithNamedErrors
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion, MultiTurnRunner
from megaswift.trainers.rl.scorer import ScoredCompletion
from megaswift.trainers.rl.source import scored_completion_to_rollout_tokens
from tests.trainers.rl.dialogues import TOOLS, Gap, Recorder, World, prompts, template_file, tokenizer_for, turn_mark
from tests.trainers.rl.makers import config

USER_ONLY = [
    "MiniMax-M2",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen-Qwen3Guard-Gen-4B",
    "baidu-ERNIE-4.5-VL-28B-A3B-PT",
    "cohere",
    "cohere2",
    "gemma",
    "gemma3",
    "gptoss",
    "microsoft-Phi-4-reasoning",
    "microsoft-phi-4",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "phi3",
    "zai-org-GLM-Z1-32B-0414",
    "01-ai-Yi-1.5-9B-Chat",
    "codellama-CodeLlama-7b-Instruct-hf",
]
"""Templates that refuse a tool's result behind a text, or leave it out."""
WITH_RESULTS = [
    "Apertus-8B-Instruct",
    "Bielik-11B-v3.0-Instruct",
    "ByteDance-Seed-OSS",
    "LGAI-EXAONE-EXAONE-4.5-33B",
    "EssentialAI-rnj-1",
    "GLM-4.6",
    "GigaChat3-10B-A1.8B",
    "HuggingFaceTB-SmolLM3-3B",
    "IQuestLab-IQuest-Coder-V1-40B-Instruct",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "LGAI-EXAONE-EXAONE-4.0-32B",
    "Motif-Technologies-Motif-2.6B",
    "NVIDIA-Nemotron-Nano-v2",
    "NousResearch-Hermes-4-14B",
    "PrimeIntellect-INTELLECT-3",
    "Qwen-QwQ-32B",
    "ServiceNow-AI-Apriel-1.5-15b-Thinker",
    "arcee-ai-AFM-4.5B",
    "deepseek-ai-DeepSeek-V2.5",
    "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-V3.2",
    "deepseek_r1_distill",
    "deepseekv3",
    "gemma4_v2",
    "glm4moe",
    "ibm-granite-granite-3.3-2B-Instruct",
    "ibm-granite-granite-4.0",
    "inclusionAI-Ling-2.6-flash",
    "inclusionAI-Ring-1T",
    "internlm-Intern-S1-Pro",
    "lfm2",
    "lfm2_2_5",
    "llama3",
    "llama3_1",
    "llama3_2",
    "meetkai-functionary-medium-v3.1",
    "meituan-longcat-LongCat-Flash-Chat",
    "mistralai-Ministral-3-14B-Instruct-2512",
    "muse_glimmer",
    "nemotron_3_nano",
    "nemotron_3_ultra",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_6",
    "qwen3_instruct_2507",
    "zai-org-GLM-4.5V",
]
KINDS = (*USER_ONLY, *WITH_RESULTS)
DIALOGUES = 10_000
MOST = 20_000
"""Tokens of a dialogue."""


@cache
def tokenizer_of(name: str) -> Any:
    return tokenizer_for(template_file(name).read_text(encoding="utf-8"))


def written(name: str, tools: bool, count: int, seed: int) -> tuple[Recorder, list[Prompt], list[MultiTurnCompletion]]:
    """Dialogues under a template, with what the sampler recorded."""
    tokenizer = tokenizer_of(name)
    roles = ("user",) if name in USER_ONLY else ("user", "tool")
    recorder = Recorder(tokenizer, tools, seed)
    runner = MultiTurnRunner(
        lambda: EnvironmentWithNamedErrors("--environment w.py:World", World(roles, seed)),  # type: ignore[arg-type]
        ChatTurns(tokenizer),
        None,
    )
    asked = [*prompts(tokenizer, tools, count)]
    sampling = SamplingParams(MOST, stop_token_ids=recorder.stops)
    sampler: Any = recorder
    found = runner.write(sampler, sampling, asked, range(count))
    return recorder, asked, [talk for talk in found if isinstance(talk, MultiTurnCompletion)]


def trained(asked: list[Prompt], talks: list[MultiTurnCompletion], packing: bool) -> list[Batch]:
    """The micro-batches of the trainer, four dialogues each."""
    settings = rl_settings(config(environment="w.py:World"), 1)
    tokens = [
        scored_completion_to_rollout_tokens(i, ScoredCompletion(talk.prompt(prompt), talk, "", {}, 0.0), settings)
        for i, (prompt, talk) in enumerate(zip(asked, talks, strict=True))
    ]
    length = max(len(one.prompt) + len(one.written) for one in tokens)
    shape = PaddingShape(minimum=length)
    collator = RolloutCollator(shape, packing, uniform=False)
    return collator.batches([tokens[i : i + 4] for i in range(0, len(tokens), 4)])


def check_batches(recorder: Recorder, batches: list[Batch], count: int) -> None:
    """The labels are the sampled tokens with the sampler's log-probabilities, and before each turn are the tokens that
    the sampler was given for it."""
    sampled = [said for number in range(count) for said in recorder.said[number]]
    labels = [t for batch in batches for t in batch.labels[batch.loss_weights != 0].tolist()]
    assert labels == [token for _, completion in sampled for token in completion.token_ids]
    logprobs = [v for batch in batches for v in batch.fields["sampled"][batch.loss_weights != 0].tolist()]
    assert logprobs == pytest.approx([v for _, completion in sampled for v in completion.logprobs], abs=1e-6)


def check_contexts(recorder: Recorder, prompt: Prompt, talk: MultiTurnCompletion) -> None:
    """Each turn stands behind the tokens that the sampler was given for it."""
    ids = (*prompt.token_ids, *talk.token_ids)
    own = (*[False] * len(prompt.token_ids), *talk.own)
    marked = [False] * len(ids)
    for context, completion in recorder.said[prompt.number]:
        end = len(context) + len(completion.token_ids)
        assert ids[:end] == (*context, *completion.token_ids)
        marked[len(context) : end] = [True] * len(completion.token_ids)
    assert own == tuple(marked)


def gaps(recorder: Recorder, prompt: Prompt, talk: MultiTurnCompletion, tools: bool) -> Iterator[Gap]:
    """The texts between turns of the model, with transformers' rendering of the whole conversation."""
    tokenizer = recorder.tokenizer
    said = recorder.said[prompt.number]
    places = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
    ids = (*prompt.token_ids, *talk.token_ids)
    for turn, (place, after) in enumerate(zip(places, places[1:], strict=False)):
        context, completion = said[turn]
        end = len(context) + len(completion.token_ids)
        ended = completion.token_ids[-1] in recorder.stops
        assert isinstance(prompt.content, tuple)
        yield Gap(
            tokenizer.decode(ids[end : len(said[turn + 1][0])]),
            tokenizer.decode(ids[:end]),
            talk.messages[place]["content"],
            tuple(message["content"][:4] for message in talk.messages[place + 1 : after]),
            turn_mark(turn),
            tokenizer.apply_chat_template(
                [*prompt.content, *talk.messages[:after]],
                tools=TOOLS if tools else None,
                tokenize=False,
                add_generation_prompt=True,
            ),
            tokenizer.decode(completion.token_ids[-1:]) if ended else "",
        )


def faults_of(name: str, count: int, seed: int = 1) -> Counter[str]:
    """How often each fault was found, and how many turns were looked at."""
    tokenizer = tokenizer_of(name)
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    specials = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
    found: Counter[str] = Counter()
    for tools, part in ((True, count - count // 2), (False, count // 2)):
        if not part:
            continue
        recorder, asked, talks = written(name, tools, part, seed)
        for packing in (False, True):
            check_batches(recorder, trained(asked, talks, packing), part)
        for prompt, talk in zip(asked, talks, strict=True):
            check_contexts(recorder, prompt, talk)
            found["turns"] += len(recorder.said[prompt.number])
            faults = [gap.fault(specials) for gap in gaps(recorder, prompt, talk, tools)]
            found.update(fault for fault in faults if fault)
    return found


def test_there_are_64_kinds() -> None:
    assert len(KINDS) == len({*KINDS}) == 64 and all(isinstance(template_file(name), Path) for name in KINDS)


@pytest.mark.wide
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "count", [pytest.param(6, id="few"), pytest.param(-(-DIALOGUES // len(KINDS)), id="all", marks=pytest.mark.slow)]
)
def test_tokens_trained_are_tokens_sampled(name: str, count: int) -> None:
    found = faults_of(name, count)
    turns = found.pop("turns")
    assert turns > 2 * count and not found
