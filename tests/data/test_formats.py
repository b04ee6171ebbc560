"""Every format against the messages that a person would write down for it; malformed rows with their column.

Covers: megaswift/data/formats/conversations.py, megaswift/data/formats/prompt_completion.py,
megaswift/data/formats/human_assistant_rounds.py, megaswift/data/templates/roles.py.
"""

from __future__ import annotations

import pickle
import shlex
from pathlib import Path
from typing import Any

import pytest

from megaswift.data.formats import FORMATS, recognize_format
from megaswift.data.templates.message_loss import UniformLoss
from megaswift.data.templates.roles import OTHER_NAMES, ROLES, TOOL_CALL
from megaswift.data.untokenized_sample import RowError, UntokenizedSample

U, V = {"role": "user", "content": "q1"}, {"role": "user", "content": "q2"}
A, B = {"role": "assistant", "content": "a1"}, {"role": "assistant", "content": "a2"}
S = {"role": "system", "content": "s"}
TOOL = {"type": "function", "function": {"name": "f"}}

GOOD: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("messages", {"messages": [S, U, A]}, [S, U, A]),
    ("messages", {"messages": [U, A], "system": "s", "id": 7}, [S, U, A]),
    ("messages", {"messages": '[{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}]'}, [U, A]),
    (
        "messages",
        {"messages": [U, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]},
        [U, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    ),
    ("conversations", {"conversations": [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"}]}, [U, A]),
    (
        "conversations",
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "user", "value": "q1"},
                {"from": "assistant", "value": "a1"},
            ]
        },
        [S, U, A],
    ),
    ("conversations", {"conversations": [U, A]}, [U, A]),
    (
        "conversations",
        {
            "conversations": [
                {"from": "human", "value": "q1"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                {"from": "observation", "value": "r"},
            ]
        },
        [
            U,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
            },
            {"role": "tool", "content": "r"},
        ],
    ),
    (
        "sharegpt",
        {"conversation": [{"human": "q1", "assistant": "a1"}, {"human": "q2", "assistant": "a2"}], "system": "s"},
        [S, U, A, V, B],
    ),
    ("sharegpt", {"conversations": [{"human": "q1", "assistant": "a1"}]}, [U, A]),
    ("query_response", {"query": "q2", "response": "a2", "history": [["q1", "a1"]], "system": "s"}, [S, U, A, V, B]),
    ("query_response", {"query": "q1", "response": "a1", "history": ""}, [U, A]),
    ("alpaca", {"instruction": "q1", "input": "", "output": "a1"}, [U, A]),
    ("prompt, completion", {"prompt": [U], "completion": [A], "system": "s"}, [S, U, A]),
    ("prompt, completion", {"prompt": "q1", "completion": [A]}, [U, A]),
    ("messages", {"messages": [{"role": "Human", "content": "q1"}, {"role": "bot", "content": "a1"}]}, [U, A]),
    (
        "messages",
        {
            "messages": [
                U,
                A,
                {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
                {"role": "tool_call", "content": '{"name": "g", "arguments": {}}'},
                {"role": "tool_response", "content": "r"},
                {"role": "tool_call", "content": '{"name": "f", "arguments": {}}', "loss": False},
            ]
        },
        [
            U,
            A
            | {
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                    {"type": "function", "function": {"name": "g", "arguments": {}}},
                ]
            },
            {"role": "tool", "content": "r"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ],
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "q"}, {"type": "text", "value": "1"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "value": "r"},
                        {"type": "text", "value": "a1", "text": None},
                        {"type": "tool_call", "value": '{"name": "f", "arguments": {}}'},
                    ],
                },
            ]
        },
        [
            U,
            A
            | {
                "reasoning_content": "r",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ],
    ),
    ("messages", {"messages": [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"}]}, [U, A]),
    ("messages", {"messages": [U | {"tool_calls": []}, A | {"tool_calls": []}], "tools": " "}, [U, A]),
    (
        "conversations",
        {
            "conversations": [
                {"from": "human", "value": "q1", "role": None, "content": None},
                {"from": "gpt", "tool_calls": [{"function": {"name": "f"}}]},
                {"from": None, "value": None, "role": "assistant", "content": "a1"},
            ]
        },
        [U, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, A],
    ),
    ("prompt, response", {"prompt": "q1", "response": "a1", "id": "7", "history": [], "reasoning": ""}, [U, A]),
    ("prompt, response", {"prompt": "q2", "response": "a2", "history": [["q1", "a1"]]}, [U, A, V, B]),
    ("input, output", {"input": "q1", "output": "a1", "system_prompt": "s"}, [S, U, A]),
    ("question, answer", {"question": "q1", "answer": "a1", "topic": "t", "context": None}, [U, A]),
    ("instruction, response", {"instruction": "q1", "response": "a1", "context": ""}, [U, A]),
    (
        "instruction, response, context",
        {"instruction": "q", "context": "c", "response": "a1", "category": "closed_qa"},
        [{"role": "user", "content": "q\nc"}, A],
    ),
    (
        "instruction, response, input",
        {"instruction": "q", "input": "c", "response": "a1"},
        [{"role": "user", "content": "q\nc"}, A],
    ),
    (
        "glaive",
        {
            "system": "SYSTEM: s",
            "chat": 'USER: q1 ASSISTANT: <functioncall> {"name": "f"} <|endoftext|> FUNCTION RESPONSE: r '
            "ASSISTANT: a1 <|endoftext|>",
        },
        [
            S,
            U,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f"}}],
            },
            {"role": "tool", "content": "r"},
            A,
        ],
    ),
    ("alpaca", {"instruction": "q1", "input": "more", "output": "a1"}, [{"role": "user", "content": "q1\nmore"}, A]),
]


@pytest.mark.parametrize(("name", "row", "messages"), GOOD)
def test_rows_become_the_messages_they_mean(name: str, row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    found = recognize_format(row, "sft")
    assert found.name == name
    assert list(found.parse(row).messages) == messages


def test_every_registered_format_is_tried_above() -> None:
    assert {f.name for f in FORMATS if {"sft", "pt"} & set(f.tasks)} == {name for name, _, _ in GOOD} | {"text"}


def test_text_is_for_pretraining() -> None:
    assert recognize_format({"text": "t"}, "pt").parse({"text": "t"}) == UntokenizedSample(text="t")
    with pytest.raises(RowError, match="no format has these columns"):
        recognize_format({"text": "t"}, "dpo")
    with pytest.raises(RowError, match="not for pt"):
        recognize_format({"messages": []}, "pt")


def test_loss_flags_and_tools_travel_and_stay_out_of_the_messages() -> None:
    sample = recognize_format({"messages": []}, "sft").parse(
        {"messages": [U, A | {"loss": False}, V, B | {"loss": True}], "tools": [TOOL]}
    )
    assert sample.loss == (None, False, None, True) and sample.tools == (TOOL,)
    assert list(sample.messages) == [U, A, V, B]
    assert recognize_format({"messages": []}, "sft").parse(
        {"messages": [U, A], "tools": '[{"type": "function", "function": {"name": "f"}}]'}
    ).tools == (TOOL,)


BAD = [
    ({"messages": "[{"}, "messages", "not JSON"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": ["x"]}, "messages[0]", "object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "one of system"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "one of system"),
    ({"messages": [U, {"role": "tool_call", "content": "f(x)"}]}, "messages[1].content", "Expecting value near 'f(x)'"),
    ({"messages": [U, {"role": "tool_call", "content": '{"f": 1}'}]}, "messages[1].content", "a function call"),
    ({"prompt": "", "completion": "x"}, "prompt", "empty prompt"),
    ({"prompt": "x", "completion": [U]}, "completion", "assistant messages"),
    ({"prompt": "x", "completion": "y", "system": "s"}, "system", "cannot be combined with plain text"),
    ({"messages": [U, {"role": "user", "text": "q"}]}, "messages[1].content", "a text in 'text'"),
    ({"messages": [U, {"role": "assistant", "content": b"x"}]}, "messages[1].content", "JSON can hold"),
    ({"messages": [U | {"loss": True}]}, "messages[0].loss", "assistant messages only"),
    ({"messages": [A | {"loss": 2}]}, "messages[0].loss", "true or false"),
    ({"messages": [A | {"loss_scale": 2.0}]}, "messages[0].loss_scale", "a weight of one message"),
    ({"messages": [A | {"loss_scale": False}]}, "messages[0].loss_scale", "a weight of one message"),
    ({"messages": [A | {"tool_calls": "f"}]}, "messages[0].tool_calls", "list"),
    ({"messages": [U, A], "tools": [1]}, "tools", "objects"),
    ({"messages": [U, A], "system": 1}, "system", "a string"),
    ({"conversations": [{"from": 3, "value": "x"}]}, "conversations[0].from", "one of system"),
    ({"conversations": [{"from": "human", "text": "q"}]}, "conversations[0].content", "a text in 'text'"),
    ({"conversation": [{"human": "x"}]}, "conversation[0]", "assistant"),
    ({"query": "x", "response": 1}, "response", "a string"),
    ({"query": "x", "response": "y", "history": [["a"]]}, "history[0]", "two strings"),
    ({"instruction": 1, "output": "x"}, "instruction", "a string"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "value": 1}]}]}, "messages[0].content", "a text part"),
    (
        {"messages": [U, {"role": "assistant", "content": [{"type": "tool_call", "value": "f(x)"}]}]},
        "messages[1].content",
        "a JSON function call",
    ),
    ({"chat": "USER: q\n\nASSISTANT: <functioncall> f(x)"}, "chat", "<functioncall> {"),
    ({"chat": "USER: q\n\nASSISTANT: a", "system": 'SYSTEM: s {"name": '}, "system", "functions as JSON"),
]


