"""What a message's fields say of its loss in each dialect, contents of every kind as transformers renders them, and
names of the user's file in messages."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.formats import parse_sample
from megaswift.data.row_counters import (
    UNKNOWN_ROLE,
    UNUSED_MESSAGES,
    UNUSED_PARTS,
    WITHOUT_CONTENT,
    note_text,
    unknown_role_note,
)
from megaswift.data.templates.probes import NAMED_ROLES
from megaswift.data.templates.render import RenderedConversation
from megaswift.data.untokenized_sample import RowError
from tests.data.makers import config, tokenizer

Q = {"role": "user", "content": "q"}
NAMES = ("weight", "loss_weight", "train", "training")


def answer(text: str = "a", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, False, True, None])
@pytest.mark.parametrize("role", ["assistant", "tool_call"])
def test_weights_of_other_toolkits_are_loss_flags(name: str, value: Any, role: str) -> None:
    first = answer() if role == "assistant" else {"role": role, "content": '{"name": "f", "arguments": {}}'}
    result = [] if role == "assistant" else [{"role": "tool", "content": "r"}]
    rows = [
        {"messages": [Q, {**first, key: value if key == name else flag}, *result, Q, answer("b")]}
        for key, flag in ((name, value), ("loss", None if value is None else bool(value)))
    ]
    assert parse_sample(rows[0], "sft") == parse_sample(rows[1], "sft")


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_other_formats(name: str) -> None:
    turns = [{"from": "human", "value": "q", name: 0}, {"from": "gpt", "value": "a", name: 0}]
    assert parse_sample({"conversations": turns}, "sft").loss == (False, False)
    rounds = [{"human": "q", "assistant": "a", name: 0}, {"human": "q", "assistant": "b"}]
    sample = parse_sample({"conversation": rounds}, "sft")
    assert sample.loss == (None, False, None, None)
    assert all(set(m) == {"role", "content"} for m in sample.messages)


def test_a_message_is_excluded_if_any_field_says_so() -> None:
    assert parse_sample({"messages": [Q, answer(loss=True, weight=0)]}, "sft").loss == (None, False)
    assert parse_sample({"messages": [Q, answer(train=False, loss_scale=1)]}, "sft").loss == (None, False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.5, 2, -1, "0", "true", [], {}])
def test_weights_that_are_no_flags_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RowError) as e:
        parse_sample({"messages": [Q, answer(**{name: value})]}, "sft")
    assert e.value.column == f"messages[1].{name}" and e.value.expected == "0, 1, false or true"


def test_weights_where_nothing_can_be_trained_on_are_refused() -> None:
    with pytest.raises(RowError) as e:
        parse_sample({"messages": [Q | {"weight": 1}, answer()]}, "sft")
    assert e.value.column == "messages[0].weight" and "user message" in e.value.found
    with pytest.raises(RowError) as e:
        parse_sample(
            {"messages": [Q, answer(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}])]}, "sft"
        )
    assert e.value.column == "messages[1].train_detail"


CONTROL = ["\x1b]0;title\x07", "\nmegaswift: fake line", "\r", "\x9b2J", "\u2028", "\u202e"]


@pytest.mark.parametrize("text", CONTROL)
def test_control_characters_of_a_row_do_not_reach_the_terminal(text: str) -> None:
    errors = []
    for row in ({f"a{text}": "x"}, {"messages": [Q, {"role": [f"r{text}"], "content": "c"}]}):
        with pytest.raises(RowError) as e:
            parse_sample(row, "sft")
        errors += [e.value.where, e.value.found, e.value.fix]
    row = {"messages": [Q, {"role": f"r{text}", "content": "c"}, answer()]}
    errors += [note_text(note) for note in rendered(chat_tokenizer("qwen", "qwen2_5_vl"), row).notes]
    with pytest.raises(RowError) as e:
        rendered(chat_tokenizer("mistral", "mistral"), row)
    errors += [e.value.where, e.value.found, e.value.fix]
    assert not any(text in one for one in errors)


PUBLISHED = [
    *(("qwen", name) for name in ("qwen3", "qwen3_8", "qwen2_5_vl", "qwen3_training")),
    ("llama", "llama3_1"),
    ("gemma", "gemma3"),
    ("gemma", "gemma4"),
    ("glm", "glm4moe"),
    ("harmony", "gptoss"),
]
CALL = {"name": "f", "arguments": {}}
CALLING = {"role": "assistant", "tool_calls": [{"type": "function", "id": "abcdefghi", "function": CALL}]}
RESULT = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
ABSENT: Any = "absent"


def saying(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role} | ({} if content is ABSENT else {"content": content}) | fields


def turn(name: str, content: Any) -> dict[str, Any]:
    return {"from": name} | ({} if content is ABSENT else {"value": content})


def parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "value": text}]


def rows_of(content: Any) -> dict[str, dict[str, Any]]:
    """Conversations with a message of this content, in each dialect."""
    swift = {"role": "tool_call", "content": json.dumps(CALL)}
    return {
        "user": {"messages": [Q, answer("one"), saying("user", content), answer("two")]},
        "first user": {"messages": [saying("user", content), answer("one"), Q, answer("two")]},
        "system": {"messages": [saying("system", content), Q, answer("two")]},
        "tool": {"messages": [Q, CALLING, {**RESULT, **saying("tool", content)}, answer("two")], "tools": TOOLS},
        "ms-swift": {"messages": [Q, swift, saying("tool_response", content), answer("two")], "tools": TOOLS},
        "ShareGPT": {
            "conversations": [turn("human", "q"), turn("gpt", "one"), turn("human", content), turn("gpt", "two")]
        },
        "LLaMA-Factory": {
            "conversations": [
                turn("human", "q"),
                turn("function_call", json.dumps(CALL)),
                turn("observation", content),
                turn("gpt", "two"),
            ],
            "tools": json.dumps(TOOLS),
        },
        "LLaMA-Factory v1": {
            "messages": [
                saying("user", parts("q")),
                saying("assistant", parts("one"), loss_weight=1.0),
                saying("user", content, loss_weight=0.0),
                saying("assistant", parts("two"), loss_weight=1.0),
            ]
        },
        "axolotl": {
            "messages": [Q, answer("one", train=True), saying("user", content, train=False), answer("two", train=True)]
        },
    }


@cache
def chat_tokenizer(kind: str, name: str) -> Any:
    return tokenizer(kind, name)


@cache
def row_encoder(tok: Any) -> RowEncoder:
    """One for all rows of a tokenizer, as in a run: it renders a template's probes only once."""
    return RowEncoder(encode_spec(config(Path("/tmp"), "x").data, tok, "sft"))


