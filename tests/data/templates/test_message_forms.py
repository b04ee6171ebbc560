"""A call in any dialect gives the text of the same call in the form that the template writes, and is trained."""

from __future__ import annotations

import json
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.row_counters import (
    EMPTY_ANSWERS,
    SPLIT_REASONING,
    UNUSED_CALLS,
    UNUSED_MESSAGES,
    UNUSED_TOOLS,
)
from megaswift.data.sources.files import DatasetFiles, split_into_parts
from megaswift.data.untokenized_sample import RowError
from megaswift.inference.chat_inputs import ChatInputRenderer
from tests.data.makers import config, template, tokenizer

ARGUMENTS = {"city": "Rome", "days": 2}
TEXT = json.dumps(ARGUMENTS)
SCHEMA = {
    "name": "lookup",
    "description": "looks it up",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": SCHEMA}]
ASK = {"role": "user", "content": "q"}
RESULT = {"role": "tool", "name": "lookup", "tool_call_id": "abcdefghi", "content": "sunny"}
DONE = {"role": "assistant", "content": "done"}


def openai(content: Any, arguments: Any) -> dict[str, Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content == "absent":
        del message["content"]
    return {"messages": [ASK, message, RESULT, DONE], "tools": TOOLS}


def turn(role: str, call: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": role, "content": json.dumps(call)}, RESULT, DONE], "tools": json.dumps(TOOLS)}


EMPTY = {"empty": "", "null": None, "absent": "absent"}
CALL = {"name": "lookup", "arguments": ARGUMENTS}
SAME = {
    "OpenAI": openai(None, TEXT),
    "empty content": openai("", TEXT),
    "no content": openai("absent", TEXT),
    "null and object": openai(None, ARGUMENTS),
    "object": openai("", ARGUMENTS),
    "compact JSON": openai("", json.dumps(ARGUMENTS, separators=(",", ":"))),
    "ms-swift": turn("tool_call", CALL),
    "a list": turn("tool_call", [CALL]),
    "arguments as text in a turn": turn("function_call", {**CALL, "arguments": TEXT}),
    "LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "sunny", "name": "lookup", "tool_call_id": "abcdefghi"},
            {"from": "gpt", "value": "done"},
        ],
        "tools": json.dumps(TOOLS),
    },
    "function_call": {
        "messages": [
            ASK,
            {"role": "assistant", "content": None, "function_call": {"name": "lookup", "arguments": TEXT}},
            RESULT,
            DONE,
        ],
        "tools": TOOLS,
    },
    "LLaMA-Factory v1": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0},
            {
                "role": "assistant",
                "content": [{"type": "tool_call", "value": json.dumps(CALL)}],
                "loss_weight": 1.0,
            },
            {**RESULT, "content": [{"type": "text", "value": "sunny"}], "loss_weight": 0.0},
            {"role": "assistant", "content": [{"type": "text", "value": "done"}], "loss_weight": 1.0},
        ],
        "tools": json.dumps(TOOLS),
    },
    "calls as text": {
        "messages": [ASK, {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])}, RESULT, DONE],
        "tools": TOOLS,
    },
}
"""The same conversation."""
PUBLISHED = [
    ("qwen", "qwen2_5"),
    ("qwen", "qwen3"),
    ("qwen", "qwen3_5_think"),
    ("qwen", "qwen3_8"),
    ("llama", "llama3_1"),
    ("harmony", "gptoss"),
    ("glm", "glm4moe"),
    ("qwen", "deepseekv3"),
    ("qwen", "deepseek_r1_distill"),
    ("gemma", "gemma4"),
    ("gemma", "gemma4_v5"),
    ("qwen", "lfm2_2_5"),
    ("qwen", "nemotron_3_nano"),
]
SEVERAL = [pair for pair in PUBLISHED if pair[1] not in ("llama3_1", "gptoss", "deepseek_r1_distill")]
"""Templates that write several calls and a content in one turn."""
MARK = "{{- '<|im_start|>' + m.role + '\\n' }}"
OWN = {
    # null content fails, as in Qwen3's template of April 2025
    "added": "{{- m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name + ' ' }}"
    "{{- c.function.arguments | tojson }}</tool_call>{% endfor %}",
    # DeepSeek's first: a call only where the content is null, arguments as text
    "none": "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}",
    # as it comes: Python's notation for an object
    "printed": "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments }}"
    "{% endfor %}",
    # an object of keys and values
    "items": "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v | tojson }}{% endfor %}{% endfor %}",
    # without the object around a function
    "bare": "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.name + ' ' }}{{ c.arguments | tojson }}"
    "{% endfor %}",
    "null is a word": "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}",
}


