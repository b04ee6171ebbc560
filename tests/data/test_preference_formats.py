"""Every form of preferences against the two conversations (or the one) that a person would write down; rows of no use
by their cause.

Covers: megaswift/data/formats/alpaca_preference.py, megaswift/data/formats/chosen_rejected.py,
megaswift/data/formats/rejected_response.py, megaswift/data/formats/sharegpt_preference.py,
megaswift/data/preference/rows.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from megaswift.data.formats import FORMATS, recognize_format
from megaswift.data.preference.rows import EMPTY, IDENTICAL, NO_PROMPT, PROMPTS, UnusablePreferenceError
from megaswift.data.untokenized_sample import RowError, UntokenizedSample
from megaswift.options.tasks import EXAMPLES, PAIRS, PREFERENCES

S, U, V = {"role": "system", "content": "s"}, {"role": "user", "content": "q1"}, {"role": "user", "content": "q2"}
A, B, C = ({"role": "assistant", "content": c} for c in ("a1", "a2", "bad"))
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}
RESULT = {"role": "tool", "content": "r"}
TOOL = {"type": "function", "function": {"name": "f"}}
ASK, GPT, LOST = {"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"}, {"from": "gpt", "value": "bad"}

MS, MSM, TRL = "messages + rejected_response", "messages + rejected_messages", "prompt, chosen, rejected"
ALPACA, SHAREGPT = "alpaca preference", "sharegpt preference"
GOOD: list[tuple[str, dict[str, Any], list[Any], list[Any], list[int], float]] = [
    (MS, {"messages": [S, U, A], "rejected_response": "bad"}, [S, U, A], [S, U, C], [2], math.nan),
    (
        MS,
        {"messages": [U, A, V, B], "rejected_response": "bad", "margin": 2, "system": "s"},
        [S, U, A, V, B],
        [S, U, A, V, C],
        [4],
        2.0,
    ),
    (
        MS,
        {"messages": [U, CALL, RESULT, A], "rejected_response": "bad"},
        [U, CALL, RESULT, A],
        [U, CALL, RESULT, C],
        [3],
        math.nan,
    ),
    (MS, {"query": "q1", "response": "a1", "rejected_response": "bad", "margin": "0.5"}, [U, A], [U, C], [1], 0.5),
    (MS, {"conversations": [ASK, GPT], "rejected_response": "bad"}, [U, A], [U, C], [1], math.nan),
    (MSM, {"messages": [S, U, A], "rejected_messages": [S, U, C]}, [S, U, A], [S, U, C], [2], math.nan),
    (MSM, {"messages": [U, A], "rejected_messages": [C]}, [U, A], [U, C], [1], math.nan),
    (
        MSM,
        {"messages": [U, A, V, B], "rejected_messages": [CALL, RESULT, C], "system": "s"},
        [S, U, A, V, B],
        [S, U, A, V, CALL, RESULT, C],
        [4],
        math.nan,
    ),
    (MSM, {"messages": [U, A], "rejected_messages": [U, C], "system": "s"}, [S, U, A], [S, U, C], [2], math.nan),
    (
        "chosen_messages, rejected_messages",
        {
            "chosen_messages": [U, {"role": "assistant", "content": [{"type": "text", "value": "a1"}]}],
            "rejected_messages": [U, {"role": "assistant", "content": [{"type": "text", "value": "bad"}]}],
        },
        [U, A],
        [U, C],
        [1],
        math.nan,
    ),
    (TRL, {"prompt": [U], "chosen": [A], "rejected": [C]}, [U, A], [U, C], [1], math.nan),
    (
        TRL,
        {"prompt": [U], "chosen": A, "rejected": '[{"role": "assistant", "content": "bad"}]', "margin": 1.5},
        [U, A],
        [U, C],
        [1],
        1.5,
    ),
    (TRL, {"chosen": [U, A, V, B], "rejected": [U, A, V, C]}, [U, A, V, B], [U, A, V, C], [3], math.nan),
    (TRL, {"prompt": "q1", "chosen": [U, A], "rejected": [U, C], "system": "s"}, [S, U, A], [S, U, C], [2], math.nan),
    (TRL, {"prompt": "q1", "chosen": [A], "rejected": [C]}, [U, A], [U, C], [1], math.nan),
    (TRL, {"prompt": [U], "chosen": "a1", "rejected": "bad"}, [U, A], [U, C], [1], math.nan),
    (ALPACA, {"instruction": "q1", "input": "", "chosen": "a1", "rejected": "bad"}, [U, A], [U, C], [1], math.nan),
    (ALPACA, {"instruction": "q1", "output": ["a1", "bad"], "system": "s"}, [S, U, A], [S, U, C], [2], math.nan),
    (SHAREGPT, {"conversations": [ASK], "chosen": GPT, "rejected": LOST}, [U, A], [U, C], [1], math.nan),
    (
        SHAREGPT,
        {"conversations": [ASK], "chosen": "a1", "rejected": [LOST], "system": "s", "margin": 1},
        [S, U, A],
        [S, U, C],
        [2],
        1.0,
    ),
]


@pytest.mark.parametrize("case", range(len(GOOD)))
@pytest.mark.parametrize("task", ["dpo", "rm"])
def test_pairs_become_the_conversations_they_mean(case: int, task: str) -> None:
    name, row, chosen, rejected, begin, margin = GOOD[case]
    found = recognize_format(row, task)
    assert found.name == name
    unit = found.parse({**row, "tools": [TOOL]})
    assert [list(s.messages) for s in unit.samples] == [chosen, rejected]
    for sample in unit.samples:
        assert [flag for m, flag in zip(sample.messages, sample.loss, strict=True) if m["role"] != "assistant"].count(
            None
        ) == len([m for m in sample.messages if m["role"] != "assistant"])
        assert [i for i, flag in enumerate(sample.loss) if flag] == [
            i for i, m in enumerate(sample.messages) if m["role"] == "assistant" and i >= begin[0]
        ]
        assert sample.tools == (TOOL,)
    assert unit.value == pytest.approx(margin, nan_ok=True)


TEXTS = [
    ({"prompt": "one ", "chosen": "two", "rejected": "three"}, ("one two", "one three"), 4),
    ({"chosen": "one two", "rejected": "one three"}, ("one two", "one three"), 5),
    (
        {"chosen": "\n\nHuman: x\n\nAssistant: yes", "rejected": "\n\nHuman: x\n\nAssistant: no"},
        ("\n\nHuman: x\n\nAssistant: yes", "\n\nHuman: x\n\nAssistant: no"),
        22,
    ),
]


@pytest.mark.parametrize(("row", "texts", "prompt"), TEXTS)
def test_plain_texts_stay_as_they_are(row: dict[str, Any], texts: tuple[str, str], prompt: int) -> None:
    unit = recognize_format(row, "dpo").parse(row)
    assert tuple(s.text for s in unit.samples) == texts and unit.prompt == prompt


@pytest.mark.parametrize("row", [row for row, _, _ in TEXTS], ids=str)
def test_an_implicit_text_prompt_is_trls(row: dict[str, Any]) -> None:
    from trl import extract_prompt

    if "prompt" not in row:
        unit, theirs = recognize_format(row, "dpo").parse(row), extract_prompt(dict(row))
        assert unit.samples[0].text[: unit.prompt] == theirs["prompt"]


LABELLED = [
    ("messages + label", {"messages": [S, U, A], "label": True}, [S, U, A], [2], 1.0),
    ("messages + label", {"messages": [U, A, V, CALL, RESULT, B], "label": 0}, [U, A, V, CALL, RESULT, B], [3, 5], 0.0),
    ("messages + label", {"messages": [U, A, V, B | {"loss": True}], "label": "True"}, [U, A, V, B], [3], 1.0),
    ("messages + label", {"conversations": [ASK, GPT], "label": 1.0, "system": "s"}, [S, U, A], [2], 1.0),
    ("messages + label", {"instruction": "q1", "output": "a1", "label": False}, [U, A], [1], 0.0),
    ("prompt, completion, label", {"prompt": [U], "completion": [A], "label": False}, [U, A], [1], 0.0),
    (
        "prompt, completion, label",
        {"prompt": [U, A, V], "completion": [B], "label": 1, "system": "s"},
        [S, U, A, V, B],
        [4],
        1.0,
    ),
    ("prompt, completion, label", {"prompt": [U], "completion": "a1", "label": True}, [U, A], [1], 1.0),
]


@pytest.mark.parametrize(("name", "row", "messages", "loss", "label"), LABELLED)
def test_labeled_answers(name: str, row: dict[str, Any], messages: list[Any], loss: list[int], label: float) -> None:
    found = recognize_format(row, "kto")
    unit = found.parse(row)
    assert (found.name, unit.value) == (name, label)
    (sample,) = unit.samples
    assert list(sample.messages) == messages and [i for i, flag in enumerate(sample.loss) if flag] == loss
    assert recognize_format({"prompt": "x", "completion": "y", "label": True}, "kto").parse(
        {"prompt": "x", "completion": "y", "label": True}
    ).samples == (UntokenizedSample(text="xy"),)


def test_every_registered_format_of_preferences_is_tried_above() -> None:
    assert {f.name for f in FORMATS if set(f.tasks) & set(PREFERENCES)} == {g[0] for g in GOOD} | {
        row[0] for row in LABELLED
    }
    assert {f.tasks for f in FORMATS if set(f.tasks) & set(PREFERENCES)} == {PAIRS, EXAMPLES}


BAD = [
    ("dpo", {"messages": [U, A], "rejected_response": "a1"}, "rejected_response", "identical to the chosen", IDENTICAL),
    (
        "dpo",
        {"messages": [U, A], "rejected_messages": [U, A]},
        "rejected_messages",
        "identical to the chosen",
        IDENTICAL,
    ),
    ("dpo", {"prompt": "x", "chosen": "y", "rejected": "y"}, "rejected", "identical", IDENTICAL),
    ("dpo", {"messages": [U, A], "rejected_response": ""}, "rejected_response", "an empty completion", EMPTY),
    ("dpo", {"messages": [U, A], "rejected_response": " \n"}, "rejected_response", "an empty completion", EMPTY),
    ("dpo", {"messages": [U], "rejected_response": "x"}, "messages", "the last message is the user's", EMPTY),
    ("dpo", {"chosen": [U, A], "rejected": [U, A, V, B]}, "chosen", "no completion after the shared", EMPTY),
    ("dpo", {"prompt": "x", "chosen": "", "rejected": "y"}, "chosen", "an empty completion", EMPTY),
    ("dpo", {"prompt": "", "chosen": "x", "rejected": "y"}, "prompt", "an empty prompt", NO_PROMPT),
    ("dpo", {"chosen": "x", "rejected": "y"}, "prompt", "an empty prompt", NO_PROMPT),
    ("dpo", {"chosen": [A], "rejected": [C]}, "chosen", "no message before the completion", NO_PROMPT),
    ("dpo", {"chosen": [U, A], "rejected": [V, C]}, "chosen", "part at message 0, which is the user's", PROMPTS),
    ("dpo", {"messages": [S, U, A], "rejected_messages": [S, V, C]}, "messages", "part at message 1", PROMPTS),
    ("kto", {"messages": [U], "label": True}, "messages", "no answer after the last question", EMPTY),
    ("kto", {"messages": [U, A | {"content": ""}], "label": True}, "messages", "an empty completion", EMPTY),
    ("kto", {"messages": [A], "label": True}, "messages", "no message before", NO_PROMPT),
    ("kto", {"prompt": "", "completion": "x", "label": True}, "prompt", "an empty prompt", NO_PROMPT),
    ("dpo", {"messages": [U, A], "rejected_response": 3}, "rejected_response", "int 3; expected a string", None),
    ("dpo", {"messages": [U, A], "rejected_messages": "no"}, "rejected_messages", "not JSON", None),
    ("dpo", {"messages": [{"role": 3}], "rejected_response": "x"}, "messages[0].role", "one of system", None),
    (
        "dpo",
        {"messages": [U, A], "rejected_response": "x", "margin": "wide"},
        "margin",
        'str "wide"; expected a number',
        None,
    ),
    ("dpo", {"messages": [U, A], "rejected_response": "x", "margin": math.inf}, "margin", "a number", None),
    (
        "dpo",
        {"prompt": "x", "chosen": "y", "rejected": "z", "system": "s"},
        "system",
        "cannot be combined with plain text",
        None,
    ),
    (
        "kto",
        {"prompt": "x", "completion": "y", "label": 1, "tools": [TOOL]},
        "tools",
        "cannot be combined with plain text",
        None,
    ),
    ("dpo", {"chosen": 1, "rejected": [U]}, "chosen", "a string or a list of messages", None),
    ("dpo", {"instruction": "x", "output": ["a"]}, "output", "[chosen, rejected], two strings", None),
    ("dpo", {"instruction": "x", "chosen": 1, "rejected": "a"}, "chosen", "a string", None),
    ("dpo", {"conversations": [ASK], "chosen": [], "rejected": "a"}, "chosen", '{"from": "gpt", "value": ...}', None),
    ("kto", {"messages": [U, A], "label": "maybe"}, "label", 'str "maybe"; expected true for a desirable', None),
    ("kto", {"messages": [U, A], "label": 0.5}, "label", "float 0.5", None),
    ("kto", {"messages": [U, A], "label": [True]}, "label", "list", None),
]


@pytest.mark.parametrize(("task", "row", "column", "said", "cause"), BAD)
def test_a_row_of_no_use_names_its_column_and_cause(
    task: str, row: dict[str, Any], column: str, said: str, cause: str | None
) -> None:
    with pytest.raises(RowError) as e:
        recognize_format(row, task).parse(row)
    assert e.value.column == column and said in str(e.value)
    assert (e.value.cause if isinstance(e.value, UnusablePreferenceError) else None) == cause


WRONG = [
    (
        "sft",
        {"messages": [U, A], "rejected_response": "x"},
        f"the format {MS} is for megaswift dpo, orpo, cpo, simpo, rm, not for sft",
    ),
    ("sft", {"prompt": "x", "chosen": "y", "rejected": "z"}, f"the format {TRL} is for megaswift dpo"),
    ("sft", {"instruction": "x", "output": ["y", "z"]}, f"the format {ALPACA} is for"),
    (
        "dpo",
        {"messages": [U, A]},
        "the format messages is for megaswift sft, grpo, ppo, not for dpo; expected a row of alpaca preference",
    ),
    ("dpo", {"messages": [U, A], "label": True}, "not for dpo"),
    (
        "kto",
        {"messages": [U, A], "rejected_response": "x"},
        "not for kto; expected a row of messages + label or prompt, completion, label",
    ),
    ("pt", {"messages": [U, A], "label": True}, "not for pt"),
    ("dpo", {"frage": "x"}, "one of alpaca preference: instruction, chosen, rejected [input"),
    ("kto", {"frage": "x"}, "messages + label: messages, label [tools, system]"),
]


@pytest.mark.parametrize(("task", "row", "said"), WRONG)
def test_data_of_another_task_are_refused(task: str, row: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError) as e:
        recognize_format(row, task)
    assert said in str(e.value)


def test_a_label_does_not_keep_a_conversation_from_sft() -> None:
    assert recognize_format({"messages": [U, A], "label": "news"}, "sft").name == "messages"
    assert recognize_format({"messages": [U, A], "rejected_response": None}, "sft").name == "messages"


@pytest.mark.parametrize(
    ("task", "row", "column"),
    [
        ("dpo", {"messages": [U, A], "rejected_response": None}, "rejected_response"),
        (
            "dpo",
            {"query": "q", "response": "a", "rejected_response": None, "rejected_messages": None},
            "rejected_response",
        ),
        ("rm", {"prompt": "q", "chosen": "a", "rejected": None}, "rejected"),
        ("kto", {"messages": [U, A], "label": None}, "label"),
    ],
)
def test_a_column_that_is_null_is_named(task: str, row: dict[str, Any], column: str) -> None:
    with pytest.raises(RowError) as e:
        recognize_format(row, task).parse(row)
    assert e.value.column == column
    if column == "rejected_response":
        empty = {**row, column: ""}
        with pytest.raises(UnusablePreferenceError) as other:
            recognize_format(empty, task).parse(empty)
        assert str(e.value) == str(other.value)
