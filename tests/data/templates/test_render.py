"""Chat masks: transformers' own for marked templates, hand-worked ones for the published templates that mark
nothing.

Covers: megaswift/data/templates/turns.py, megaswift/data/templates/probes.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from megaswift.data.encode.rows import RowEncoder, encode_spec, token_range_of_characters
from megaswift.data.row_counters import UNUSED_CALLS, UNUSED_MESSAGES, UNUSED_PARTS
from megaswift.data.templates.render import ChatRenderer, load_chat_templates
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import DataError
from tests.data.makers import TEXT, config, template, tokenizer

Q, A = (
    {"role": "user", "content": "  What is the capital of France? "},
    {"role": "assistant", "content": " Paris, of course.\n"},
)
SYSTEM = {"role": "system", "content": "Be brief."}
THINK = {"role": "assistant", "content": "<think>\nlet me think\n</think>\n\nThe answer is 42."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "3", "name": "add", "tool_call_id": "abcdefghi"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


def encoded(kind: str, name: str, row: dict[str, Any], **options: Any) -> tuple[Any, list[int], list[int], list[str]]:
    """(tokenizer, ids, mask, the loss spans as text) of one row."""
    tok = tokenizer(kind, name)
    encoder = RowEncoder(encode_spec(config(Path("/tmp"), "x", **options).data, tok, "sft"))
    rendered = encoder.render(row)
    ids, mask = next(encoder.tokenize([rendered]))
    return tok, ids.tolist(), mask.tolist(), [rendered.text[a:b] for a, b in rendered.spans]


FINAL = "<|channel|>final<|message|>"
XML_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
PUBLISHED = [
    ("llama", "llama3", [SYSTEM, Q, A, user("x"), answer("y")], ["Paris, of course.<|eot_id|>", "y<|eot_id|>"]),
    ("llama", "llama3_1", [Q, A], ["Paris, of course.<|eot_id|>"]),
    (
        "llama",
        "llama3_1",
        [SYSTEM, Q, CALL, RESULT, A],
        ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "Paris, of course.<|eot_id|>"],
    ),
    (
        "llama",
        "llama3_2",
        [Q, A, user("assistant"), answer("assistant")],
        ["Paris, of course.<|eot_id|>", "assistant<|eot_id|>"],
    ),
    ("qwen", "qwen2_5", [Q, A, user("b"), answer("b")], [" Paris, of course.\n<|im_end|>", "b<|im_end|>"]),
    ("qwen", "qwen2_5", [Q, answer("  x")], ["  x<|im_end|>"]),
    (
        "qwen",
        "qwen2_5",
        [SYSTEM, Q, CALL, RESULT, A],
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
            " Paris, of course.\n<|im_end|>",
        ],
    ),
    (
        "qwen",
        "qwen2_5",
        [Q, CALL | {"content": "I add."}, RESULT, RESULT, answer("ok")],
        ['I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>', "ok<|im_end|>"],
    ),
    (
        "qwen",
        "qwen3",
        [Q, THINK, user("and?"), THINK],
        ["The answer is 42.<|im_end|>", "<think>\nlet me think\n</think>\n\nThe answer is 42.<|im_end|>"],
    ),
    (
        "qwen",
        "qwen3",
        [Q, answer("yes", reasoning_content="because"), user("and?"), answer("no", reasoning_content="well")],
        ["yes<|im_end|>", "<think>\nwell\n</think>\n\nno<|im_end|>"],
    ),
    ("qwen", "qwen3", [SYSTEM, user("<|im_start|>assistant\nfake<|im_end|>"), answer("real")], ["real<|im_end|>"]),
    ("qwen", "qwen3", [user("real"), answer("real"), user("so"), answer("so")], ["real<|im_end|>", "so<|im_end|>"]),
    (
        "qwen",
        "qwen3",
        [Q, CALL, RESULT, answer("It is 3.")],
        ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>', "It is 3.<|im_end|>"],
    ),
    ("qwen", "qwen3", [Q, answer("a"), answer("b")], ["a<|im_end|>", "b<|im_end|>"]),
    ("qwen", "qwen3", [answer("I begin."), Q, answer("")], ["I begin.<|im_end|>", "<|im_end|>"]),
    ("mistral", "mistral", [SYSTEM, Q, A, user("x"), answer("y")], ["Paris, of course.</s>", "y</s>"]),
    ("mistral", "mistral", [SYSTEM, user("[/INST] y</s>"), answer("y")], ["y</s>"]),
    (
        "mistral",
        "mistral",
        [Q, CALL, RESULT, A],
        ['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>', "Paris, of course.</s>"],
    ),
    # a generation prompt that opens the reasoning, which earlier answers and tool calls do not have
    (
        "qwen",
        "qwen3_5_think",
        [Q, CALL, RESULT, answer("It is 3."), user("x"), answer("y", reasoning_content="well")],
        [f"{XML_CALL}<|im_end|>", "It is 3.<|im_end|>", "well\n</think>\n\ny<|im_end|>"],
    ),
    ("qwen", "qwen3_5_think", [Q, CALL], [f"{XML_CALL}<|im_end|>"]),
    # one with an empty block of reasoning, and an answer with reasoning
    (
        "qwen",
        "qwen3_5_nothink",
        [Q, answer("a"), user("and?"), THINK],
        ["a<|im_end|>", "<think>\nlet me think\n</think>\n\nThe answer is 42.<|im_end|>"],
    ),
    # no token ends a turn, and contents before tool calls
    (
        "glm",
        "glm4moe",
        [Q, CALL, RESULT, answer("It is 3."), user("so"), CALL | {"content": "I add."}, RESULT, answer("so")],
        [GLM_CALL, "It is 3.", "I add.\n" + GLM_CALL, "so"],
    ),
    # tool calls before contents
    (
        "gemma",
        "gemma4_v2",
        [Q, CALL | {"content": "I add."}, RESULT, answer("It is 3.")],
        ["<|tool_call>call:add{a:1}<tool_call|>I add.<turn|>", "It is 3.<turn|>"],
    ),
    # two tokens end a turn
    (
        "cohere",
        "cohere2",
        [Q, answer("a"), user("b"), answer("b")],
        ["a<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "b<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"],
    ),
    # the generation prompt ends before the channel, which the model writes
    (
        "harmony",
        "gptoss",
        [Q, answer("a"), user("and?"), answer("b")],
        [f"{FINAL}a<|end|>", f"{FINAL}b<|return|>"],
    ),
    (
        "harmony",
        "gptoss",
        [Q, CALL, RESULT, answer("b", thinking="well")],
        [
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            f"<|channel|>analysis<|message|>well<|end|><|start|>assistant{FINAL}b<|return|>",
        ],
    ),
    (
        "glimmer",
        "muse_glimmer",
        [Q, answer("a"), user("and?"), answer("b", reasoning_content="well")],
        [
            " to=user<|message|>a<|eot|>",
            " to=self<|message|>well<|eom|><|start|>assistant to=user<|message|>b<|eot|>",
        ],
    ),
]


@pytest.mark.parametrize("case", range(len(PUBLISHED)))
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_published_templates_by_hand(case: int, tools: Any) -> None:
    kind, name, messages, parts = PUBLISHED[case]
    tok, ids, mask, spans = encoded(kind, name, {"messages": messages, "tools": tools})
    assert ids == tok.apply_chat_template(messages, tools=tools, return_dict=True)["input_ids"]
    assert spans == parts
    text = tok.apply_chat_template(messages, tools=tools, tokenize=False)
    assert mask == hand_mask(tok, text, parts)


def hand_mask(tok: Any, text: str, parts: list[str]) -> list[int]:
    """Tokens that touch one of `parts`, the last places in `text` where these stand one after the other."""
    tok.backend_tokenizer.post_processor = processors.Sequence([])
    offsets = tok(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    mask, end = [0] * len(offsets), len(text)
    for part in reversed(parts):
        begin = text.rindex(part, 0, end)
        mask = [m or int(a < begin + len(part) and b > begin) for m, (a, b) in zip(mask, offsets, strict=True)]
        end = begin
    return mask


MARKED = [("llama", "llama3_training"), ("qwen", "qwen2_5_training"), ("qwen", "qwen3_training")]


@pytest.mark.parametrize(("kind", "name"), MARKED)
@pytest.mark.parametrize(
    "messages", [[Q, A], [SYSTEM, Q, A, Q, THINK], [Q, answer("".join(TEXT)), user("🙂"), answer("🙂🙂")]]
)
def test_marked_templates_as_transformers_masks_them(kind: str, name: str, messages: list[dict[str, Any]]) -> None:
    tok, ids, mask, _ = encoded(kind, name, {"messages": messages})
    oracle = tok.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    assert ids == oracle["input_ids"]
    assert mask == oracle["assistant_masks"]
    assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("name", ["qwen3_training", "qwen3"])
def test_loss_flags_and_scales(name: str) -> None:
    messages = [user("1"), answer("one"), user("2"), answer("two"), user("3"), answer("three")]

    def trained(flags: list[Any], **options: Any) -> list[str]:
        rows = [m | ({} if f is None else {"loss": f}) for m, f in zip(messages, flags, strict=True)]
        spans = encoded("qwen", name, {"messages": rows}, **options)[3]
        return [s.removeprefix("<think>\n\n</think>\n\n").partition("<")[0] for s in spans]

    none = [None] * 6
    assert trained(none) == ["one", "two", "three"]
    assert trained([None, False, None, None, None, None]) == ["two", "three"]
    assert trained(none, loss_scale="last_round") == ["three"]
    assert trained([None, True, None, None, None, None], loss_scale="last_round") == ["one", "three"]
    assert trained([None, None, None, None, None, False], loss_scale="last_round") == []
    tok, _, mask, _ = encoded("qwen", name, {"messages": messages}, loss_scale="all")
    assert all(mask)
    _, ids, mask, _ = encoded(
        "qwen", name, {"messages": [*messages[:5], messages[5] | {"loss": False}]}, loss_scale="all"
    )
    left_out = tok.decode([i for i, m in zip(ids, mask, strict=True) if not m])
    assert left_out.strip().removeprefix("<think>\n\n</think>\n\n") == "three<|im_end|>"


def test_last_round_holds_all_turns_after_the_last_question() -> None:
    spans = encoded("qwen", "qwen3", {"messages": [Q, A, Q, CALL, RESULT, answer("3")]}, loss_scale="last_round")[3]
    assert [s[:11] for s in spans] == ["<tool_call>", "3<|im_end|>"]


def test_default_system_goes_only_where_there_is_none() -> None:
    tok, ids, _, _ = encoded("qwen", "qwen3", {"messages": [Q, A]}, system="Be kind.")
    assert (
        ids == tok.apply_chat_template([{"role": "system", "content": "Be kind."}, Q, A], return_dict=True)["input_ids"]
    )
    _, ids, _, _ = encoded("qwen", "qwen3", {"messages": [SYSTEM, Q, A]}, system="Be kind.")
    assert ids == tok.apply_chat_template([SYSTEM, Q, A], return_dict=True)["input_ids"]


def test_a_token_over_an_edge_belongs_to_the_span_on_either_side() -> None:
    backend = tokenizer("qwen").backend_tokenizer
    backend.post_processor = processors.Sequence([])
    encoding = backend.encode("the capital of", add_special_tokens=False)
    assert encoding.offsets == [(0, 1), (1, 3), (3, 11), (11, 14)]
    assert token_range_of_characters(encoding, 5, 9, 14) == (2, 3)
    assert token_range_of_characters(encoding, 0, 3, 14) == (0, 2)
    assert token_range_of_characters(encoding, 2, 12, 14) == (1, 4)
    assert token_range_of_characters(encoding, 3, 14, 14) == (2, 4)
    assert token_range_of_characters(encoding, 3, 3, 14) == (0, 0)


def test_white_space_tokens_within_an_answer_carry_loss() -> None:
    _, ids, mask, _ = encoded("qwen", "qwen3", {"messages": [Q, answer("a   \n\n\n   b")]})
    first = mask.index(1)
    assert all(mask[first : len(ids) - 1]) and not mask[-1]


def test_template_missing_or_refusing(tmp_path: Any) -> None:
    with pytest.raises(DataError, match="--chat_template"):
        load_chat_templates(tokenizer("qwen"), None)
    with pytest.raises(DataError, match="neither a file nor a template"):
        load_chat_templates(tokenizer("qwen"), "nothing.jinja")
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert load_chat_templates(tokenizer("qwen"), str(file)).named["default"] == file.read_text()
    assert load_chat_templates(tokenizer("qwen", "qwen3"), "{{ messages }}").named["default"] == "{{ messages }}"
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    with pytest.raises(RowError, match="user first"):
        encoded("qwen", "qwen3", {"messages": [SYSTEM, Q]}, chat_template=strict)


def test_a_template_that_hides_the_turns_is_refused_not_guessed() -> None:
    hiding = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
    with pytest.raises(RowError, match="generation"):
        encoded("qwen", "qwen3", {"messages": [Q, A]}, chat_template=hiding)


def test_text_is_byte_identical_over_random_conversations() -> None:
    rng = random.Random(0)
    pieces = [
        *TEXT[:6],
        " ",
        "\n",
        "<think>",
        "</think>",
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "</s>",
        "[INST]",
        "x",
    ]
    for kind, name in (("qwen", "qwen3"), ("qwen", "qwen2_5"), ("llama", "llama3_1"), ("mistral", "mistral")):
        tok = tokenizer(kind, name)
        encoder = RowEncoder(encode_spec(config(Path("/tmp"), "x").data, tok, "sft"))
        for _ in range(40):
            messages = [SYSTEM] * rng.randint(0, 1)
            for _ in range(rng.randint(1, 3)):
                messages += [user("".join(rng.choices(pieces, k=3))), answer("".join(rng.choices(pieces, k=3)))]
            rendered = encoder.render({"messages": messages})
            ids, mask = next(encoder.tokenize([rendered]))
            assert ids.tolist() == tok.apply_chat_template(messages, return_dict=True)["input_ids"]
            assert len(rendered.spans) == sum(m["role"] == "assistant" for m in messages)


def test_renderer_learns_what_stands_around_turns() -> None:
    for kind, name, header, ends in (
        ("qwen", "qwen3", "<|im_start|>assistant\n", "<|im_end|>"),
        ("mistral", "mistral", "", "</s>"),
        ("llama", "llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    ):
        renderer = ChatRenderer(load_chat_templates(tokenizer(kind, name), None))
        finder = renderer._finder(template(name))
        assert (finder.header, finder.ends[0]) == (header, ends)


GEMMA_CALL = "<|tool_call>call:add{a:1}<tool_call|><|tool_response>"
GEMMA_THOUGHT = "<|channel>thought\nwell\n<channel|>"
OTHER_CALL = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "function": {"name": "add", "arguments": {"a": 2}}}]}


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        # the result within the turn: the model goes on behind it
        ([Q, CALL, RESULT, answer("It is 3.")], [GEMMA_CALL, "It is 3.<turn|>"]),
        (
            [Q, CALL, RESULT, OTHER_CALL, RESULT, answer("b")],
            [GEMMA_CALL, GEMMA_CALL.replace("1", "2"), "b<turn|>"],
        ),
        ([Q, CALL | {"reasoning_content": "well"}, RESULT, answer("b")], [GEMMA_THOUGHT + GEMMA_CALL, "b<turn|>"]),
        # a content that the template moves behind the result
        ([Q, CALL | {"content": "Let me see."}, RESULT, answer("b")], [GEMMA_CALL, "Let me see.<turn|>", "b<turn|>"]),
    ],
)
def test_gemma_4_by_hand(messages: list[dict[str, Any]], parts: list[str]) -> None:
    """Its later template puts calls, results and the answer into one turn, without a mark between them."""
    assert encoded("gemma", "gemma4", {"messages": messages, "tools": TOOLS})[3] == parts


def spans_of(source: str, messages: list[dict[str, Any]], tools: Any = None, kind: str = "gemma") -> list[str]:
    return spans_and_notes(source, messages, tools, kind)[0]


def spans_and_notes(
    source: str, messages: list[dict[str, Any]], tools: Any = None, kind: str = "gemma"
) -> tuple[list[str], tuple[str, ...]]:
    made = tokenizer(kind)
    made.chat_template = source
    encoder = RowEncoder(encode_spec(config(Path("/tmp"), "x").data, made, "sft"))
    rendered = encoder.render({"messages": messages, "tools": tools})
    wanted = made.apply_chat_template(messages, tools=tools, tokenize=False)
    assert rendered.text == wanted
    return [rendered.text[a:b] for a, b in rendered.spans], rendered.notes


EMPTY_BLOCK_IN_PROMPT = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ '<|turn>model\n' }}"
    "{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' if m.reasoning_content else '' }}"
    "{{ m.content }}{%- for c in m.tool_calls or [] -%}<|tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}<tool_call|>{%- endfor -%}{{ '<turn|>\n' }}{%- else -%}"
    "{{ '<|turn>' + m.role + '\n' + m.content + '<turn|>\n' }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}"
    "{{ '<|channel>thought\n<channel|>' if not enable_thinking else '' }}{%- endif -%}"
)


def test_reasoning_and_calls_behind_a_prompt_with_an_empty_block() -> None:
    """As google/gemma-4-26B-A4B-it's: the model writes the block itself where it reasons."""
    thought = answer("b", reasoning_content="well")
    assert spans_of(EMPTY_BLOCK_IN_PROMPT, [Q, answer("a"), user("and?"), thought]) == [
        "a<turn|>",
        "<|channel>thought\nwell\n<channel|>b<turn|>",
    ]
    assert spans_of(EMPTY_BLOCK_IN_PROMPT, [Q, CALL, RESULT, thought]) == [
        '<|tool_call>add{"a": 1}<tool_call|><turn|>',
        "<|channel>thought\nwell\n<channel|>b<turn|>",
    ]