def source(body: str) -> str:
    prompt = "{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
    return "{%- for m in messages -%}" + MARK + body + "{{- '<|im_end|>\\n' }}{%- endfor -%}" + prompt


@cache
def row_encoder(kind: str, text: str) -> RowEncoder:
    """One for all rows of a template, as in a run: it renders a template's probes only once."""
    made = tokenizer(kind)
    made.chat_template = text
    return RowEncoder(encode_spec(config(Path("/tmp"), "x").data, made, "sft"))


def encoded(kind: str, text: str, row: dict[str, Any]) -> tuple[Any, Any]:
    """(the rendered conversation, its tokens and mask)."""
    encoder = row_encoder(kind, text)
    rendered = encoder.render(row)
    return rendered, [part.tolist() for part in next(iter(encoder.tokenize([rendered])))]


@pytest.mark.wide
@pytest.mark.parametrize("dialect", SAME)
@pytest.mark.parametrize(("kind", "name"), [*PUBLISHED, *(("qwen", name) for name in OWN)], ids=lambda v: v)
def test_every_dialect_gives_the_same_tokens(kind: str, name: str, dialect: str) -> None:
    text = source(OWN[name]) if name in OWN else template(name)
    wanted, tokens = encoded(kind, text, SAME["null and object"])
    rendered, made = encoded(kind, text, SAME[dialect])
    assert rendered.text == wanted.text and made == tokens
    said = "".join(rendered.text[a:b] for a, b in rendered.spans)
    assert all(word in said for word in ("lookup", "city", "Rome", "done"))
    assert not any(wrong in said for wrong in ('\\"city', "'city'", "None", "sunny"))


@pytest.mark.parametrize("content", [None, "", "absent"])
@pytest.mark.parametrize("arguments", [ARGUMENTS, TEXT], ids=["object", "text"])
@pytest.mark.parametrize(("kind", "name"), PUBLISHED[:8], ids=lambda v: v)
def test_the_text_is_transformers_own(kind: str, name: str, arguments: Any, content: Any) -> None:
    """Of the row, or where transformers raises or quotes twice, of a form of it that it renders."""
    row = openai(content, arguments)
    text = template(name)
    made = tokenizer(kind, name)
    texts = []
    for form in (openai(empty, given) for empty in (content, "absent", "", None) for given in (ARGUMENTS, TEXT)):
        try:
            kept = {"tools": TOOLS, "chat_template": text, **made.special_tokens_map}
            texts.append(render_jinja_template([form["messages"]], **kept)[0][0])
        except (TemplateError, TypeError):
            continue
    good = [t for t in texts if '\\"city' not in t and "'city'" not in t and "Rome" in t and "None" not in t]
    assert encoded(kind, text, row)[0].text in good[:2]


@pytest.mark.parametrize(("kind", "name"), SEVERAL, ids=lambda v: v)
def test_parts_of_llamafactory_v1_give_the_tokens_of_the_fields(kind: str, name: str) -> None:
    """As its reason_tool_use_demo_50.jsonl: reasoning and several calls in one list of parts."""
    other = {"name": "lookup", "arguments": {"city": "Köln", "days": 0}}
    calls = [{"type": "function", "function": one} for one in (CALL, other)]
    called = {"role": "assistant", "content": "wait", "reasoning_content": "why", "tool_calls": calls}
    parts = [{"type": "reasoning", "value": "why"}, {"type": "text", "value": "wait"}] + [
        {"type": "tool_call", "value": json.dumps(one)} for one in (CALL, other)
    ]
    fields = {"messages": [ASK, called, RESULT, RESULT, DONE], "tools": TOOLS}
    row = {"messages": [ASK, {"role": "assistant", "content": parts}, RESULT, RESULT, DONE], "tools": TOOLS}
    (wanted, tokens), (rendered, made) = (encoded(kind, template(name), one) for one in (fields, row))
    assert rendered.text == wanted.text and rendered.spans == wanted.spans and made == tokens


