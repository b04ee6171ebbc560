"""Messages without loss, or with weighed parts, in templates whose generation blocks are not one a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.row_counters import UNUSED_MESSAGES
from megaswift.data.untokenized_sample import RowError
from tests.data.makers import config, template, tokenizer

Q, AGAIN = ({"role": "user", "content": text} for text in ("one?", "two?"))
ONE, TWO = ({"role": "assistant", "content": text} for text in ("first", "second"))
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "abcdefghi"}


def chatml(answer: str, of_others: str = "{{ m.content }}<|im_end|>") -> str:
    """A template that writes answers so."""
    return (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' -%}"
        + answer
        + "{%- "
        "else -%}" + of_others + "{%- endif -%}{{ '\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    )


APART = chatml(
    "{%- if m.reasoning_content -%}{% generation %}{{ '<think>' + m.reasoning_content + '</think>' }}"
    "{% endgeneration %}{{ '\\n' }}{%- endif -%}{% generation %}{{ m.content }}{% endgeneration %}"
    "{%- for c in m.tool_calls or [] -%}{% generation %}{{ c.function | tojson }}{% endgeneration %}{%- endfor -%}"
    "{% generation %}<|im_end|>{% endgeneration %}"
)
"""Reasoning, content, calls and the end of a turn in blocks of their own."""
TEXTS_ONLY = chatml(
    "{%- if m.tool_calls -%}{{ m.tool_calls[0].function | tojson }}<|im_end|>{%- else -%}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{%- endif -%}"
)
"""Calls are in no block."""
WHOLE = "{% generation %}" + chatml("{{ m.content }}<|im_end|>") + "{% endgeneration %}"
"""All is one block."""
QUESTIONS = chatml(
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}",
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>",
)
"""Questions are in blocks, too."""
LENGTHS = APART.replace("{{ m.content }}", "{{ m.content | length }}")
"""Contents are changed, so that the turns cannot be located."""


def encoded(kind: str, source: str, row: dict[str, Any], **options: Any) -> tuple[Any, list[str], list[int]]:
    """(the rendered conversation, its loss spans as text, the loss mask of its tokens)."""
    tok = tokenizer(kind)
    tok.chat_template = source
    encoder = RowEncoder(encode_spec(config(Path("/tmp"), "x", **options).data, tok, "sft"))
    rendered = encoder.render(row)
    mask = next(iter(encoder.tokenize([rendered])))[1].tolist()
    return rendered, [rendered.text[a:b] for a, b in rendered.spans], mask


def spans(source: str, *messages: dict[str, Any], **options: Any) -> list[str]:
    return encoded("qwen", source, {"messages": list(messages)}, **options)[1]


def without(message: dict[str, Any], name: str = "weight") -> dict[str, Any]:
    return message | {name: 0}


@pytest.mark.parametrize("name", ["weight", "loss_weight", "train"])
def test_blocks_of_parts_of_a_turn(name: str) -> None:
    thought = ONE | {"reasoning_content": "hm"}
    ones, twos = ["<think>hm</think>", "first", "<|im_end|>"], ["second", "<|im_end|>"]
    assert spans(APART, Q, thought, AGAIN, TWO) == [*ones, *twos]
    assert spans(APART, Q, without(thought, name), AGAIN, TWO) == twos
    assert spans(APART, Q, thought, AGAIN, without(TWO, name)) == ones
    assert spans(APART, Q, thought, AGAIN, TWO, loss_scale="last_round") == twos
    called = ['{"name": "add", "arguments": {"a": 1}}', "<|im_end|>"]
    assert [one for one in spans(APART, Q, CALL, RESULT, without(TWO)) if one] == called
    assert spans(APART, Q, without(CALL), RESULT, TWO) == twos


def test_as_many_blocks_as_messages_may_still_be_of_one() -> None:
    """The second answer is in no block, the first in two."""
    source = chatml(
        "{%- if loop.last -%}{{ m.content }}{%- else -%}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% generation %}<|im_end|>{% endgeneration %}{%- endif -%}"
    )
    assert spans(source, Q, ONE, AGAIN, TWO) == ["first", "<|im_end|>"]
    assert spans(source, Q, ONE, AGAIN, without(TWO)) == ["first", "<|im_end|>"]
    assert spans(source, Q, without(ONE), AGAIN, TWO) == []


def test_turns_without_a_block() -> None:
    rendered, said, _ = encoded("qwen", TEXTS_ONLY, {"messages": [Q, CALL, RESULT, ONE, AGAIN, without(TWO)]})
    assert said == ["first<|im_end|>"] and UNUSED_MESSAGES not in rendered.notes
    assert spans(TEXTS_ONLY, Q, without(CALL), RESULT, ONE, AGAIN, TWO) == ["first<|im_end|>", "second<|im_end|>"]


ASSISTANT_OR_USER = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{%- else -%}{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""Messages of all roles but the user's are in blocks."""


