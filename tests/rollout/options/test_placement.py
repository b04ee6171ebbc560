"""Arguments of the SGLang servers that engines on Ray start: what the run relies on is refused, each with a reason."""

from __future__ import annotations

import argparse
import importlib.util
import json

import pytest

from megaswift.rollout.options.placement import SGLANG_FIXED
from tests.config.refusals import problems

BASE = "grpo --reward_funcs length --rollout_backend sglang --sampler_engines 2 --sglang_engine_kwargs "


def kwargs(**given: object) -> list[str]:
    return problems(BASE + json.dumps(given, separators=(",", ":")))


def test_what_may_be_set_and_what_not() -> None:
    assert kwargs(mem_fraction_static=0.8, attention_backend="fa3", disable_cuda_graph=True) == []
    assert kwargs(enable_deterministic_inference=False) == [
        "--sglang_engine_kwargs enable_deterministic_inference: cannot be set: sampling relies on it"
    ]
    assert "one GPU" in kwargs(**{"tp-size": 2})[0] and "one GPU" in kwargs(tensor_parallel_size=2)[0]
    assert "another option" in kwargs(dtype="float16")[0]
    assert "must be a JSON object" in problems(BASE + "[1]")[0]
    assert "would be ignored" in problems(f"{BASE}{{}}".replace("--sampler_engines 2 ", ""))[0]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_the_server_has_these_arguments() -> None:
    """All names of an argument are fixed, or none."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    named = [{flag[2:].replace("-", "_") for flag in action.option_strings} for action in parser._actions]
    assert {*SGLANG_FIXED} == set().union(*(names for names in named if names & {*SGLANG_FIXED}))
