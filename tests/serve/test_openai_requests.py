"""Requests and answers of the two APIs through the application in this process, over a model that answers.

Covers: megaswift/serve/openai_requests.py, megaswift/serve/openai_responses.py, megaswift/serve/logprobs.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megaswift.inference.chat_inputs import ChatInputRenderer
from megaswift.inference.generator import TokenLogprob
from megaswift.inference.options.commands import ChatTemplateOptions, GenerationOptions
from megaswift.inference.token_texts import TokenTexts
from megaswift.serve.app import ServerState, build_app
from megaswift.serve.logprobs import names_of_position
from megaswift.serve.request_queue import RequestQueue
from tests.inference.models import opened
from tests.inference.test_token_texts import byte_level

TEXT = "what is 3+4?"


@pytest.fixture(scope="module")
def http(model: Path) -> Iterator[TestClient]:
    prepared, generator = opened(model)
    line = RequestQueue.before(generator, 8, 40)
    prompts = ChatInputRenderer(prepared, ChatTemplateOptions())
    own = GenerationConfig()
    state = ServerState("tiny", prompts, line, GenerationOptions(), own, 0, copy.deepcopy(prepared.tokenizer))
    app = build_app(state)
    app.state.folder = model
    app.state.prompts = prompts
    with TestClient(app) as client:
        yield client
    line.close()
    state.close()


def complete(http: TestClient, **fields: Any) -> Any:
    return http.post("/v1/completions", json={"model": "tiny", "prompt": TEXT, "temperature": 0, **fields})


def scored(model: Path, text: str) -> tuple[list[int], torch.Tensor]:
    ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    with torch.no_grad():
        return ids, AutoModelForCausalLM.from_pretrained(model)(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("most", [0, 2])
def test_prompt_logprobs_in_vllm_s_form(http: TestClient, model: Path, most: int) -> None:
    """What distillation asks of a teacher's server; the oracle is transformers."""
    ids, scores = scored(model, TEXT)
    choice = complete(http, prompt=ids, max_tokens=most, prompt_logprobs=3).json()["choices"][0]
    assert choice["text"] == complete(http, prompt=ids, max_tokens=most).json()["choices"][0]["text"]
    first, *listed = choice["prompt_logprobs"]
    assert first is None and len(listed) == len(ids) - 1
    for place, entries in enumerate(listed):
        best = scores[place].topk(3)
        ranked = {str(int(i)): (float(v), r) for r, (v, i) in enumerate(zip(best.values, best.indices, strict=True), 1)}
        ranked.setdefault(str(ids[place + 1]), (float(scores[place, ids[place + 1]]), None))
        assert entries.keys() == ranked.keys()
        for token, (value, rank) in ranked.items():
            assert entries[token]["logprob"] == pytest.approx(value, abs=1e-5) and entries[token]["rank"] == rank


def test_prompt_logprobs_go_alone(http: TestClient) -> None:
    answer = complete(http, prompt_logprobs=3, echo=True)
    assert answer.status_code == 400 and "does not go with echo" in answer.json()["error"]["message"]
    assert complete(http, prompt_logprobs=30).status_code == 400


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
def test_echo_gives_the_prompt_and_its_log_probabilities(
    http: TestClient, model: Path, most: int, as_tokens: bool
) -> None:
    """What lm-eval asks of a server for its multiple-choice tasks; the oracle is transformers."""
    ids, scores = scored(model, TEXT)
    prompt = ids if as_tokens else TEXT
    choice = complete(http, prompt=prompt, max_tokens=most, logprobs=1, echo=True, seed=1234).json()["choices"][0]
    told = choice["logprobs"]
    plain = complete(http, max_tokens=most).json()["choices"][0]["text"]
    shown = AutoTokenizer.from_pretrained(model).decode(ids) if as_tokens else TEXT
    assert choice["text"] == shown + plain
    assert len(told["tokens"]) == len(told["top_logprobs"]) == len(told["text_offset"]) == len(ids) + most
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    want = [float(scores[place, token]) for place, token in enumerate(ids[1:])]
    assert told["token_logprobs"][1 : len(ids)] == pytest.approx(want, abs=1e-5)
    best = [max(entry.values()) for entry in told["top_logprobs"][1 : len(ids)]]
    assert best == pytest.approx(scores[:-1].max(-1).values.tolist(), abs=1e-5)
    assert all(len(entry) == 1 for entry in told["top_logprobs"][1:])


def test_echo_of_a_prompt_that_fills_the_context(http: TestClient) -> None:
    """With nothing to generate there need be no room for it."""
    full = [5] * 128
    told = complete(http, prompt=full, max_tokens=0, logprobs=0, echo=True).json()
    assert len(told["choices"][0]["logprobs"]["token_logprobs"]) == 128
    assert told["usage"] == {"prompt_tokens": 128, "completion_tokens": 0, "total_tokens": 128}
    refused = complete(http, prompt=full, max_tokens=1, logprobs=0, echo=True)
    assert refused.status_code == 400 and "prompt and answer must fit" in refused.json()["error"]["message"]