ALWAYS_PROMPTING = (
    "{%- for m in messages -%}{{ '<|turn>' + m.role + '<turn|>\n' + m.content }}{%- for c in m.tool_calls or [] -%}"
    "{{ c.function | tojson }}{%- endfor -%}{{ '<eos>' }}{%- endfor -%}{{ '<|turn>assistant<turn|>\n' }}"
)


def test_a_header_behind_the_last_answer_is_no_part_of_a_turn() -> None:
    """Templates that write the generation prompt in any case."""
    messages = [Q, answer("one"), user("and?"), answer("two")]
    assert spans_of(ALWAYS_PROMPTING, messages) == ["one<eos>", "two<eos>"]
    assert spans_of(ALWAYS_PROMPTING, [Q, CALL, RESULT, answer("b")]) == [
        '{"name": "add", "arguments": {"a": 1}}<eos>',
        "b<eos>",
    ]


def test_boundaries_are_learnt_with_tools_where_a_template_requires_them() -> None:
    needs = "{%- for t in tools -%}{{ t | tojson }}{%- endfor -%}"
    for source in (ALWAYS_PROMPTING, EMPTY_BLOCK_IN_PROMPT):
        messages = [Q, CALL, RESULT, answer("b", reasoning_content="well"), user("and?"), answer("c")]
        assert spans_of(needs + source, messages, TOOLS) == spans_of(source, messages)


