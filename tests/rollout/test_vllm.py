"""What vLLM in process is asked, by a stand-in that takes the same calls: order and arguments. vLLM itself has not been
run.

Covers: megaswift/rollout/backends/vllm_sampler.py, megaswift/rollout/pieces.py.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift.config import load_config
from megaswift.families import load_spec
from megaswift.rollout import pieces
from megaswift.rollout.backends.vllm_sampler import lora_rank_problems
from megaswift.rollout.sampler import Completion, SamplerOptions, SamplingParams, make_sampler
from megaswift.rollout.vllm_package import max_lora_rank_for
from megaswift.run.policy_task import sampler_options

SAMPLING = SamplingParams(3, temperature=0.5, top_k=4, stop_token_ids=(7,))


class Engine:
    """Records what `vllm.LLM` is asked; its completions are the prompt's tokens."""

    def __init__(self, **options: Any) -> None:
        assert Platform.sleeps or not options["enable_sleep_mode"], "Sleep mode is not supported on current platform."
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == "0", "the external launcher's"
        self.options = options
        self.calls: list[Any] = []
        self.llm_engine = SimpleNamespace(remove_lora=lambda number: self.calls.append(("remove_lora", number)))

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append((method, [name for name, _ in kwargs.pop("weights_iterator")]))
        assert not kwargs

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool, lora_request: Any = None) -> list[Any]:
        self.calls.append(("generate", None if lora_request is None else lora_request.lora_path))
        assert all(p.ignore_eos and p.stop_token_ids == [7] and p.logprobs == 0 for p in params) and not use_tqdm
        found = []
        for prompt, param in zip(prompts, params, strict=True):
            tokens = prompt["prompt_token_ids"][: param.max_tokens]
            told = [
                {t: SimpleNamespace(logprob=-float(param.seed or 0)), 99: SimpleNamespace(logprob=0.0)} for t in tokens
            ]
            reason = "stop" if tokens[-1] == 7 else "length"
            found.append(
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=told, finish_reason=reason)])
            )
        return found