def rendered(tok: Any, row: dict[str, Any]) -> RenderedConversation:
    return row_encoder(tok).render(row)


def of_transformers(tok: Any, row: dict[str, Any]) -> str | None:
    """transformers' text of the row as it is parsed; None where the template raises."""
    sample = parse_sample(row, "sft")
    try:
        tools = None if sample.tools is None else list(sample.tools)
        return tok.apply_chat_template([dict(m) for m in sample.messages], tools=tools, tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return None


@pytest.mark.parametrize("dialect", rows_of(""))
@pytest.mark.parametrize(("kind", "name"), PUBLISHED, ids=lambda v: v)
def test_messages_without_content_are_trained_as_transformers_renders_them(kind: str, name: str, dialect: str) -> None:
    """Null and absent alike; with an empty content where the template raises for both."""
    tok = chat_tokenizer(kind, name)
    empty = of_transformers(tok, rows_of("")[dialect])
    said = rows_of("MIDDLE")[dialect]
    want = rendered(tok, said) if of_transformers(tok, said) is not None else None
    for content in (None, ABSENT):
        row = rows_of(content)[dialect]
        own = of_transformers(tok, row) or empty
        if own is None:  # as it is; calls may go to the template in another form (test_message_forms.py)
            if "tools" not in row:
                with pytest.raises(RowError, match="rejects this conversation"):
                    rendered(tok, row)
            continue
        made = rendered(tok, row)
        assert made.text == own and WITHOUT_CONTENT in made.notes
        if want is not None:
            assert WITHOUT_CONTENT not in want.notes
            assert [made.text[a:b] for a, b in made.spans] == [want.text[a:b] for a, b in want.spans]


OTHERS: dict[str, Any] = {
    "audio": [{"type": "text", "text": "MIDDLE"}, {"type": "input_audio", "input_audio": {"data": "x"}}],
    "a document": [{"type": "document", "text": "DOC"}, {"type": "text", "text": "MIDDLE"}],
    "an image": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "MIDDLE"}],
    "audio alone": [{"type": "input_audio", "input_audio": {"data": "x"}}],
    "another text": [{"type": "input_text", "text": "MIDDLE"}],
    "no type": [{"text": "MIDDLE"}],
    "no text": [{"type": "text", "text": None}, {"type": "text", "text": "MIDDLE"}],
    "strings": ["MIDDLE", "END"],
    "an object": {"key": "MIDDLE"},
    "a number": 70717,
    "true": True,
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(("kind", "name"), PUBLISHED, ids=lambda v: v)
def test_contents_of_other_kinds_are_trained_as_transformers_renders_them(kind: str, name: str, content: Any) -> None:
    """Of each role; a row is refused where the template raises, and only there."""
    tok = chat_tokenizer(kind, name)
    for dialect in ("user", "system", "tool", "ShareGPT", "assistant"):
        if dialect == "assistant":
            row = {"messages": [Q, answer("one"), Q, answer(content)]}
        else:
            row = rows_of(content)[dialect]
        own = of_transformers(tok, row)
        if own is None:
            with pytest.raises(RowError, match="the chat template rejects"):
                rendered(tok, row)
            continue
        made = rendered(tok, row)
        assert made.text == own
        spans = [made.text[a:b] for a, b in made.spans]
        if dialect != "assistant":
            assert "two" in spans[-1] and not any("MIDDLE" in one or "70717" in one for one in spans)
        elif "MIDDLE" in own:
            assert "MIDDLE" in spans[-1] and "one" in spans[0]
        omitted = "MIDDLE" in json.dumps(content) and "MIDDLE" not in own
        assert not omitted or {UNUSED_MESSAGES, UNUSED_PARTS} & {*made.notes}