@pytest.mark.parametrize(
    ("kind", "name"), [("glm", "glm4moe"), ("qwen", "qwen3"), ("gemma", "gemma4")], ids=lambda v: v
)
def test_an_answer_of_reasoning_alone_is_trained(kind: str, name: str) -> None:
    """GLM's template ends it with no token."""
    rendered, _ = encoded(
        kind, template(name), {"messages": [ASK, {**DONE, "content": "", "reasoning_content": "why"}]}
    )
    said = "".join(rendered.text[a:b] for a, b in rendered.spans)
    assert ("why" in said) == ("why" in rendered.text) and rendered.text.rstrip().endswith(said.rstrip())


SAID = "You are a helpful assistant with access to the following functions. Use them if required -"
GLAIVE = {
    "system": f"SYSTEM: {SAID}\n{json.dumps(SCHEMA, indent=4)}\n\n{json.dumps({**SCHEMA, 'name': 'other'})}\n",
    "chat": 'USER: q\n\n\nASSISTANT: wait <functioncall> {"name": "lookup", "arguments": '
    '\'{"city": "L\'Aquila", "days": 2}\'} <|endoftext|>\n\n\nFUNCTION RESPONSE: {"sky": "sunny"}\n\n\n'
    "ASSISTANT: done <|endoftext|>\n\n\nUSER: Thanks: really\n\n\nASSISTANT: a\n\nb <|endoftext|>\n\n\n",
}


@pytest.mark.parametrize(("kind", "name"), [*SEVERAL, ("llama", "llama3_1"), ("harmony", "gptoss")], ids=lambda v: v)
def test_a_row_of_glaive_gives_the_tokens_of_openais(kind: str, name: str) -> None:
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"city": "L'Aquila", "days": 2}}}
    messages = [
        {"role": "system", "content": SAID},
        ASK,
        {"role": "assistant", "content": "wait", "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "sunny"}'},
        DONE,
        {"role": "user", "content": "Thanks: really"},
        {"role": "assistant", "content": "a\n\nb"},
    ]
    tools = [*TOOLS, {"type": "function", "function": {**SCHEMA, "name": "other"}}]
    (wanted, tokens), (rendered, made) = (
        encoded(kind, template(name), row) for row in ({"messages": messages, "tools": tools}, GLAIVE)
    )
    assert rendered.text == wanted.text and rendered.spans == wanted.spans and made == tokens


def test_calls_without_ids_get_those_that_a_template_requires() -> None:
    body = (
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}"
        "{% endif %}{{ c.id }} {{ c.function | tojson }}{% endfor %}{{ m.tool_call_id or '' }}"
    )
    row = turn("tool_call", CALL)
    given = encoded("qwen", source(body), row)[0].text
    assert 'abcdefghi {"name": "lookup"' in given and "sunnyabcdefghi" in given  # its result's
    del row["messages"][2]["tool_call_id"]
    rendered, _ = encoded("qwen", source(body), row)
    ids = [line for line in rendered.text.split("<|im_start|>") if line.startswith("tool\n")]
    assert ids[0].removeprefix("tool\nsunny")[:9] in rendered.text.partition("<|im_start|>tool")[0]
    kimi = body[: body.index("{% if")] + "{{ c.id }} {{ c.function.arguments | tojson }}{% endfor %}"
    assert "functions.lookup:0 {" in encoded("qwen", source(kimi), row)[0].text


def test_ids_that_only_a_result_asks_for() -> None:
    """As Apriel 1.5's template, which looks the call up behind its result."""
    body = (
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
        "{% endfor %}{% if m.role == 'tool' %}{{ messages[1].tool_calls[0].id + '' }}{% endif %}"
    )
    row = turn("tool_call", CALL)
    assert "lookup" in encoded("qwen", source(body), row)[0].text


