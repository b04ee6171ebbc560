"""Options that transformers' models have and the native engine has not, and what they cannot go with."""

from __future__ import annotations

import pytest

from megaswift.config import SwiftConfig, load_config
from megaswift.engine.options.speed import SPEED_CLASHES
from tests.config.refusals import assert_idle, problems

CLASHING = [
    "--attn_implementation flex_attention --engine megatron",
    "--attn_impl flash_attn3 --engine megatron",
    "--attn_impl fused --engine ddp",
    "--attn_impl flash --engine ddp --torch_dtype fp32",
    "--torch_compile --engine zero3",
    "--deterministic --rollout_backend vllm",
    "--deterministic --torch_compile --engine ddp",
]
IDLE = [
    (
        "--torch_compile_mode max-autotune --torch_compile --torch_compile_backend eager --engine ddp",
        "--torch_compile_mode max-autotune --torch_compile --engine ddp",
    ),
    ("--use_liger_kernel --engine megatron", "--use_liger_kernel --engine ddp"),
    ("--torch_compile --engine megatron", "--torch_compile --engine zero2"),
    ("--neftune_noise_alpha 5 --engine megatron", "--neftune_noise_alpha 5 --engine zero3"),
    ("--torch_compile_backend eager --engine ddp", "--torch_compile_backend eager --torch_compile --engine ddp"),
    ("--torch_compile_mode default --engine ddp", "--torch_compile_mode default --torch_compile --engine fsdp2"),
]


def test_contradictions() -> None:
    for words, clash in zip(CLASHING, SPEED_CLASHES, strict=True):
        found = problems(words, "grpo" if "deterministic" in words and "compile" not in words else "sft")
        assert len(found) == 1 and found[0].startswith(words.split()[0]), found
        assert clash.options[0] in found[0].replace("attn_implementation", "attn_impl")


@pytest.mark.parametrize("idle, used", IDLE)
def test_an_option_that_would_be_ignored(idle: str, used: str) -> None:
    assert_idle(idle, used)


@pytest.mark.parametrize(
    "words, value",
    [
        ("--gradient_checkpointing", "full"),
        ("--gradient_checkpointing true --tp 2", "full"),
        ("--gradient_checkpointing no", "none"),
        ("--gradient_checkpointing full", "full"),
        ("--recompute_granularity selective", "selective"),
    ],
)
def test_gradient_checkpointing_is_a_switch(words: str, value: str) -> None:
    assert load_config("sft", words.split(), environ={}).model.recompute_granularity == (
        None if value == "none" else value
    )
    assert SwiftConfig(gradient_checkpointing=True).model.recompute_granularity == "full"
    assert problems("--recompute_granularity") == ["--recompute_granularity: has no value"]


def test_names_of_other_toolkits_get_a_hint() -> None:
    with pytest.raises(Exception, match="--galore_rank"):
        load_config("sft", ["--optim_args", "rank=64"], environ={})
