"""Prompts of reinforcement learning: tokens against transformers' own, columns as they were, order, room, resume."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import processors

from megaswift.config import SwiftConfig
from megaswift.data.prompts.source import Prompt, PromptSource
from megaswift.data.show import samples
from megaswift.errors import ConfigError, DataError
from tests.data.makers import jsonl, tokenizer
from tests.data.of_config import prompt_splits

U, V = {"role": "user", "content": "q1"}, {"role": "user", "content": "q2"}
S = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "3", "name": "add"}
CHATS: list[tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = [
    ({"prompt": [U], "solution": "4", "level": 2}, [U], {"solution": "4", "level": 2}),
    ({"prompt": json.dumps([S, U])}, [S, U], {}),
    ({"prompt": U, "system": S["content"], "messages": "of no use"}, [S, U], {"messages": "of no use"}),
    (
        {"prompt": [U, says("a"), V], "chosen": "x", "rejected": "y", "label": 1},
        [U, says("a"), V],
        {"chosen": "x", "rejected": "y", "label": 1},
    ),
    ({"prompt": [U, CALL, RESULT], "tools": TOOLS}, [U, CALL, RESULT], {}),
    ({"messages": [S, U, says("a1")], "id": None}, [S, U], {"id": None, "response": "a1"}),
    ({"messages": [U, says("a1"), V], "answer": [1, {"b": 0.5}]}, [U, says("a1"), V], {"answer": [1, {"b": 0.5}]}),
    (
        {"messages": [U, says("a1")], "response": "mine", "rejected_response": "z"},
        [U],
        {"response": "mine", "rejected_response": "z"},
    ),
    ({"query": "q2", "history": [["q1", "a"]], "gold": True}, [U, says("a"), V], {"gold": True}),
    ({"query": "q1", "response": "a1"}, [U], {"response": "a1"}),
    ({"instruction": "q1", "input": ""}, [U], {}),
    ({"instruction": "q1", "output": "a1", "system": S["content"]}, [S, U], {"response": "a1"}),
    ({"conversations": [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"}]}, [U], {"response": "a1"}),
    ({"conversation": [{"human": "q1", "assistant": "a1"}]}, [U], {"response": "a1"}),
]


def run(tmp_path: Path, dataset: str, **options: Any) -> SwiftConfig:
    return SwiftConfig(
        task=options.pop("task", "grpo"), dataset=[dataset], dataset_cache_dir=str(tmp_path / "cache"), **options
    )


def source(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    size: int = 1,
    kind: str = "qwen",
    name: str | None = "qwen2_5",
    **options: Any,
) -> tuple[PromptSource, list[Prompt] | None]:
    number = options.pop("repeat", "")
    return prompt_splits(
        run(tmp_path, jsonl(tmp_path / "d.jsonl", rows) + number, **options), tokenizer(kind, name), size
    )


def all_of(made: PromptSource) -> list[Prompt]:
    return [made.prompts.read(i) for i in range(made.rows)]


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": "hello " * (i + 1), "n": i} for i in range(count)]


@pytest.mark.parametrize("kind, name", [("qwen", "qwen2_5"), ("llama", "llama3")])
def test_conversations_are_transformers_own_up_to_the_answer(tmp_path: Path, kind: str, name: str) -> None:
    cases = [c for c in CHATS if kind == "qwen" or "tools" not in c[0]]
    found = all_of(source(tmp_path, [row for row, _, _ in cases], kind=kind, name=name)[0])
    own = tokenizer(kind, name)
    for i, ((row, messages, columns), prompt) in enumerate(zip(cases, found, strict=True)):
        ids = own.apply_chat_template(messages, tools=row.get("tools"), add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        assert prompt == Prompt(
            i, tuple(ids), tuple(messages), columns, tuple(row["tools"]) if "tools" in row else None
        )


@pytest.mark.parametrize("begins", [True, False])
def test_texts_are_taken_as_the_tokenizer_takes_them(tmp_path: Path, begins: bool) -> None:
    own, bos = tokenizer("llama"), "<|begin_of_text|>"
    if begins:
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, own.convert_tokens_to_ids(bos))]
        )
    texts = ["The capital of ", "日本語 🙂", bos + "hello"]
    rows = jsonl(tmp_path / "d.jsonl", [{"prompt": t, "n": 1} for t in texts])
    found = all_of(prompt_splits(run(tmp_path, rows), own, 1)[0])
    expected = [own(t)["input_ids"] for t in texts[:2]] + [own(texts[2], add_special_tokens=False)["input_ids"]]
    assert [p.token_ids for p in found] == [tuple(e) for e in expected] and (
        found[0].token_ids[0] == own.bos_token_id
    ) == begins
    assert [p.content for p in found] == texts and all(p.columns == {"n": 1} and p.tools is None for p in found)


def test_the_run_s_system_message_and_column_names(tmp_path: Path) -> None:
    made = source(tmp_path, [{"q": [U]}, {"q": [S, U]}], system="Think.", columns={"q": "prompt"})[0]
    assert [p.content for p in all_of(made)] == [({"role": "system", "content": "Think."}, U), (S, U)]


def test_the_answer_of_a_conversation_has_the_run_s_name_too(tmp_path: Path) -> None:
    """What the message of a missing column says to do."""
    rows = [
        {"messages": [U, says("a1")]},
        {"query": "q1", "response": "a2"},
        {"messages": [U, says("a1")], "response": "mine"},
    ]
    made = source(tmp_path, rows, columns={"response": "solution"})[0]
    assert [p.columns for p in all_of(made)] == [{"solution": "a1"}, {"solution": "a2"}, {"solution": "mine"}]


def test_what_json_cannot_hold_is_text(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "when": datetime.date(2026, 1, 2), "tests": [{"x": 1}], "none": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    made = prompt_splits(run(tmp_path, str(tmp_path / "d.parquet"), task="ppo"), tokenizer("qwen"), 1)[0]
    assert made.at(0).columns == {"when": "2026-01-02", "tests": [{"x": 1}], "none": None}


@pytest.mark.parametrize(
    "row, part",
    [
        ({"prompt": ""}, "column prompt: an empty prompt"),
        ({"prompt": 3}, "column prompt: int 3; expected a string or a list"),
        ({"prompt": "a", "tools": TOOLS}, "column tools: cannot be combined with plain text"),
        ({"prompt": [U, says("a")]}, "the last message is the assistant's"),
        ({"messages": [says("a")]}, "column messages: no message before the completion"),
        ({"question": "q"}, "prompt: prompt [tools, system]"),
        ({"text": "t"}, "column text: no format has these columns"),
    ],
)
def test_rows_that_ask_nothing(tmp_path: Path, row: dict[str, Any], part: str) -> None:
    with pytest.raises(DataError) as caught:
        source(tmp_path, [{"prompt": [U]}, row])
    assert "d.jsonl:2: " in str(caught.value) and part in str(caught.value)
    assert source(tmp_path, [{"prompt": [U]}, row], strict=False)[0].rows == 1


def test_a_text_takes_no_system_message_and_messages_take_a_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--system cannot be applied"):
        source(tmp_path, [{"prompt": "a"}], system="s")
    with pytest.raises(DataError, match="no chat template"):
        source(tmp_path, [{"prompt": [U]}], name=None)


def taken(made: PromptSource) -> list[int]:
    """Numbers of the next generation's prompts."""
    return [made.at(place).number for place in made.take()]