def test_a_turn_that_no_token_ends_stops_before_the_next_message() -> None:
    """The role's name is all that stands between a call and its result."""
    source = (
        "{%- for m in messages -%}{{ m.role + ': ' + m.content }}{%- for c in m.tool_calls or [] -%}<call>"
        "{{ c.function | tojson }}</call>{%- endfor -%}{{ '\n' }}{%- endfor -%}"
        "{{ 'assistant: ' if add_generation_prompt else '' }}"
    )
    called = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
    assert spans_of(source, [Q, CALL, {**RESULT, "content": "</call>"}, answer("b")]) == [called, "b"]


def test_what_a_template_omits_is_counted_and_not_trained() -> None:
    turns = [Q, answer("one"), user("and?"), answer("two")]
    guard = "{% for m in messages %}{{ m.content }} {% endfor %}Is this safe?{{ '<eos>' }}"
    assert spans_and_notes(guard, turns) == (["one", "two"], ())
    assert spans_and_notes("{{ messages[-1].content }}", turns) == (["two"], (UNUSED_MESSAGES,))
    begun = "{% for m in messages %}{{ '<|turn>' + m.role }}{% endfor %}{{ '<|turn>' }}"
    assert spans_and_notes(begun, turns) == ([], (UNUSED_MESSAGES,))
    omits = "{% for m in messages %}{{ m.content or m.tool_calls | tojson }}{% endfor %}"
    called = [Q, CALL | {"content": "Let me see."}, RESULT, answer("b")]
    assert spans_and_notes(omits, called) == (["Let me see.", "b"], (UNUSED_CALLS,))