def test_echo_streamed_and_without_log_probabilities(http: TestClient) -> None:
    whole = complete(http, max_tokens=4, logprobs=2, echo=True).json()["choices"][0]
    lines = complete(http, max_tokens=4, logprobs=2, echo=True, stream=True).text.splitlines()
    chunks = [json.loads(x.removeprefix("data: "))["choices"][0] for x in lines if x and not x.endswith("[DONE]")]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"] and chunks[0]["text"] == TEXT
    offsets = [at for chunk in chunks for at in (chunk["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    bare = complete(http, max_tokens=4, echo=True).json()["choices"][0]
    assert bare["text"] == whole["text"] and bare["logprobs"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", True),
        ("n", True),
        ("seed", False),
        ("temperature", True),
        ("top_p", True),
        ("top_k", True),
        ("repetition_penalty", True),
        ("presence_penalty", True),
        ("min_p", True),
        ("logprobs", True),
    ],
)
def test_a_truth_value_is_no_number(http: TestClient, field: str, value: bool) -> None:
    refused = complete(http, **{field: value})
    assert refused.status_code == 400, refused.json()
    assert refused.json()["error"]["param"] == field and "must be a number" in refused.json()["error"]["message"]


def test_biases_force_and_forbid_tokens(http: TestClient) -> None:
    assert complete(http, max_tokens=3, logit_bias={"5": 100}).json()["choices"][0]["text"] == "b b b"
    plain = complete(http, max_tokens=3).json()["choices"][0]["text"]
    (first,) = AutoTokenizer.from_pretrained(http.app.state.folder)(plain[0])["input_ids"]
    other = complete(http, max_tokens=3, logit_bias={str(first): -100}).json()["choices"][0]["text"]
    assert other[0] != plain[0]


def test_requests_with_other_biases_do_not_share_them(http: TestClient) -> None:
    def first(token: int) -> str:
        return complete(http, max_tokens=2, logit_bias={str(token): 100}).json()["choices"][0]["text"]

    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(first, (4, 5, 6, 4, 5, 6))] == ["a a", "b b", "c c"] * 2


def test_min_p_of_1_is_greedy_and_implies_openai_s_temperature(http: TestClient) -> None:
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 8}
    greedy = complete(http, max_tokens=8).json()["choices"][0]["text"]
    drawn = [http.post("/v1/completions", json=body | {"min_p": p, "seed": 3}).json() for p in (1, 0)]
    assert drawn[0]["choices"][0]["text"] == greedy != drawn[1]["choices"][0]["text"]


def test_variables_of_the_chat_template(http: TestClient, model: Path) -> None:
    """The prompt is that of transformers with the same variable; the next request has the template's own again."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}<u>{% else %}<e><e>{% endif %}"
    served = http.app.state.prompts
    own = served.tokenizer.chat_template
    served.tokenizer.chat_template = tokenizer.chat_template
    messages = [{"role": "user", "content": "1+2?"}]
    try:
        for variables in ({"enable_thinking": True}, {"enable_thinking": False}, {}):
            body = {"model": "tiny", "messages": messages, "max_tokens": 1, "chat_template_kwargs": variables}
            answer = http.post("/v1/chat/completions", json=body).json()
            ids = tokenizer.apply_chat_template(messages, return_dict=False, **variables)
            assert answer["usage"]["prompt_tokens"] == len(ids) == (5 if variables.get("enable_thinking") else 6)
    finally:
        served.tokenizer.chat_template = own


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "top_logprobs"])
def test_a_truth_value_is_no_number_in_a_chat(http: TestClient, field: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "logprobs": True, field: True}
    refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and "must be a number" in refused.json()["error"]["message"]


@pytest.mark.parametrize("text", [None, 5, True, ["x"], ...])
def test_a_part_without_text_is_refused(http: TestClient, text: Any) -> None:
    part = {"type": "text"} if text is ... else {"type": "text", "text": text}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}
    refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages", refused.json()
    assert "needs a string" in refused.json()["error"]["message"]


def test_tokens_of_one_text_are_listed_apart(http: TestClient) -> None:
    """Every part of a character is U+FFFD as text."""
    from transformers import PreTrainedTokenizerFast

    tokens = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    parts = [token for token in range(len(tokens)) if tokens.decode([token]) == "\ufffd"][:4]
    entry = TokenLogprob(parts[1], -2.0, tuple((token, -1.0 - place) for place, token in enumerate(parts)))
    names = names_of_position(entry, TokenTexts(tokens))
    assert names == {parts[0]: "\ufffd", **{token: f"token_id:{token}" for token in parts[1:]}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_special_token_stops_an_answer_at_once(http: TestClient, stream: bool) -> None:
    """The model of these tests goes on with padding tokens after this prompt."""
    asked = {"prompt": "z+z", "max_tokens": 20}
    assert complete(http, **asked).json()["usage"]["completion_tokens"] == 20
    options = {"stream_options": {"include_usage": True}, "stream": True} if stream else {}
    answer = complete(http, **asked, stop=["<pad>"], **options)
    if not stream:
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert answer.json()["usage"]["completion_tokens"] == 1
        return
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "" and choices[-1]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 1