def test_lost_parts_are_counted() -> None:
    tok = chat_tokenizer("qwen", "qwen2_5_vl")
    for content in (OTHERS["audio"], OTHERS["a document"][::-1], OTHERS["an image"], OTHERS["audio alone"]):
        notes = rendered(tok, {"messages": [saying("user", content), answer()]}).notes
        assert (UNUSED_PARTS in notes) == (content[-1].get("text") != "DOC")
    plain = {"messages": [saying("user", [{"type": "text", "text": "q"}]), answer()]}
    assert rendered(tok, plain).notes == ()


def test_a_turn_may_have_its_text_in_content() -> None:
    turns = [{"from": "human", "content": "q"}, {"from": "gpt", "content": "a"}]
    assert parse_sample({"conversations": turns}, "sft").messages == (Q, answer())


def test_a_refusal_of_openai_is_an_empty_answer() -> None:
    """Its field is none that templates read."""
    row = {"messages": [Q, {"role": "assistant", "content": None, "refusal": "no"}]}
    assert rendered(chat_tokenizer("qwen", "qwen3"), row).notes == ("empty_answers",)


TURNS = {
    ("qwen", "qwen3"): ("one<|im_end|>", "two<|im_end|>"),
    ("qwen", "qwen2_5"): ("one<|im_end|>", "two<|im_end|>"),
    ("qwen", "qwen3_training"): ("<think>\n\n</think>\n\none<|im_end|>\n", "<think>\n\n</think>\n\ntwo<|im_end|>\n"),
    ("llama", "llama3_1"): ("one<|eot_id|>", "two<|eot_id|>"),
    ("gemma", "gemma3"): ("one", "two"),  # the tokenizer's end of a turn is Gemma 4's
    ("gemma", "gemma4"): ("one<turn|>", "two<turn|>"),
    ("glm", "glm4moe"): ("one", "two"),
    ("harmony", "gptoss"): ("<|channel|>final<|message|>one<|end|>", "<|channel|>final<|message|>two<|return|>"),
    ("mistral", "mistral"): ("one</s>", "two</s>"),
}
"""What carries loss of two answers."""