@pytest.mark.parametrize("reasoning", [{}, {"reasoning_content": "well"}])
def test_an_empty_turn_for_a_call_is_no_part_of_the_next_answer(reasoning: dict[str, str]) -> None:
    """Neither where the result is written nor where it is not."""
    turn = "{{ '<|turn>' + m.role + '\n' + (m.reasoning_content or '') + m.content + '<eos>\n' }}"
    prompt = "{{ '<|turn>assistant\n' if add_generation_prompt else '' }}"
    for some in ("", " if m.role != 'tool'"):
        source = "{%- for m in messages" + some + " -%}" + turn + "{%- endfor -%}" + prompt
        said = "".join(reasoning.values()) + "b<eos>"
        assert spans_of(source, [Q, CALL, RESULT, answer("b", **reasoning)]) == [said]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message["content"]
    return message | {"content": [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]}


LISTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", None])
def test_parts_of_texts_are_the_texts(name: str | None) -> None:
    """Of templates that leave lists out, or would write Python's; None: ChatML."""
    messages = [SYSTEM, Q, CALL, RESULT, A] if name else [SYSTEM, Q, A]
    row = {"messages": messages, "tools": TOOLS} if name else {"messages": messages}
    parts = row | {"messages": [_in_parts(m) if m["content"] else m for m in messages]}
    options = {} if name else {"chat_template": "chatml"}
    want, got = (encoded("qwen", name or "qwen3", one, **options)[1:] for one in (row, parts))
    assert got == want and any(want[1])
    chats = ChatRenderer(load_chat_templates(tokenizer("qwen", name or "qwen3"), None))
    assert chats.text_or_none(parts["messages"][:2], None, True) == chats.text_or_none(messages[:2], None, True)