def test_prompts_that_are_given_back_come_first(tmp_path: Path) -> None:
    """Once more, then the others; also from a saved position."""
    made = source(tmp_path, numbered(5), 2)[0]
    places = [made.take() for _ in range(4)]
    assert places == [[0, 1], [2, 3], [4, 5], [6, 7]] and made.epoch == 8 / 5
    made.give_back([2, 3])
    made.give_back([0])
    assert made.epoch == 1
    again = source(tmp_path, numbered(5), 2)[0]
    again.load_state_dict(made.state_dict())
    assert [again.take() for _ in range(3)] == [[0, 2], [3, 8], [9, 10]] and again.returned == []


def test_prompts_that_another_run_has_passed_by_come_first(tmp_path: Path) -> None:
    """They are prompts of draws that were overtaken and then dropped; the other run may have taken them later."""
    made = source(tmp_path, numbered(5), 2)[0]
    for places in ([0, 1], [4, 5], [2, 8], [7]):
        made.skip_to(places)
    assert made.epoch == 7 / 5 and [made.take() for _ in range(3)] == [[3, 6], [9, 10], [11, 12]]


def test_order_epochs_and_resume(tmp_path: Path) -> None:
    made = source(tmp_path, numbered(5), 3)[0]
    assert (made.rows, made.steps_for(1), made.steps_for(0.2), made.steps_for(3)) == (5, 2, 1, 5)
    assert replace(made, steps=6).steps_for(1) == 12 and made.prompts.columns == {"n"}
    seen = [number for _ in range(5) for number in taken(made)]
    orders = [np.random.default_rng([42, epoch]).permutation(5).tolist() for epoch in range(3)]
    assert seen == sum(orders, []) and made.epoch == 3
    again = source(tmp_path, numbered(5), 2)[0]
    again.load_state_dict({**made.state_dict(), "rows_taken": 6})
    assert taken(again) == seen[6:8] and again.epoch == 8 / 5
    assert taken(source(tmp_path, numbered(5), 5, shuffle=False)[0]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "change, part",
    [
        ({"shuffle": False}, "--shuffle"),
        ({"data_seed": 3}, "--data_seed"),
        ({"rows": [{"prompt": "hello", "n": 9}]}, "the data set"),
    ],
)
def test_a_position_in_other_prompts(tmp_path: Path, change: dict[str, Any], part: str) -> None:
    state = source(tmp_path, [{"prompt": "hello", "n": 0}])[0].state_dict()
    other = source(tmp_path, **{"rows": [{"prompt": "hello", "n": 0}], **change})[0]
    with pytest.raises(DataError, match=part):
        other.load_state_dict(state)