@pytest.mark.parametrize("role", ["critic", "asistant", "Environment", ""])
@pytest.mark.parametrize(("kind", "name"), TURNS, ids=lambda v: v)
def test_messages_of_unknown_roles_are_trained_as_transformers_renders_them(kind: str, name: str, role: str) -> None:
    """Without loss, wherever they stand; with the template's own message where it raises, and only there."""
    tok = chat_tokenizer(kind, name)
    said = saying(role, "MIDDLE")
    before = [Q, answer("one")]
    for messages in (
        [*before, said, answer("two")],
        [*before, said, Q, answer("two")],
        [*before, Q, said, answer("two")],
        [*before, Q, answer("two"), said],
        [said, *before, Q, answer("two")],
        [Q, said, answer("one"), said, answer("two")],
        [Q, said, Q, answer("one"), Q, answer("two")],
    ):
        turns = [turn("gpt" if m["role"] == "assistant" else m["role"], m["content"]) for m in messages]
        for row in ({"messages": messages}, {"conversations": turns}):
            try:
                text = tok.apply_chat_template(messages, tokenize=False)
            except TemplateError as refusal:
                with pytest.raises(RowError) as e:
                    rendered(tok, row)
                assert str(refusal) in e.value.found and repr(role).replace("'", '"') in e.value.found
                assert e.value.column == f"messages[{messages.index(said)}].role"
                continue
            made = rendered(tok, row)
            assert made.text == text
            first, second = TURNS[kind, name]
            own = [made.text[a:b] for a, b in made.spans]
            assert own == [first, second] or (messages[-1] is said and own == [first, second.replace("return", "end")])
            assert made.notes == (unknown_role_note(role), *([] if "MIDDLE" in text else [UNUSED_MESSAGES]))


def test_a_message_of_an_unknown_role_cannot_be_trained() -> None:
    with pytest.raises(RowError, match="true on a critic message"):
        parse_sample({"messages": [Q, saying("critic", "x", loss=True), answer()]}, "sft")
    unflagged = {"messages": [Q, saying("critic", "x", loss=False)]}
    assert rendered(chat_tokenizer("llama", "llama3_1"), unflagged).spans == ()


def test_as_many_unknown_roles_are_named_as_a_user_reads() -> None:
    encoder = RowEncoder(encode_spec(config(Path("/tmp"), "x").data, chat_tokenizer("qwen", "qwen3"), "sft"))
    messages = [saying(f"speaker {i}", "x") for i in range(NAMED_ROLES + 2)]
    notes = encoder.render({"messages": [Q, *messages, answer()]}).notes
    named = [unknown_role_note(f"speaker {i}") for i in range(NAMED_ROLES)]
    assert [note for note in notes if note.startswith(UNKNOWN_ROLE)] == [*named, UNKNOWN_ROLE]
    assert note_text(named[0]).endswith("('speaker 0')") and "(" not in note_text(UNKNOWN_ROLE)
    assert len(unknown_role_note("x" * 1000)) < 70