def test_arguments_that_are_no_json_stay_text() -> None:
    rendered, _ = encoded("qwen", source(OWN["printed"]), openai("", "{city: Rome"))
    assert "lookup {city: Rome<|im_end|>" in rendered.text
    for arguments in ("", None, {}):
        assert "lookup {}<|im_end|>" in encoded("qwen", source(OWN["printed"]), openai("", arguments))[0].text


def test_a_row_is_refused_where_transformers_raises() -> None:
    with pytest.raises(RowError, match="rejects this conversation .no tools here"):
        encoded(
            "qwen", source("{% if m.tool_calls %}{{ raise_exception('no tools here') }}{% endif %}"), SAME["OpenAI"]
        )


def test_a_call_that_transformers_omits_is_counted_and_teaches_nothing() -> None:
    """The answers beside it are trained; an empty turn in its place would teach the model to stop immediately."""
    row = openai(None, TEXT)
    row["messages"][3:] = [{**DONE, "content": "so", "tool_calls": row["messages"][1]["tool_calls"]}, RESULT, DONE]
    for written in ("{{ m.content or '' }}", "{% if m.role != 'tool' %}{{ m.content or '' }}{% endif %}"):
        text = source(written)
        rendered, _ = encoded("qwen", text, row)
        assert rendered.text == render_jinja_template([row["messages"]], tools=TOOLS, chat_template=text)[0][0]
        assert [rendered.text[a:b] for a, b in rendered.spans] == ["so<|im_end|>", "done<|im_end|>"]
        assert UNUSED_CALLS in rendered.notes and (UNUSED_MESSAGES in rendered.notes) == ("role" in written)


def test_a_second_call_that_a_template_omits_is_counted() -> None:
    row = openai("", TEXT)
    calls = row["messages"][1]["tool_calls"]
    calls.append({**calls[0], "id": "123456789", "function": {"name": "find", "arguments": TEXT}})
    rendered, _ = encoded("qwen", source("{{ m.content }}{{ (m.tool_calls or ['']) | first | tojson }}"), row)
    assert "lookup" in rendered.text[slice(*rendered.spans[0])] and rendered.notes == (UNUSED_TOOLS, UNUSED_CALLS)


def test_an_empty_content_stays_where_transformers_renders_it() -> None:
    """DeepSeek-R1-Distill-Qwen-32B's template writes another turn for it; null is not written."""
    body = (
        "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments | tojson }}{% endfor %}"
        "{% if m.content is not none %}{{ '<|im_end|><|im_start|>' + m.content }}{% endif %}"
    )
    texts = {kind: encoded("qwen", source(body), openai(content, ARGUMENTS))[0].text for kind, content in EMPTY.items()}
    own = render_jinja_template([openai("", ARGUMENTS)["messages"]], tools=TOOLS, chat_template=source(body))[0][0]
    assert texts["empty"] == own and texts["null"] == texts["absent"] != own
    assert texts["null"] == own.replace("}<|im_end|><|im_start|><|im_end|>", "}<|im_end|>")


RESULTS: dict[str, Any] = {
    "object": {"sky": "sunny", "wind": {"m/s": [1, 2.5], "calm": False}},
    "list": [{"sky": "sunny"}, 3, "x"],
    "list of texts": ["sunny", "warm"],
    "empty list": [],
    "number": 21.5,
    "zero": 0,
    "boolean": True,
    "null": None,
    "parts": [{"type": "text", "text": "sunny"}],
}