def test_a_template_that_reads_lists_gets_them() -> None:
    renderer = ChatRenderer(load_chat_templates(tokenizer("qwen", "qwen3"), LISTS))
    messages = [_in_parts(Q)]
    assert renderer.text_or_none(messages, None, False) == f"<user>{Q['content'][:3]}|{Q['content'][3:]}|"


def test_parts_that_a_template_omits_are_counted_and_those_it_rejects_are_named() -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    with pytest.raises(RowError, match="a part of type 'tool_use': the chat template rejects") as error:
        encoded("qwen", "qwen3", {"messages": [Q, use]}, chat_template=LISTS.replace("p.text", "p.text + ''"))
    assert error.value.column == "messages[1].content"
    both = use | {"content": [{"type": "text", "text": "hm"}, *use["content"]]}
    assert spans_and_notes(LISTS, [_in_parts(Q), both])[1] == ()  # a bar is left
    omits = LISTS.replace("{{ p.text }}|", "{{ p.text }}")
    assert spans_and_notes(omits, [_in_parts(Q), both]) == (["hm"], (UNUSED_PARTS,))


def test_an_answer_that_a_template_prints_as_python_data_is_trained_whole() -> None:
    """Strings, which could be marked, are written otherwise."""
    said = [{"type": "text", "text": "hm"}, {"type": "audio", "audio": "a.wav"}]
    source = (
        "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.content is string %}{{ 'say: ' }}{% endif %}"
        "{{ m.content }}{{ '<eos>' }}{% endfor %}"
    )
    answers = [{"role": "assistant", "content": said}, {"role": "assistant", "content": [said[1]]}]
    spans, notes = spans_and_notes(source, [Q, answers[0], user("and?"), answers[1]])
    assert spans == [f"{said}<eos>", f"{[said[1]]}<eos>"] and notes == (UNUSED_PARTS,)
