"""The server as a process, driven with the public openai client; answers and log-probabilities are transformers'
own.

Covers: megaswift/deploy.py,
megaswift/serve/openai_requests.py, megaswift/serve/openai_responses.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megaswift.deploy import COMMAND, _also
from megaswift.deploy import main as deploy
from megaswift.errors import ConfigError
from megaswift.inference.options.commands import GenerationOptions
from tests.inference.models import adapters, folder, plain
from tests.sources import ROOT

NEW, TOKEN = 8, "a-token-of-the-tests"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("deploy") / "tiny")


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[str]:
    """The address of a server process with these options; it ends well, and says neither its token nor a traceback."""
    log = folder / "server"
    with log.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "megaswift", "deploy", *words, "--port", "0"],
            stderr=err,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "MEGASWIFT_API_KEY": TOKEN},
        )
    try:
        end = time.monotonic() + 300
        while " at http://" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        assert "token required" in log.read_text()
        yield log.read_text().split(" at ")[1].split()[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not [word for word in (TOKEN, "Traceback", "Warning") if word in log.read_text()], log.read_text()


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("log"), "--model", str(model)) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def theirs(model: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)


def greedy(theirs: tuple[Any, Any], text: str) -> str:
    return plain(*theirs, [theirs[1](text)["input_ids"]], NEW, do_sample=False)[0]


def chat(client: Any, text: str = "1+2?", **how: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": NEW, **how}
    )


pytestmark = pytest.mark.process


def test_models_and_health(client: Any, url: str) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    with urllib.request.urlopen(url.removesuffix("/v1") + "/health", timeout=30) as answer:
        assert json.load(answer) == {"status": "ok"}


def test_chat_answers_as_transformers_does_whole_and_streamed(client: Any, theirs: tuple[Any, Any]) -> None:
    want = greedy(theirs, "<u>1+2?<e><a>")
    whole = chat(client, temperature=0)
    assert whole.choices[0].message.content == want and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, NEW)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == want
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length" and len(chunks) > 4
    assert chunks[-1].usage.total_tokens == 7 + NEW
    stopped = chat(client, stop=[want[3:6]])
    assert (
        stopped.choices[0].message.content == want[: want.index(want[3:6])]
        and stopped.choices[0].finish_reason == "stop"
    )


@pytest.mark.slow
@pytest.mark.parametrize("merged", [[], ["--merge_adapters"]], ids=["beside", "merged"])
def test_adapters_are_served(merged: list[str], model: Path, tmp_path: Path) -> None:
    """The same answer as PEFT's, which is another than the model's own."""
    import openai
    import peft

    adapter, base = adapters(tmp_path / "adapter", model), AutoModelForCausalLM.from_pretrained(model)
    own = greedy((base, AutoTokenizer.from_pretrained(model)), "<u>1+2?<e><a>")
    theirs = peft.PeftModel.from_pretrained(base, adapter), AutoTokenizer.from_pretrained(model)
    with serving(tmp_path, "--model", str(model), "--adapters", str(adapter), *merged) as address:
        client = openai.OpenAI(base_url=address, api_key=TOKEN, max_retries=0, timeout=120)
        found = chat(client, temperature=0).choices[0].message.content
    assert found == greedy(theirs, "<u>1+2?<e><a>") != own


def test_completions_of_text_and_tokens(client: Any, theirs: tuple[Any, Any]) -> None:
    texts = ["ab", "what is 3+4?"]
    want = [greedy(theirs, t) for t in texts]
    found = client.completions.create(model="tiny", prompt=texts, max_tokens=NEW, temperature=0)
    assert [c.text for c in found.choices] == want and found.usage.completion_tokens == 2 * NEW
    ids = theirs[1](texts[0])["input_ids"]
    assert client.completions.create(model="tiny", prompt=ids, max_tokens=NEW).choices[0].text == want[0]
    chunks = list(client.completions.create(model="tiny", prompt=texts[1], max_tokens=NEW, stream=True, logprobs=2))
    assert "".join(c.choices[0].text for c in chunks) == want[1]
    assert sum(len(c.choices[0].logprobs.tokens) for c in chunks if c.choices[0].logprobs) == NEW


def test_logprobs_are_transformers_own(client: Any, theirs: tuple[Any, Any]) -> None:
    model, tokenizer = theirs
    prompt = tokenizer("<u>1+2?<e><a>")["input_ids"]
    out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0]
    with torch.no_grad():
        scores = model(out[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    told = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [t.token for t in told] == [tokenizer.decode([i]) for i in out[len(prompt) :]]
    for at, (token, found) in enumerate(zip(out[len(prompt) :].tolist(), told, strict=True)):
        assert found.logprob == pytest.approx(float(scores[at, token]), abs=2e-5)
        best = scores[at].topk(3)
        assert [t.logprob for t in found.top_logprobs] == pytest.approx(best.values.tolist(), abs=2e-5)
        assert [t.token for t in found.top_logprobs] == [tokenizer.decode([i]) for i in best.indices.tolist()]


def test_drawn_answers_follow_their_seed_whoever_else_asks(client: Any) -> None:
    def drawn(seed: int) -> list[str]:
        return [c.message.content for c in chat(client, temperature=1.5, top_p=0.99, seed=seed, n=2).choices]

    alone = drawn(3)
    with ThreadPoolExecutor(5) as pool:
        crowd = list(pool.map(drawn, [3, 4, 3, 5, 3]))
    assert crowd[0] == crowd[2] == crowd[4] == alone != crowd[1] and alone[0] != alone[1]


def test_many_clients_get_their_own_answers(client: Any, theirs: tuple[Any, Any]) -> None:
    questions = ["ab", "1+2?", "x", "what is 3+4?", "0123456789", "z+z"] * 2
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda q: chat(client, q).choices[0].message.content, questions))
    want = {q: greedy(theirs, f"<u>{q}<e><a>") for q in questions[:6]}
    assert found == [want[q] for q in questions]


def test_a_port_in_use_is_refused_before_torch_is_imported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megaswift.inference.generator", None)  # its import would fail
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"--host 127.0.0.1 --port {port}: cannot listen on this address"
        ) as caught:
            deploy(["--model", str(model), "--port", str(port)])
    assert caught.value.problems[0].fix == "use --port 0 for any free port"


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"model": "other"}, "NotFoundError", "'other' does not exist; this server has 'tiny'"),
        ({"temperature": 3}, "BadRequestError", "temperature: Input should be less than or equal to 2"),
        ({"extra_body": {"temprature": 1}}, "BadRequestError", "temprature: Extra inputs are not permitted"),
        ({"presence_penalty": 3}, "BadRequestError", "presence_penalty: Input should be less than or equal to 2"),
        ({"logit_bias": {"a": 1}}, "BadRequestError", "logit_bias: must have token ids as names"),
        ({"logit_bias": {"5": 101}}, "BadRequestError", "logit_bias: must have numbers from -100 to 100"),
        ({"logit_bias": {"45": 1}}, "BadRequestError", "logit_bias: 45 is not a token id of this model (0 to 44)"),
        ({"response_format": {"type": "json_object"}}, "BadRequestError", "response_format: is not supported"),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "x", "messages": []}}},
            "BadRequestError",
            "chat_template, messages: cannot be set by a request",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "BadRequestError",
            "tools: is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": "a" * 200}]},
            "BadRequestError",
            "the prompt has 203 tokens; prompt and answer must fit the context length of 128",
        ),
        ({"messages": []}, "BadRequestError", "messages: must be a list of 1 to 2048 messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "BadRequestError",
            "images are not supported: this model accepts only text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "BadRequestError",
            "parts of type input_audio are not supported",
        ),
        ({"top_logprobs": 2}, "BadRequestError", "top_logprobs requires logprobs"),
    ],
)
def test_mistakes_of_clients_in_openai_s_form(client: Any, how: dict[str, Any], kind: str, words: str) -> None:
    import openai

    with pytest.raises(getattr(openai, kind)) as caught:
        chat(client, **how)
    assert words in caught.value.body["message"] and caught.value.type == "invalid_request_error"
    if kind == "NotFoundError":
        assert caught.value.code == "model_not_found"


def test_without_the_token_nobody_comes_in(url: str) -> None:
    import openai

    for sent in ("Bearer wrong", f"Bearer {TOKEN}x", TOKEN, "Basic x"):
        bad = openai.OpenAI(base_url=url, api_key="x", max_retries=0, default_headers={"Authorization": sent})
        with pytest.raises(openai.AuthenticationError) as caught:
            bad.models.list()
        assert caught.value.code == "invalid_api_key"


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        COMMAND.parse(words)
    return str(caught.value)


def test_the_words_of_model_are_its_other_name_unless_it_was_given_one() -> None:
    def also(*words: str) -> tuple[str, ...]:
        return _also(COMMAND.config(**COMMAND.parse(["--model", "run/hf", *words]).sections))

    assert also() == ("run/hf",) and also("--served_model_name", "mine") == ()


def test_other_addresses_need_a_token_and_options_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGASWIFT_API_KEY", raising=False)
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.org"):
        assert "an address reachable from other machines requires a token" in refused("--model", "x", "--host", host)
    for host in ("127.0.0.1", "localhost", "::1", "127.5.5.5"):
        COMMAND.parse(["--model", "x", "--host", host])
    COMMAND.parse(["--model", "x", "--host", "0.0.0.0", "--api_key", "k"])
    monkeypatch.setenv("MEGASWIFT_API_KEY", "k")
    COMMAND.parse(["--model", "x", "--host", "0.0.0.0"])
    for words in (
        ["--api_key", "hush", "hush2"],
        ["--api_kye", "hush"],
        ["--api_key", "hush", "--port", "x"],
    ):
        assert "hush" not in refused("--model", "x", *words)
    text = refused(
        "--model",
        "x",
        "--infer_backend",
        "vllm",
        "--device_map",
        "cpu",
        "--max_waiting",
        "3",
        "--quantization_bit",
        "8",
    )
    assert all(f"--{name}" in text for name in ("device_map cpu", "max_waiting 3", "quantization_bit 8"))
    assert "--max_body_size 3 apples: is not a valid size" in refused("--model", "x", "--max_body_size", "3 apples")
    assert "--temperature 1e-300: is too close to 0" in refused("--model", "x", "--temperature", "1e-300")
    assert "--repetition_penalty 1e-300" in refused("--model", "x", "--repetition_penalty", "1e-300")
    assert "--tp 2: would be ignored: applies only to --infer_backend vllm" in refused("--model", "x", "--tp", "2")


def test_what_a_request_leaves_open_is_the_server_s_then_the_model_s() -> None:
    from megaswift.serve.openai_requests import ChatRequest

    def sampling(own: dict[str, Any], defaults: dict[str, Any], **asked: Any) -> tuple[float, float, int]:
        request = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], **asked)
        found = request.sampling(GenerationOptions(**defaults), GenerationConfig(**own))
        return found.temperature, found.top_p, found.top_k

    draws = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert sampling({}, {}) == (0, 1, 0) and sampling(draws, {}) == (0.6, 0.9, 20)
    assert sampling(draws, {"temperature": 0.3}) == (0.3, 0.9, 20) and sampling(
        draws, {"temperature": 0.3}, temperature=0
    ) == (0, 1, 0)
    assert sampling({}, {}, top_p=0.5) == (1, 0.5, 0) and sampling(draws, {}, top_k=-1, temperature=2) == (2, 0.9, 0)