@pytest.mark.parametrize(("row", "column", "said"), BAD)
def test_a_malformed_row_names_its_column(row: dict[str, Any], column: str, said: str) -> None:
    with pytest.raises(RowError) as e:
        recognize_format(row, "sft").parse(row)
    assert e.value.column == column and said in str(e.value)


def test_a_prompt_of_messages_carries_no_loss() -> None:
    row = {"prompt": [U, A, V], "completion": [B]}
    assert recognize_format(row, "sft").parse(row).loss == (None, False, None, None)


def test_the_system_message_by_another_name() -> None:
    """A column of another type is no system message."""
    for row in ({"messages": [U, A]}, {"query": "q1", "response": "a1"}, {"instruction": "q1", "output": "a1"}):
        for column, messages in (("system", [S, U, A]), ("system_prompt", [S, U, A])):
            assert list(recognize_format(row, "sft").parse(row | {column: "s"}).messages) == messages
        assert list(recognize_format(row, "sft").parse(row | {"system_prompt": 3}).messages) == [U, A]


def test_weights_of_messages_that_are_flags() -> None:
    """ms-swift's `loss_scale`, which chat templates do not see."""
    row = {"messages": [U, A | {"loss_scale": 0.0}, V, B | {"loss_scale": 1.0, "loss": True}]}
    made = recognize_format(row, "sft").parse(row)
    assert made.loss == (None, False, None, UniformLoss(True)) and list(made.messages) == [U, A, V, B]
    row = {"messages": [U | {"loss_scale": 1}, A | {"loss_scale": 1}, V, B | {"loss_scale": 1, "loss": False}]}
    assert recognize_format(row, "sft").parse(row).loss == (None, UniformLoss(), None, False)