@pytest.mark.wide
@pytest.mark.parametrize("content", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize(("kind", "name"), [*PUBLISHED, ("qwen", "printed")], ids=lambda v: v)
def test_what_a_tool_returns_goes_to_the_template_as_it_is(kind: str, name: str, content: Any) -> None:
    """The text is transformers', and the answers are those of the same row with a text as the result."""
    text = source(OWN[name]) if name in OWN else template(name)
    row = openai("", ARGUMENTS)
    made = tokenizer(kind)
    made.chat_template = text
    said = encoded(kind, text, row)[0]
    answers = [said.text[a:b] for a, b in said.spans]
    row["messages"][2] = {**RESULT, "content": content}
    written = "".join(part["text"] for part in content) if content == RESULTS["parts"] else content
    texts = []
    for one in (content, "" if content is None else written):
        result = {**RESULT, "content": one}
        if one is None:  # as apply_chat_template does
            del result["content"]
        for calling in (openai(empty, given)["messages"][1] for empty in ("", None) for given in (ARGUMENTS, TEXT)):
            try:
                kept = {"tools": TOOLS, "chat_template": text, **made.special_tokens_map}
                texts.append(render_jinja_template([[ASK, calling, result, DONE]], **kept)[0][0])
            except (TemplateError, TypeError):
                continue
        if texts and one is not content:
            break
    try:
        rendered, _ = encoded(kind, text, row)
    except RowError:
        assert not texts
        return
    assert rendered.text in texts
    assert [rendered.text[a:b] for a, b in rendered.spans] == answers


def test_a_result_that_a_template_omits_for_its_type_is_counted() -> None:
    """Qwen3's template writes texts alone."""
    row = openai("", ARGUMENTS)
    for content, notes in (("sunny", ()), ({"sky": "sunny"}, (UNUSED_MESSAGES,)), ([1], (UNUSED_MESSAGES,))):
        row["messages"][2] = {**RESULT, "content": content}
        assert encoded("qwen", template("qwen3"), row)[0].notes == notes
        assert encoded("qwen", template("qwen2_5"), row)[0].notes == ()


DIALECTS: dict[str, Any] = {
    "OpenAI": lambda content: openai(None, TEXT) | {"messages": [*openai(None, TEXT)["messages"][:2], content, DONE]},
    "ms-swift": lambda content: (
        turn("tool_call", CALL)
        | {"messages": [*turn("tool_call", CALL)["messages"][:2], {**content, "role": "tool_response"}, DONE]}
    ),
    "LLaMA-Factory": lambda content: {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": content["content"], "name": "lookup", "tool_call_id": "abcdefghi"},
            {"from": "gpt", "value": "done"},
        ],
        "tools": json.dumps(TOOLS),
    },
    "axolotl": lambda content: (
        openai(None, TEXT)
        | {"messages": [*openai(None, TEXT)["messages"][:2], {**content, "train": False}, {**DONE, "train": True}]}
    ),
}


@pytest.mark.parametrize("content", [{"sky": "sunny", "wind": {"calm": False}}, [{"sky": "sunny"}], [1, 2], 7], ids=str)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_results_in_every_dialect_and_file(tmp_path: Path, dialect: str, content: Any) -> None:
    """JSONL and Parquet, which holds contents of several types as JSON text, give the tokens of OpenAI's row."""
    text = template("llama3_1")
    row = DIALECTS[dialect]({**RESULT, "content": content})
    wanted, tokens = encoded("llama", text, DIALECTS["OpenAI"]({**RESULT, "content": content}))
    assert json.dumps(content) in wanted.text
    assert encoded("llama", text, row)[1] == tokens
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    flat = {column: value if isinstance(value, str) else json.dumps(value) for column, value in row.items()}
    pq.write_table(pa.Table.from_pylist([flat]), tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.parquet"):
        (part,) = split_into_parts(DatasetFiles(name, (tmp_path / name,)), 1)
        (located,) = part.rows()
        assert encoded("llama", text, located.row)[1] == tokens


@pytest.mark.parametrize("given", [TOOLS[0], json.dumps(TOOLS[0]), TOOLS, json.dumps(TOOLS)])
def test_one_tool_is_a_list_of_one(given: Any) -> None:
    text = template("llama3_1")
    assert encoded("llama", text, {**openai(None, TEXT), "tools": given}) == encoded("llama", text, SAME["OpenAI"])


def test_a_result_that_json_cannot_hold_is_refused() -> None:
    row = openai("", TEXT)
    for content in (b"x", {"at": date(2026, 1, 1)}, {1: "x"}, [{"a": object()}]):
        row["messages"][2] = {**RESULT, "content": content}
        with pytest.raises(RowError, match="expected what JSON can hold"):
            encoded("qwen", template("qwen3"), row)


def test_null_content_beside_reasoning() -> None:
    row = {"messages": [ASK, {"role": "assistant", "content": None, "reasoning_content": "well"}]}
    body = "{{ m.reasoning_content or '' }}{{ m.content }}"
    rendered, _ = encoded("qwen", source(body), row)
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["well<|im_end|>"]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("kind", "name"), PUBLISHED, ids=lambda v: v)
def test_an_answer_without_content_is_an_empty_turn(kind: str, name: str, last: bool) -> None:
    """As transformers renders an absent content, or an empty one where the template fails without it."""
    texts = []
    for answer in ({"role": "assistant"}, {"role": "assistant", "content": ""}):
        try:
            messages = [ASK, answer] if last else [ASK, answer, ASK, DONE]
            kept = {"chat_template": template(name), **tokenizer(kind, name).special_tokens_map}
            texts.append(render_jinja_template([messages], **kept)[0][0])
        except TemplateError:
            continue
    empty, tokens = encoded(kind, template(name), {"messages": messages})
    for answer in ({"role": "assistant", "content": None}, {"role": "assistant"}, {"from": "gpt", "value": None}):
        rendered, made = encoded(
            kind, template(name), {"messages": [ASK, answer] if last else [ASK, answer, ASK, DONE]}
        )
        assert rendered.text == texts[0] and rendered.notes == (EMPTY_ANSWERS,)
        assert rendered.text != empty.text or made == tokens


