"""Prompts of conversations: what the chat template refuses, its variables, tools as --agent_template writes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.options.agent_templates import AGENT_TEXTS
from megaswift.data.templates.render import load_chat_templates
from megaswift.errors import ConfigError
from megaswift.inference.chat_inputs import ChatInputError, ChatInputRenderer
from megaswift.inference.options.commands import ChatTemplateOptions
from megaswift.serve.prompt_rows import PromptRows, read_prompt_file
from tests.data.makers import config, jsonl, tokenizer

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Thought: add", "tool_calls": CALLS},
    {"role": "tool", "content": "four", "tool_call_id": "1"},
    {"role": "assistant", "content": "Final Answer: 4"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / (messages | length - 1) }}",
        "{% for i in range(10 ** 5 * messages | length) %}{{ range(10 ** 6) }}{% endfor %}",
        "{{ messages[0].content + 1 }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_raises_refuses_the_conversation(template: str) -> None:
    tokens = tokenizer("qwen", None)
    tokens.chat_template = template
    prepared: Any = SimpleNamespace(
        tokenizer=tokens, context=None, reader="text only", options=SimpleNamespace(model="m")
    )
    with pytest.raises(ChatInputError, match="the chat template rejects this conversation"):
        ChatInputRenderer(prepared, ChatTemplateOptions()).of_chat([{"role": "user", "content": "hi"}])


def test_the_template_s_variable_for_reasoning() -> None:
    """Qwen3's own template closes the thoughts where none are wanted; transformers' rendering is the reference."""
    tokens = tokenizer("qwen", None)
    tokens.chat_template = (
        "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking is false %}"
        "<think></think>{% elif enable_thinking is defined %}<think>{% endif %}"
    )
    prepared: Any = SimpleNamespace(
        tokenizer=tokens, context=None, reader="text only", options=SimpleNamespace(model="m")
    )
    messages = [{"role": "user", "content": "hi"}]
    found = {}
    for value, how in ((None, {}), (True, {"enable_thinking": True}), (False, {"enable_thinking": False})):
        renderer = ChatInputRenderer(prepared, ChatTemplateOptions(enable_thinking=value))
        want = tokens.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **how)["input_ids"]
        found[value] = renderer.of_chat(messages).ids
        assert found[value] == tuple(want)
    assert len(set(found.values())) == 3
    tokens.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match="the chat template of this model does not read it"):
        ChatInputRenderer(prepared, ChatTemplateOptions(enable_thinking=True))


def agent_prompts(name: str | None) -> ChatInputRenderer:
    tokens = tokenizer("qwen", None)
    tokens.chat_template = load_chat_templates(tokens, "chatml").named["default"]
    prepared: Any = SimpleNamespace(tokenizer=tokens, context=None, reader="text", options=SimpleNamespace(model="m"))
    return ChatInputRenderer(prepared, ChatTemplateOptions(agent_template=name))


@pytest.mark.parametrize("name", AGENT_TEXTS)
def test_tools_as_text_are_the_tokens_of_training(name: str, tmp_path: Path) -> None:
    """The prompt of each answer is what stands before its loss in the trained row; of a file's row the last one."""
    row = {"messages": TALK, "tools": [TOOL]}
    data = config(tmp_path, "x", agent_template=name, chat_template="chatml").data
    encoder = RowEncoder(encode_spec(data, tokenizer("qwen"), "sft"))
    ids, mask = next(encoder.tokenize([encoder.render(row)]))
    starts = np.flatnonzero(np.diff(np.concatenate([[0], mask]).astype(int)) == 1)
    prompts = agent_prompts(name)
    answers = [i for i, message in enumerate(TALK) if message["role"] == "assistant"]
    assert len(starts) == len(answers) == 3
    for start, answer in zip(starts, answers, strict=True):
        made = prompts.of_chat(TALK[:answer], [TOOL])
        assert made.ids == tuple(ids[:start].tolist())
        word = "Observation:" if name.startswith("react") else "✿RESULT✿:"
        assert prompts.request(made, 5, ("x",)).stop == ("x", word)
    assert prompts.request(prompts.of_chat(TALK[5:6]), 5, ()).stop == ()
    rows = read_prompt_file(PromptRows((jsonl(tmp_path / "d.jsonl", [row]),), {}), lambda path: prompts)
    assert rows[0].prompt.ids == tuple(ids[: starts[-1]].tolist()) and rows[0].prompt.stop


def test_formats_of_tool_calls_that_do_not_fit() -> None:
    """A format of a chat template is checked, as in training; what a format cannot say is an error of the request."""
    with pytest.raises(ConfigError, match="--agent_template hermes: the chat template writes tool calls otherwise"):
        agent_prompts("hermes")
    with pytest.raises(ConfigError, match="--agent_template toolbench: has instructions that are prose"):
        agent_prompts("toolbench")
    with pytest.raises(ChatInputError, match=r"tools\[0\]: .*a tool with a name and a description"):
        agent_prompts("react_en").of_chat(TALK[:2], [{"name": "add"}])
    assert agent_prompts(None).agent is None