CALLED = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}
MERGED: list[tuple[list[dict[str, Any]], list[Any]]] = [
    ([A, CALLED | {"loss_scale": 1}], [UniformLoss()]),
    ([CALLED | {"loss_scale": 1}, CALLED], [UniformLoss()]),
    ([A | {"loss_scale": 1}, CALLED], [UniformLoss()]),
    ([A | {"loss": True}, CALLED | {"loss_scale": 1}], [UniformLoss(True)]),
    ([A | {"loss": False}, CALLED | {"loss_scale": 1}], [False]),
    ([A, CALLED | {"loss_scale": 1, "loss": True}], [None, UniformLoss(True)]),
    ([A | {"loss_scale": 1}, CALLED | {"loss_scale": 0}], [UniformLoss(), False]),
]


@pytest.mark.parametrize(("turns", "loss"), MERGED)
def test_weights_of_calls_that_belong_to_a_turn(turns: list[dict[str, Any]], loss: list[Any]) -> None:
    """A call's weight makes no turn of its own; its `loss` does."""
    row = {"messages": [U, *turns]}
    assert recognize_format(row, "sft").parse(row).loss == (None, *loss)


def test_the_role_table_is_documented() -> None:
    text = Path("docs/data.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in (*ROLES, TOOL_CALL, *OTHER_NAMES))


SUGGESTIONS = [
    ("sft", {"q": "q", "answer": "a"}, "--columns q=query answer=response"),
    ("sft", {"question": "q", "answer": "a", "cot": "c"}, "--columns question=query answer=response (not read: cot)"),
    (
        "sft",
        {"question": "q", "context": "c", "answer": "a", "id": 3},
        "--columns question=instruction context=input answer=output (not read: id)",
    ),
    (
        "sft",
        {"Question": "q", "Final Answer": "z", "Output": "a"},
        "--columns Question=query Output=response (not read: Final Answer)",
    ),
    ("sft", {"id": 3, "dialog": [U, A]}, "--columns dialog=messages (not read: id)"),
    ("sft", {"User Input": "q", "input": "q", "response": "a"}, "--columns input=query (not read: User Input)"),
    ("sft", {"Ground Truth": "a", "query": "q"}, "--columns 'Ground Truth=response'"),
    ("sft", {"问题": "q", "回答": "a"}, "--columns '问题=query' '回答=response'"),
    (
        "sft",
        {"指令": "q", "输入": "c", "输出": "a", "系统": "s"},
        "--columns '指令=instruction' '输入=input' '输出=output' '系统=system'",
    ),
    ("sft", {"对话": [U, A], "tools": None}, "--columns '对话=messages'"),
    ("pt", {"content": "t", "url": "u"}, "--columns content=text (not read: url)"),
    ("dpo", {"question": "q", "chosen": "a", "worse": "b"}, "--columns question=prompt worse=rejected"),
    ("grpo", {"problem": "q", "solution": "s"}, "--columns problem=prompt (for reward functions: solution)"),
    ("sft", {"question": 3, "answer": "a"}, ""),
    ("sft", {"x": "q", "y": "a"}, ""),
    ("sft", {"question": "q", "answer": "a", "c\x1b": "c"}, ""),
]


def renamed_as_proposed(row: dict[str, Any], fix: str) -> dict[str, Any]:
    """The row under the names of a proposal; every column is renamed, known, or named as not read."""
    options, _, rest = fix.partition(" (")
    pairs = dict(word.split("=", 1) for word in shlex.split(options)[1:])
    named = {*pairs, *pairs.values(), *rest.rstrip(")").partition(": ")[2].split(", ")}
    known = {name for f in FORMATS for name in (*f.required, *f.optional)}
    assert {*row} <= {*named, *known}
    return {pairs.get(name, name): value for name, value in row.items() if name in pairs or name not in pairs.values()}


@pytest.mark.parametrize(("task", "row", "fix"), SUGGESTIONS)
def test_columns_are_proposed_that_make_the_row_readable(task: str, row: dict[str, Any], fix: str) -> None:
    with pytest.raises(RowError) as e:
        recognize_format(row, task)
    assert e.value.fix == fix and pickle.loads(pickle.dumps(e.value)).fix == fix  # noqa: S301 (goes from rank to rank)
    if fix:
        recognize_format(renamed_as_proposed(row, fix), task)


AMBIGUOUS = [
    {"question": "q", "answer": "a", "explanation": "e"},
    {"prompt": "q", "response": "a", "output": "b"},
    {"question": "q", "answer": "a", "correct": 0},
    {"question": "q", "answer": "a", "is_correct": False},
    {"instruction": "q", "context": "c", "input": "d", "response": "a"},
    {"input": "q", "output": ["a", "b"]},
    {"prompt": [U], "response": "a"},
    {"text": "t", "label": 1},
    {"text": "t", "summary": "s"},
]


@pytest.mark.parametrize("row", AMBIGUOUS, ids=str)
def test_a_row_that_common_names_leave_open_is_refused(row: dict[str, Any]) -> None:
    """Reading it would lose a column that may belong to the conversation."""
    with pytest.raises(RowError, match="no format has these columns"):
        recognize_format(row, "sft")


def test_a_text_alone_is_a_document_for_fine_tuning_too() -> None:
    assert recognize_format({"text": "t", "id": 3}, "sft").parse({"text": "t"}) == UntokenizedSample(text="t")
    row = {"prompt": "q", "completion": "a", "rejected_response": "b"}
    with pytest.raises(RowError, match="expected a conversation"):
        recognize_format(row, "dpo").parse(row)


@pytest.mark.parametrize("task", ["dpo", "grpo", "pt"])
def test_questions_and_answers_by_common_names_are_read_for_fine_tuning_alone(task: str) -> None:
    """In reinforcement learning the answer is a column for reward functions, under its own name."""
    with pytest.raises(RowError, match="no format has these columns"):
        recognize_format({"question": "q", "answer": "a"}, task)


def test_unknown_columns_list_the_formats_with_theirs() -> None:
    with pytest.raises(RowError) as e:
        recognize_format({"say": "x", "answer": "y"}, "sft")
    for part in (
        "say, answer",
        "messages: messages [tools, system]",
        "alpaca: instruction, output [input",
        "--columns",
    ):
        assert part in str(e.value)


def test_columns_of_no_format_are_all_named() -> None:
    for row, said in (({"q": "a", "a": "b"}, "columns q, a"), ({"q": "a"}, "column q")):
        with pytest.raises(RowError) as caught:
            recognize_format(row, "sft")
        assert caught.value.where == said and caught.value.found == "no format has these columns"