@pytest.mark.parametrize(
    "source",
    [
        ASSISTANT_OR_USER,
        ASSISTANT_OR_USER.replace("{{ m.content }}", "{{ m.content | trim }}"),
        "{{ messages | length }}" + ASSISTANT_OR_USER + "{{ '.' * (messages | length) }}",
        "{{ '.' * (messages | length) }}" + ASSISTANT_OR_USER,
        "{% generation %}" + chatml("{{ m.content }}<|im_end|>") + "{% endgeneration %}",
    ],
)
@pytest.mark.parametrize("said", ["MIDDLE", "", "first"])
def test_a_block_of_an_unknown_role_carries_no_loss(source: str, said: str) -> None:
    """Also where the template takes it for the assistant's, and renders shorter conversations differently."""
    critic = {"role": "critic", "content": said}
    ones, twos = "first<|im_end|>", "second<|im_end|>"
    assert spans(source, Q, ONE, critic, TWO) == [ones, twos]
    assert spans(source, Q, critic, ONE, AGAIN, TWO, critic) == [ones, twos]
    assert spans(source, Q, critic, without(ONE), AGAIN, TWO) == [twos]
    assert spans(source, Q, critic, ONE, AGAIN, TWO, loss_scale="last_round") == [twos]


def test_a_block_over_several_turns_is_cut() -> None:
    """A header or a question beside an answer without loss carries none."""
    head = "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
    assert spans(WHOLE, Q, ONE, AGAIN, without(TWO)) == [head + "first<|im_end|>"]
    assert spans(WHOLE, Q, without(ONE), AGAIN, TWO) == ["second<|im_end|>\n"]
    third = TWO | {"content": "third"}
    said = spans(WHOLE, Q, ONE, AGAIN, TWO, Q, without(third))
    assert "".join(said).endswith("two?<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>")


def test_a_block_apart_from_all_answers_goes_with_the_next() -> None:
    assert spans(QUESTIONS, Q, ONE, AGAIN, without(TWO)) == ["one?", "first<|im_end|>"]
    assert spans(QUESTIONS, Q, without(ONE), AGAIN, TWO) == ["two?", "second<|im_end|>"]


def test_blocks_of_changed_contents_are_told_apart_by_what_each_message_adds() -> None:
    assert spans(LENGTHS, Q, ONE, AGAIN, without(TWO)) == ["5", "<|im_end|>"]
    assert spans(LENGTHS, Q, without(ONE), AGAIN, TWO) == ["6", "<|im_end|>"]
    ahead = LENGTHS.replace("m.content | length", "(m.content | length) + (messages | length)")
    assert spans(ahead, Q, ONE, AGAIN, TWO) == ["9", "<|im_end|>", "10", "<|im_end|>"]
    told = "4 generation blocks for 2 assistant messages, .* it is undecidable whose block is whose"
    with pytest.raises(RowError, match=told):
        spans(ahead.replace("(messages | length)", "10 ** (messages | length)"), Q, ONE, AGAIN, without(TWO))


def test_tables_weigh_the_parts_of_each_block() -> None:
    row = {"messages": [Q, ONE | {"content": "<tool_call>{}</tool_call>first"}, AGAIN, without(TWO)]}
    rendered, said, _ = encoded("qwen", APART, row, loss_scale="hermes")
    weighed = [one for one in zip(said, rendered.weights, strict=True) if one[0]]
    assert weighed == [("<tool_call>{}</tool_call>", 2), ("first", 1), ("<|im_end|>", 1)]


def test_parts_of_agent_text_in_several_blocks() -> None:
    call = {"role": "tool_call", "content": '{"name": "add", "arguments": {}}'}
    messages = [Q, ONE, call, RESULT, TWO]
    said = spans(APART, *messages, agent_template="react_en")
    assert "3" not in "".join(said) and said[-1] == "<|im_end|>" and any("second" in one for one in said)
    plain = chatml("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}")
    assert "".join(said) == "".join(spans(plain, *messages, agent_template="react_en"))
    said = spans(APART, *messages[:-1], without(TWO), agent_template="react_en")
    assert any("first" in one for one in said) and not any("second" in one for one in said)


PUBLISHED = ["phi3_training", "phi3_5_training", "diffusion_gemma_training"]
"""TRL's templates that mark more blocks than messages."""
TOKENS = {"phi3_training": "qwen", "phi3_5_training": "qwen", "diffusion_gemma_training": "gemma"}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("messages", [[Q, ONE, AGAIN, TWO], [Q, ONE, AGAIN, ONE, Q, TWO], [Q, ONE, TWO]], ids=len)
def test_the_masks_of_single_answers_add_up_to_transformers(name: str, messages: list[dict[str, Any]]) -> None:
    source = template(name)
    tok = tokenizer(TOKENS[name])
    tok.chat_template = source
    oracle = tok.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)["assistant_masks"]
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    masks = []
    for i in turns:
        flagged = [m | {"weight": int(n == i)} if n in turns else m for n, m in enumerate(messages)]
        rendered, said, mask = encoded(TOKENS[name], source, {"messages": flagged})
        assert messages[i]["content"] in "".join(said)
        masks.append(mask)
    assert [sum(flags) for flags in zip(*masks, strict=True)] == oracle
    assert len(set(map(tuple, masks))) == len(turns)