def test_a_misspelled_content_is_no_empty_turn() -> None:
    row = {"messages": [ASK, {"role": "assistant", "text": "done"}]}
    with pytest.raises(RowError, match="nothing, but a text in 'text'"):
        encoded("qwen", template("qwen3"), row)


@pytest.mark.parametrize(("kind", "name"), PUBLISHED, ids=lambda v: v)
def test_private_use_characters_of_a_row_are_text(kind: str, name: str) -> None:
    """Locating the turns uses such characters itself."""

    def row(*letters: str) -> dict[str, Any]:
        made = (
            json.dumps(openai("", {"city": "Rome{}", "days": 2})).replace("sunny", "{}sunny{}").replace('"q"', '"{}q"')
        )
        parts = made.replace('"done"', '"{}do{}ne{}"').split("{}")
        return json.loads(
            "".join(f"{part}{letters[i % len(letters)]}" for i, part in enumerate(parts[:-1])) + parts[-1]
        )

    own = chr(0xF0000), chr(0xF0001), chr(0xF0005), chr(0x10FFFD), chr(0xE000), chr(0xFFFFD)
    rendered, _ = encoded(kind, template(name), row(*own))
    wanted, _ = encoded(kind, template(name), row(*"αβγδεζ"))
    assert rendered.text == wanted.text.translate(dict(zip(map(ord, "αβγδεζ"), own, strict=True)))
    assert rendered.spans == wanted.spans and rendered.notes == wanted.notes


@pytest.mark.parametrize(("name", "noted"), [("qwen3_8", True), ("qwen3", False), ("qwen3_5_think", False)])
@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_reasoning_that_a_template_writes_behind_a_block_of_its_own_is_counted(
    name: str, noted: bool, opening: str
) -> None:
    row = {"messages": [ASK, {"role": "assistant", "content": opening + "REASON\n</think>\n\nANS"}]}
    rendered, _ = encoded("qwen", template(name), row)
    assert (SPLIT_REASONING in rendered.notes) == noted
    apart = {"messages": [ASK, {"role": "assistant", "content": "ANS", "reasoning_content": "REASON"}]}
    assert SPLIT_REASONING not in encoded("qwen", template(name), apart)[0].notes


def test_the_server_gives_a_call_to_the_template_as_training_does() -> None:
    made = tokenizer("qwen", "qwen2_5")
    texts = []
    for row in (SAME["OpenAI"], SAME["object"]):
        renderer = ChatInputRenderer.__new__(ChatInputRenderer)
        renderer.tokenizer, renderer.system, renderer._variables, renderer._agent = made, None, {}, None
        renderer._reader, renderer._longest, renderer.context, renderer.home = "no images", None, 4096, None
        texts.append(made.decode(renderer.of_chat(row["messages"][:3], row["tools"]).ids))
    assert texts[0] == texts[1] and '"arguments": {"city": "Rome"' in texts[0]
