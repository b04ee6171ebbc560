"""Conversations of a client that the chat template cannot render are an error of the request, whatever it raises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.config.inference import ChatTemplateOptions
from megaswift.errors import ConfigError
from megaswift.inference.chat_inputs import ChatInputError, ChatInputRenderer
from tests.data.makers import tokenizer


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
