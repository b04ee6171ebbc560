"""Conversations of a client that the chat template cannot render are an error of the request, whatever it raises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.config.inference import ChatTemplateOptions
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
