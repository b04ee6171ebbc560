"""What vLLM's engine gets and how its answers are read; the package is replaced by one that records its arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megaswift.errors import UserError
from megaswift.infer import COMMAND
from megaswift.inference.generator import AnswerRequest, GenerationParams, ProcessedImageInputs, TokenLogprob
from megaswift.inference.model import ModelConfigAndTokenizer
from megaswift.inference.options.commands import InferConfig, ModelLoadingOptions
from megaswift.inference.vllm_generator import VllmGenerator
from megaswift.serve import vllm_server
from tests.inference.options.test_run_files import peft_folder


def logprob(value: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=value)


class Engine:
    """Answers each prompt with two tokens."""

    made: dict[str, Any]
    calls: list[tuple[Any, ...]] = []

    def __init__(self, **options: Any) -> None:
        type(self).made = options

    def generate(self, prompts: Any, params: Any, **how: Any) -> list[Any]:
        self.calls.append((prompts, params, how))
        places = [{4: logprob(-0.5), 9: logprob(-0.1)}, {2: logprob(-0.25)}]
        answer = SimpleNamespace(token_ids=(4, 2), text="hi", finish_reason="stop", logprobs=places)
        return [SimpleNamespace(outputs=[answer]) for _ in prompts]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams, Engine.calls = Engine, lambda **options: options, []
    lora: Any = ModuleType("vllm.lora.request")
    lora.LoRARequest = lambda *words: words
    for name, module in {"vllm": vllm, "vllm.lora": ModuleType("vllm.lora"), "vllm.lora.request": lora}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return Engine


def config(tmp_path: Path, *words: str) -> InferConfig:
    (tmp_path / "q.jsonl").touch()
    rows = ["--dataset", str(tmp_path / "q.jsonl"), "--infer_backend", "vllm"]
    return InferConfig(**COMMAND.parse(["--model", "m", *rows, *words]).sections)


def test_the_engine_and_a_batch(engine: type[Engine], tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "adapter", "m")
    more = ["--vllm_engine_kwargs", '{"kv_cache_dtype": "fp8"}']
    words = "--tp 2 --vllm_max_model_len 99 --vllm_gpu_memory_utilization 0.5 --vllm_enforce_eager --adapters"
    cfg = config(tmp_path, *more, *words.split(), str(folder))
    prepared = ModelConfigAndTokenizer(tmp_path, cfg.weights, None, "tokenizer")
    found = VllmGenerator(prepared, cfg.backend, 8)
    assert engine.made == {
        "model": str(tmp_path),
        "dtype": "auto",
        "trust_remote_code": False,
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 99,
        "enable_lora": True,
        "max_lora_rank": 8,
        "kv_cache_dtype": "fp8",
    }
    words = "--vllm_pipeline_parallel_size 2 --vllm_enable_expert_parallel --vllm_enable_prefix_caching false"
    more = ["--vllm_limit_mm_per_prompt", '{"image": 5}', "--vllm_quantization", "fp8", "--vllm_max_num_seqs", "7"]
    more += ["--vllm_disable_custom_all_reduce", "true", "--vllm_mm_processor_cache_gb", "0"]
    more += ["--vllm_disable_cascade_attn", "false", "--vllm_speculative_config", '{"method": "ngram"}']
    VllmGenerator(prepared, config(tmp_path, *more, *words.split()).backend, 0)
    assert engine.made == {
        "model": str(tmp_path),
        "dtype": "auto",
        "trust_remote_code": False,
        "pipeline_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {"image": 5},
        "quantization": "fp8",
        "max_num_seqs": 7,
        "disable_custom_all_reduce": True,
        "mm_processor_cache_gb": 0,
        "disable_cascade_attn": False,
        "speculative_config": {"method": "ngram"},
    }
    requests = [AnswerRequest((1, 2), 5, ("x",), logprobs=1), AnswerRequest((3,), 6)]
    first, second = found.generate(requests, GenerationParams(0.7, 0.9, 0, 0.2, 1.1, 0.5, -0.5, seed=40))
    assert (first.text, first.tokens, first.reason, second.logprobs) == ("hi", 2, "stop", ())
    assert first.logprobs == (TokenLogprob(4, -0.5, ((9, -0.1),), first=True), TokenLogprob(2, -0.25, ((2, -0.25),)))
    ((prompts, params, how),) = engine.calls
    assert prompts == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    assert [p["seed"] for p in params] == [40, 41] and [p["max_tokens"] for p in params] == [5, 6]
    assert params[0] | {"seed": 0} == {
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.2,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "stop": ["x"],
        "logprobs": 1,
        "seed": 0,
    }
    assert how == {"use_tqdm": False, "lora_request": ("adapter", 1, str(folder))}


def test_what_vllm_does_not_do(engine: type[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path)
    found = VllmGenerator(ModelConfigAndTokenizer(tmp_path, ModelLoadingOptions(), None, None), cfg.backend, 0)
    seen = AnswerRequest((1,), 5, pictures=ProcessedImageInputs({}, {}))
    with pytest.raises(UserError, match="images: are not supported with --infer_backend vllm"):
        found.generate([seen], GenerationParams())
    monkeypatch.setattr(vllm_server, "missing_vllm_problems", list)
    folders = [str(peft_folder(tmp_path / name, "m")) for name in ("a", "b")]
    (problem,) = vllm_server.infer_problems(config(tmp_path, "--adapters", *folders).weights)
    assert problem.rule == "vLLM applies one adapter at a time"
