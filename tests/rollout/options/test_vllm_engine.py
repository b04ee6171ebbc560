"""Arguments of vLLM's engine in the training process: what weight sync relies on is refused, each with a reason."""

from __future__ import annotations

import importlib.util
import inspect
import json

import pytest

from megaswift.inference.options.backends import ENGINE_ARGUMENTS, SET_BY_OPTIONS
from megaswift.rollout.options.vllm_engine import FIXED_ARGUMENTS, OPTION_OF
from tests.config.refusals import problems

BASE = "grpo --reward_funcs length --use_vllm --vllm_engine_kwargs "


def kwargs(**given: object) -> list[str]:
    return problems(BASE + json.dumps(given, separators=(",", ":")))


def test_what_may_be_set_and_what_not() -> None:
    assert kwargs(block_size=16, kv_cache_dtype="fp8") == []
    assert kwargs(logprobs_mode="raw_logprobs") == [
        "--vllm_engine_kwargs logprobs_mode: cannot be set in the training process: sampling relies on it"
    ]
    assert [("weight sync" in p) for p in kwargs(load_format="auto", quantization="fp8")] == [True, True]
    assert "has an option of its own" in kwargs(max_num_seqs=3)[0]
    assert "has an option of its own" in kwargs(enforce_eager=True)[0]
    assert "must be a JSON object" in problems(BASE + "[1]")[0]
    assert "must be a JSON object" in problems(BASE.replace("engine_kwargs", "limit_mm_per_prompt") + "2")[0]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--vllm_quantization fp8", "the policy's weights, which change in every step"),
        (
            '--vllm_speculative_config {"method":"ngram"}',
            "log-probabilities of completions are those of plain sampling",
        ),
        ("--vllm_reasoning_parser qwen3", "rewards get the whole completion"),
        ("--vllm_pipeline_parallel_size 2", "every process samples with a whole model"),
        ("--vllm_enable_expert_parallel true", "every process samples with a whole model"),
    ],
)
def test_what_the_training_process_does_not_do(words: str, reason: str) -> None:
    (problem,) = problems(f"grpo --reward_funcs length --use_vllm {words}")
    assert reason in problem


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_engine_has_these_arguments() -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = {*inspect.signature(EngineArgs).parameters}
    server = {"lora_modules", "host", "port", "api_key", "chat_template"}
    assert known >= {*ENGINE_ARGUMENTS.values(), "enforce_eager"}
    assert known >= {*OPTION_OF, *FIXED_ARGUMENTS} and known >= SET_BY_OPTIONS.keys() - server