def test_room_for_the_completion(tmp_path: Path) -> None:
    rows, own = numbered(6), tokenizer("qwen")
    lengths = [len(own(r["prompt"])["input_ids"]) for r in rows]
    short = {"max_length": lengths[3] + 7, "max_completion_length": 7}
    made = source(tmp_path, rows, **short)[0]
    assert [p.columns["n"] for p in all_of(made)] == [0, 1, 2, 3] and made.stats["deleted"] == 2
    made = source(tmp_path, rows, truncation_strategy="left", **short)[0]
    last = all_of(made)[5]
    assert last.token_ids == tuple(own(rows[5]["prompt"])["input_ids"][-lengths[3] :]) and last.columns == {"n": 5}
    assert last.content == rows[5]["prompt"] and made.stats["truncated"] == 2
    with pytest.raises(DataError, match=rf"d.jsonl:5: {lengths[4]} tokens; --max_length {short['max_length']} minus"):
        source(tmp_path, rows, truncation_strategy="raise", **short)
    with pytest.raises(DataError, match=f"--max_length {lengths[5] + 7}$"):
        source(tmp_path, rows, max_length=8, max_completion_length=7)


def test_prompts_that_are_held_out(tmp_path: Path) -> None:
    made, held = source(tmp_path, numbered(8), split_dataset_ratio=0.25)
    assert held is not None and made.rows == 6 and len(held) == 2
    assert sorted([p.number for p in held] + [p.number for p in all_of(made)]) == list(range(8))
    made, held = source(tmp_path, numbered(2), val_dataset=[jsonl(tmp_path / "v.jsonl", numbered(3))])
    assert held is not None and made.rows == 2 and [p.columns["n"] for p in held] == [0, 1, 2]


def test_fewer_prompts_than_a_generation(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"3 prompts, fewer than the 4 prompts of one generation\n.*d.jsonl#4 to repeat"
    ):
        source(tmp_path, numbered(3), 4)
    made = source(tmp_path, numbered(3), 4, repeat="#4", shuffle=False)[0]
    assert [made.at(place).columns["n"] for place in made.take()] == [0, 1, 2, 0]


def test_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tokenizer("qwen", "qwen2_5")
    words = [
        jsonl(tmp_path / "d.jsonl", [{"prompt": [U], "gold": "Zażółć"}] * 2),
        "--task",
        "grpo",
        "--model",
        "m",
        "--samples",
        "1",
        "--max_completion_length",
        "9",
        "--dataset_cache_dir",
        str(tmp_path / "c"),
    ]
    assert samples.main(words, lambda *_: own) == 0
    out = capsys.readouterr().out
    assert (
        "--- prompt 0 (row 0): " in out
        and 'gold: "Zażółć"' in out
        and "2 prompts" in out
        and "tokens per prompt: 2 in total" in out
    )
    assert (
        out.split("--- ")[1].replace("|", "").partition("gold")[0].endswith("<im_start>assistant⏎\n\n")
        and "[" not in out
    )


@pytest.mark.parametrize("thinking", [None, True, False])
def test_prompts_with_and_without_reasoning(tmp_path: Path, thinking: bool | None) -> None:
    """Qwen3's template closes an empty block of reasoning where none is wanted."""
    own = tokenizer("qwen", "qwen3")
    (prompt,) = all_of(source(tmp_path, [{"prompt": [U]}], kind="qwen", name="qwen3", enable_thinking=thinking)[0])
    given = {} if thinking is None else {"enable_thinking": thinking}
    want = own.apply_chat_template([U], add_generation_prompt=True, return_dict=True, **given)["input_ids"]
    assert prompt.token_ids == tuple(want)
    assert own.decode(want).endswith("<think>\n\n</think>\n\n") == (thinking is False)


def test_a_template_that_does_not_read_enable_thinking(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enable_thinking false: has no effect: the chat template"):
        source(tmp_path, [{"prompt": [U]}], kind="qwen", name="qwen2_5", enable_thinking=False)