class Platform:
    """Of vLLM; a build for CPUs refuses engines that are to sleep."""

    sleeps = True

    @classmethod
    def is_sleep_mode_available(cls) -> bool:
        return cls.sleeps


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = Platform
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    lora: Any = ModuleType("vllm.lora.request")
    lora.LoRARequest = lambda name, number, path: SimpleNamespace(lora_int_id=number, lora_path=path)
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = Engine, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", lora)
    monkeypatch.setattr("megaswift.rollout.backends.vllm_sampler.missing", lambda options: [])
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def test_a_seed_for_each_request_is_optional(vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seeded in (True, False):
        made: Any = make_sampler("vllm", tmp_path, SamplerOptions(seed=5, seed_requests=seeded))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        assert made.llm.options["seed"] == 5
        asked: list[Any] = []
        real = made.llm.generate
        made.llm.generate = lambda prompts, params, real=real, asked=asked, **more: (
            asked.extend(p.seed for p in params) or real(prompts, params, **more)
        )
        made.update_weights([])
        made.generate([[1, 7], [2, 7]], SAMPLING, [31, 32])
        assert asked == ([31, 32] if seeded else [None, None])


def test_a_long_conversation_has_less_room(vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than the shorter ones beside it, which are asked for together."""
    made: Any = make_sampler("vllm", tmp_path, SamplerOptions(max_length=5))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made.update_weights([])
    found = made.generate([[1, 2, 3], [1, 2, 3, 4]], SAMPLING, [31, 32])
    assert [(c.token_ids, c.finished) for c in found] == [((1, 2), False), ((1,), False)]


def test_completions_are_written_in_pieces(vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers with the first tokens of what it is asked; its log-probabilities are the seeds."""
    monkeypatch.setattr(pieces, "PIECE", 2)
    made: Any = make_sampler("vllm", tmp_path, SamplerOptions())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made.update_weights([])
    sampling = replace(SAMPLING, max_tokens=5)
    begun = [Completion((), (), False), Completion((4, 4, 4, 4), (-1.0,) * 4, False), Completion((7,), (-1.0,), True)]
    asked = iter(range(9))
    prompts = [[1, 2, 3], [5, 6, 7], [8, 8]]
    once = made.extend(prompts, begun, sampling, [31, 32, 33], lambda: next(asked) > 0)
    assert [c.token_ids for c in once] == [(1, 2), (4, 4, 4, 4, 5), (7,)] and once[0].logprobs == (-31.0, -31.0)
    whole = made.extend(prompts, once, sampling, [31, 32, 33], bool)
    assert whole[1:] == once[1:] and whole[0].token_ids == (1, 2, 1, 2, 1) and not whole[0].finished
    assert len({*whole[0].logprobs}) == 3, "each piece has a seed of its own"
    assert made.extend(prompts, begun, sampling, [31, 32, 33], bool) == whole


def test_weights_come_before_caches_and_sleep_drops_both(
    vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = make_sampler("vllm", tmp_path, SamplerOptions(batch_size=9, max_length=64))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.llm.calls.append("empty_cache"))
    assert made.llm.options["load_format"] == "dummy" and made.llm.options["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(AssertionError):
        made.generate([[1]], SAMPLING, [1])
    made.update_weights([("a", torch.ones(1)), ("b", torch.ones(1))])
    found = made.generate([[1, 2, 3, 4], [5, 7]], SAMPLING, [11, 12])
    made.sleep()
    made.sleep()
    assert found == [Completion((1, 2, 3), (-11.0,) * 3, False), Completion((5, 7), (-12.0,) * 2, True)]
    assert made.llm.calls == [
        ("sleep", 2),
        "empty_cache",
        ("wake_up", "weights"),
        ("reload_weights", ["a", "b"]),
        "reset",
        "empty_cache",
        ("wake_up", "kv_cache"),
        ("generate", None),
        ("sleep", 2),
    ]


def test_settings_of_the_engine_reach_it(vllm: None, model: Path, tmp_path: Path) -> None:
    words = "--reward_funcs length --use_vllm --vllm_enforce_eager --vllm_enable_prefix_caching false"
    more = ["--vllm_engine_kwargs", '{"block_size": 16}', "--vllm_limit_mm_per_prompt", '{"image": 2}']
    more += ["--vllm_max_num_seqs", "7", "--vllm_mm_processor_cache_gb", "0", "--vllm_disable_cascade_attn", "true"]
    cfg = load_config("grpo", [*words.split(), *more], environ={})
    made: Any = make_sampler("vllm", tmp_path, sampler_options(cfg, load_spec(model), tmp_path / "sync"))
    assert made.llm.options.items() >= {"enforce_eager": True, "enable_prefix_caching": False}.items()
    assert made.llm.options.items() >= {"disable_cascade_attn": True, "mm_processor_cache_gb": 0}.items()
    assert made.llm.options["limit_mm_per_prompt"] == {"image": 2} and made.llm.options["max_num_seqs"] == 7
    assert made.llm.options["block_size"] == 16


def test_adapters_replace_one_another_and_the_base_is_kept(vllm: None, tmp_path: Path) -> None:
    """The base is the model's own, which vLLM reads; room is rounded up to what it can make."""
    made: Any = make_sampler("vllm", tmp_path, SamplerOptions(lora_rank=9))
    assert made.llm.options["max_lora_rank"] == 16 and made.llm.options["load_format"] == "auto"
    for name in ("one", "two"):
        made.update_adapter(tmp_path / name)
        made.generate([[1, 7]], SAMPLING, [0])
    assert [c for c in made.llm.calls if c[0] in ("sleep", "generate", "remove_lora")] == [
        ("sleep", 1),
        ("generate", str(tmp_path / "one")),
        ("remove_lora", 1),
        ("generate", str(tmp_path / "two")),
    ]


def test_a_build_without_sleep_keeps_its_memory(vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs; everything else is the same, and an update still has to come before each generation."""
    monkeypatch.setattr(Platform, "sleeps", False)
    made: Any = make_sampler("vllm", tmp_path, SamplerOptions())
    made.update_weights([("a", torch.ones(1))])
    made.generate([[1, 7]], SAMPLING, [0])
    made.sleep()
    with pytest.raises(AssertionError):
        made.generate([[1, 7]], SAMPLING, [0])
    assert made.llm.calls == [("reload_weights", ["a"]), "reset", ("generate", None)]


def test_adapters_that_fit_into_no_vllm() -> None:
    assert [max_lora_rank_for(rank) for rank in (1, 2, 8, 33, 257, 512)] == [1, 8, 8, 64, 320, 512]
    assert lora_rank_problems(SamplerOptions(lora_rank=512)) == []
    [problem] = lora_rank_problems(SamplerOptions(lora_rank=513))
    assert "exceed vLLM's maximum LoRA rank (512)" in problem.rule
