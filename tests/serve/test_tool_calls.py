"""Tool calls of a server with an --agent_template that is text, by the public openai client; the model is played."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from fastapi.testclient import TestClient
from transformers import GenerationConfig

from megaswift.data.templates.agent_instructions import AGENT_TEXT_FORMATS
from megaswift.inference.generator import Answer, AnswerRequest, GenerationParams
from megaswift.inference.options.commands import GenerationOptions
from megaswift.serve.app import ServerState, build_app
from megaswift.serve.request_queue import RequestQueue
from megaswift.serve.tool_calls import ParsedToolCall, ToolCallParser
from tests.data.makers import jsonl, tokenizer
from tests.inference.test_prompts import TALK, TOOL, agent_prompts
from tests.serve.test_app import TOKEN, serving
from tests.sources import ROOT

ONE = 'Thought: add\nAction: add\nAction Input: {"a": 1}\n'


def add(arguments: str = '{"a": 1}') -> ParsedToolCall:
    return ParsedToolCall("add", arguments)


QWEN = '✿FUNCTION✿: add\n✿ARGS✿: {"a": 1}\n'
MANY = QWEN + QWEN.replace("1", "2")


@pytest.mark.parametrize(
    ("name", "text", "cut", "outside", "calls"),
    [
        ("react_en", ONE, False, "Thought: add", [add()]),
        ("react_en", ONE + "Observation:", False, "Thought: add", [add()]),
        ("react_en", ONE.replace("\n", " \n  "), True, "Thought: add", [add()]),
        ("react_grpo", "<think>a</think> " + ONE[13:], False, "<think>a</think>", [add()]),
        ("react_en", ONE.replace("1}", '"Action: add"}'), False, "Thought: add", [add('{"a": "Action: add"}')]),
        ("react_en", ONE.replace('{"a": 1}', "4 + 5"), False, "Thought: add", [add("4 + 5")]),
        ("react_en", ONE.replace('{"a": 1}', ""), False, "Thought: add", [add("{}")]),
        ("react_en", ONE[:-3], True, ONE[:-3], []),
        ("react_en", ONE.replace("Action: add", "Action: none"), False, ONE.replace("Action: add", "Action: none"), []),
        ("react_en", "Action: add it yourself", False, "Action: add it yourself", []),
        ("react_en", "My Action: is none.\n" + ONE, False, "My Action: is none.\nThought: add", [add()]),
        ("react_en", ONE + "Final Answer: 4", False, "Thought: add\nFinal Answer: 4", [add()]),
        ("qwen_en", QWEN, False, "", [add()]),
        ("qwen_zh_parallel", "好\n" + MANY, False, "好", [add(), add('{"a": 2}')]),
        ("qwen_en_parallel", MANY[:-4], True, MANY[:-4].removeprefix(QWEN), [add()]),
    ],
)
def test_calls_are_found(name: str, text: str, cut: bool, outside: str, calls: list[Any]) -> None:
    parser = ToolCallParser(AGENT_TEXT_FORMATS[name], frozenset({"add"}))
    assert parser.parse(text, cut) == (outside, calls)
    if calls:  # what is shown while the answer is generated begins the final text
        shown = [parser.shown(text[:n]) for n in range(len(text) + 1)]
        assert all(outside.startswith(part) for part in shown) and shown == sorted(shown, key=len)


@pytest.mark.parametrize("name", ["react_en", "qwen_en"])
def test_an_answer_that_repeats_itself_is_read_in_proportion_to_its_length(name: str) -> None:
    """480,000 characters of broken calls took five to thirty seconds."""
    form = AGENT_TEXT_FORMATS[name]
    parser = ToolCallParser(form, frozenset({"add"}))
    call = f"{form.action} add\n{form.arguments}"
    pieces = (form.action, f'{call} {{"a":"', f'{call} {{"a":[[', f"{form.action} add\n" + " " * 20, f"{call} {{}}\n")
    for piece in pieces:
        began = time.process_time()
        parser.parse(piece * (480_000 // len(piece)), False)
        assert time.process_time() - began < 2


class Played:
    """Gives the answers that it was told to, a character at a time where someone listens."""

    def __init__(self) -> None:
        self.answer, self.asked = Answer("", 1, "stop"), list[AnswerRequest]()

    def __call__(self, requests: Sequence[AnswerRequest], sampling: GenerationParams) -> list[Answer]:
        self.asked += requests
        for request in requests:
            for character in self.answer.text if request.listener is not None else "":
                request.listener(character, ())
        return [self.answer for _ in requests]


def served(name: str | None) -> Iterator[tuple[Any, Played]]:
    model, prompts = Played(), agent_prompts(name)
    line = RequestQueue(model, 8, 40)
    line.start()
    state = ServerState("tiny", prompts, line, GenerationOptions(), GenerationConfig(), 0, prompts.tokenizer)
    with TestClient(build_app(state), base_url="http://test/v1") as http:
        yield openai.OpenAI(base_url="http://test/v1", api_key="x", max_retries=0, http_client=http), model
    line.close()
    state.close()


react = pytest.fixture(lambda: (yield from served("react_en")))
plain = pytest.fixture(lambda: (yield from served(None)))


def ask(client: Any, messages: Any = TALK[1:2], **how: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, "tools": [TOOL], **how})


def test_a_request_with_tools_returns_tool_calls(react: tuple[Any, Played]) -> None:
    """And the conversation goes on with the call and its result, in the prompt of training."""
    client, model = react
    model.answer = Answer(ONE, 5, "stop")
    choice = ask(client).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Thought: add", "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1})
    prompts = agent_prompts("react_en")
    assert model.asked[0].prompt == prompts.of_chat(TALK[1:2], [TOOL]).ids and model.asked[0].stop == ("Observation:",)
    model.answer = Answer("Final Answer: 4", 5, "stop")
    said = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "four"}
    choice = ask(client, [TALK[1], said, result]).choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (
        "Final Answer: 4",
        "stop",
        None,
    )
    assert model.asked[1].prompt == prompts.of_chat(TALK[1:4], [TOOL]).ids


def test_calls_without_text_have_no_content(react: tuple[Any, Played]) -> None:
    client, model = react
    model.answer = Answer(ONE[13:] * 2, 5, "stop")
    choice = ask(client).choices[0]
    assert choice.message.content is None and len({call.id for call in choice.message.tool_calls}) == 2
    ask(client, [TALK[1], choice.message.model_dump(), {**TALK[3], "tool_call_id": choice.message.tool_calls[0].id}])
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    model.answer = Answer(ONE, 5, "length")
    assert ask(client).choices[0].finish_reason == "length"


@pytest.mark.parametrize("text", [ONE, "Thought: add\nAct", "Action: none\nyes", ONE + "Final Answer: 4"])
def test_streamed_answers_are_those_in_one(react: tuple[Any, Played], text: str) -> None:
    client, model = react
    model.answer = Answer(text, 5, "stop")
    whole, chunks = ask(client).choices[0], list(ask(client, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert all(delta.content for delta in deltas if delta.content is not None and not delta.role)
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    both = (streamed, whole.message.tool_calls or ())
    assert len({tuple((call.function.name, call.function.arguments) for call in calls) for calls in both}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        whole.finish_reason
    ]


def test_tools_that_may_not_be_called_are_not_in_the_prompt(react: tuple[Any, Played]) -> None:
    client, model = react
    model.answer = Answer(ONE, 5, "stop")
    choice = ask(client, tool_choice="none").choices[0]
    assert choice.message.content == ONE and choice.message.tool_calls is None
    assert model.asked[0].prompt == agent_prompts("react_en").of_chat(TALK[1:2]).ids and not model.asked[0].stop


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools: [0] is not a tool"),
        ({"tools": [TOOL] * 129}, "tools: must be a list of at most 128 tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "a tool with a name and a description"),
        ({"tool_choice": "required"}, "tool_choice: is not supported"),
        ({"messages": [TALK[1], {"role": "assistant", "content": None}]}, "messages: [1] has no content"),
    ],
)
def test_mistakes(react: tuple[Any, Played], how: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(react[0], **how)
    assert words in caught.value.body["message"]


def test_a_server_without_such_a_format_refuses_tools(plain: tuple[Any, Played]) -> None:
    for how, words in (
        ({}, "tools: is not supported by this server: it runs without --agent_template react_en"),
        ({"tools": [], "messages": [{**TALK[2], "content": None}]}, "messages: [0] has no content"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(plain[0], **how)
        assert words in caught.value.body["message"]


@pytest.mark.slow
@pytest.mark.process
def test_a_trained_model_calls_a_tool(tmp_path: Path) -> None:
    """A run that has learned one conversation by heart is served with the --agent_template in its config.yaml."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokens, sizes = tokenizer("qwen"), {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokens),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokens.convert_tokens_to_ids("<|im_end|>"),
        **sizes,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "m")
    tokens.save_pretrained(tmp_path / "m")
    data = jsonl(tmp_path / "d.jsonl", [{"messages": TALK[1:5], "tools": [TOOL]}] * 8)
    how = {"model": tmp_path / "m", "dataset": data, "output_dir": tmp_path / "out", "max_steps": 120}
    how |= {"template": "chatml", "agent_template": "react_en", "engine": "ddp", "learning_rate": 5e-3}
    how |= {"per_device_train_batch_size": 4, "dataset_cache_dir": tmp_path / "cache"}
    words = [word for name, value in how.items() for word in (f"--{name}", str(value))]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "megaswift", "sft", *words], cwd=ROOT, env=env, check=True, timeout=300)
    with serving(tmp_path, "--model", str(tmp_path / "out")) as address:
        client = openai.OpenAI(base_url=address, api_key=TOKEN, max_retries=0)
        choice = ask(client, model="out", temperature=0).choices[0]
        assert choice.message.content == "Thought: add" and choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
        said = choice.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": "four"}
        answer = ask(client, [TALK[1], said, result], model="out", temperature=0).choices[0].message
    assert answer.content == "Final Answer: 4" and answer.tool_calls is None
