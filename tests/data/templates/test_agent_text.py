"""`--agent_template` formats that are text: system messages beside ms-swift's, hand-written renderings, loss, prompts.

Covers: megaswift/data/options/agent_templates.py, megaswift/data/templates/agent_instructions.py.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.options.agent_templates import AGENT_TEXTS
from megaswift.data.preference.encode import PreferenceEncoder
from megaswift.data.prompts.encode import PromptEncoder
from megaswift.data.show.loss_mask import PROMPT_TRAINED, LossMaskCertifier
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.templates.agent_instructions import AGENT_TEXT_FORMATS
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import ConfigError
from tests.data.makers import config, tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Weather of a 城市", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}, {"name": "add", "name_for_human": "Adder", "description": "Adds"}]
MS_SWIFT = {
    "react_en": "d23e5cd8b027956b",
    "react_zh": "69a2e2261ac64766",
    "react_grpo": "6400113fa9a044f8",
    "qwen_en": "395600cce7768a20",
    "qwen_zh": "66678ce4ea20c03e",
    "qwen_en_parallel": "719167671393dfdd",
    "qwen_zh_parallel": "3de3413445d18bad",
}
"""SHA-256 of the system message that ms-swift's class of each name writes for TOOLS and "Be kind."."""
ADD = {"name": "add", "description": "Adds"}
CALL = {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 1}}'}
ASKED = [{"role": "user", "content": "2+2?"}]
TALK: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": "Thought: add"},
    CALL,
    {"role": "tool_response", "content": "four"},
    {"role": "assistant", "content": "Final Answer: 4"},
]
QWEN = """<|im_start|>system
Be kind.

# Tools

## You have access to the following tools:

### add

add: Adds Parameters: {} Format the arguments as a JSON object.

## When you need to call a tool, please insert the following command in your reply, which can be called zero or \
multiple times according to your needs:

✿FUNCTION✿: The tool to use, should be one of [add]
✿ARGS✿: The input of the tool
✿RESULT✿: Tool results
✿RETURN✿: Reply based on tool results. Images need to be rendered as ![](url)<|im_end|>
<|im_start|>user
2+2?<|im_end|>
<|im_start|>assistant
✿FUNCTION✿: add
✿ARGS✿: {"a": 1}
✿FUNCTION✿: add
✿ARGS✿: {"a": 1}
✿RESULT✿:[[four
✿RESULT✿:five
]]Final Answer: 4<|im_end|>
"""
"""Between [[ and ]]: no loss."""


def made_spec(name: str, task: str = "sft", **options: Any) -> Any:
    data = config(Path("/tmp"), "x", **{"agent_template": name, "chat_template": "chatml", **options}).data
    return encode_spec(data, tokenizer("qwen"), task)


def spans_of(rendered: Any) -> list[str]:
    return [rendered.text[a:b] for a, b in rendered.spans]


@pytest.mark.parametrize("name", AGENT_TEXTS)
def test_instructions_are_those_of_ms_swift(name: str) -> None:
    text = AGENT_TEXT_FORMATS[name].system(TOOLS, "Be kind.")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == MS_SWIFT[name]
    with pytest.raises(RowError, match="a tool with a name and a description"):
        AGENT_TEXT_FORMATS[name].system([{"name": "add"}], "")


def test_parallel_calls_and_results() -> None:
    results = [{"role": "tool", "content": text} for text in ("four", "five")]
    talk = [{"role": "system", "content": "Be kind."}, *ASKED, CALL, CALL, *results, TALK[-1]]
    got = RowEncoder(made_spec("qwen_en")).render({"messages": talk, "tools": [ADD]})
    first, result, last = QWEN.replace("]]", "[[").split("[[")
    assert got.text == first + result + last
    assert spans_of(got) == [first.partition("assistant\n")[2], last.removesuffix("\n")]


@pytest.mark.parametrize("options", [{}, {"add_non_thinking_prefix": False}, {"chat_template": "qwen3"}])
def test_loss_of_a_turn_with_results(options: dict[str, Any]) -> None:
    """A row of several turns under every choice of turns; the certificate agrees."""
    row = {"messages": [*TALK, *ASKED, *TALK[1:]], "tools": [ADD]}
    said = ['Thought: add\nAction: add\nAction Input: {"a": 1}\nObservation:', "Final Answer: 4<|im_end|>"]
    for turns, count in (("default", 2), ("last_round", 1)):
        spec = made_spec("react_en", loss_scale=turns, **options)
        encoder = RowEncoder(spec)
        got = encoder.render(row)
        assert [span.rstrip("\n") for span in spans_of(got)] == said * count
        assert said[0] + "four\n" + said[1] in got.text and "tools:\n\nadd: Call this tool" in got.text
        tokens, mask = next(encoder.tokenize([got]))
        assert tokens.tolist() == tokenizer("qwen")(got.text, add_special_tokens=False)["input_ids"]
        assert tokenizer("qwen").decode(tokens[mask > 0]).replace("\n", "") == ("".join(said) * count).replace("\n", "")
        assert not LossMaskCertifier(spec).certify([("f", LocatedRow(1, row))]).faults
    everything = RowEncoder(made_spec("react_en", loss_scale="all", **options)).render(row)
    assert sum(b - a for a, b in everything.spans) == len(everything.text)


def test_flags_and_weights_of_parts() -> None:
    """A first step without loss; the table `react` weighs what stands in each part."""
    talk = [TALK[0], {**TALK[1], "loss": False}, {**CALL, "loss": False}, *TALK[3:]]
    spec = made_spec("react_en")
    assert spans_of(RowEncoder(spec).render({"messages": talk, "tools": [ADD]})) == ["Final Answer: 4<|im_end|>"]
    assert not LossMaskCertifier(spec).certify([("f", LocatedRow(1, {"messages": talk, "tools": [ADD]}))]).faults
    weighed = RowEncoder(made_spec("react_en", loss_scale="react")).render({"messages": TALK, "tools": [ADD]})
    parts = list(zip(spans_of(weighed), weighed.weights, strict=True))
    assert parts == [
        ("Thought: add\n", 1.0),
        ('Action: add\nAction Input: {"a": 1}\nObservation:', 2.0),
        ("Final Answer: 4<|im_end|>", 1.0),
    ]
    talk = [*TALK[:2], {**CALL, "loss_scale": 1}, *TALK[3:]]
    own = RowEncoder(made_spec("react_en", loss_scale="react")).render({"messages": talk, "tools": [ADD]})
    assert spans_of(own) == ["".join(text for text, _ in parts[:2]), parts[2][0]] and own.weights == (1.0, 1.0)


def test_a_trained_result_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = made_spec("react_en")
    row = {"messages": [*TALK[:3], {"role": "tool", "content": "a result of many words"}, TALK[-1]], "tools": [ADD]}
    monkeypatch.setattr(
        "megaswift.data.templates.render.locate_turn_parts",
        lambda text, begin, end, parts: [(begin, end), *[(end, end)] * (len(parts) - 1)],
    )
    assert PROMPT_TRAINED in dict(LossMaskCertifier(spec).certify([("f", LocatedRow(1, row))]).faults)


def test_prompts_and_preferences() -> None:
    """A prompt that ends with a result goes on in the assistant's turn; both answers of a pair follow it."""
    prompt = {"messages": TALK[:4], "tools": [ADD]}
    spec = made_spec("react_en", "grpo")
    text = PromptEncoder(spec).located("f", prompt).text
    begin = (
        '2+2?<|im_end|>\n<|im_start|>assistant\nThought: add\nAction: add\nAction Input: {"a": 1}\nObservation:four\n'
    )
    assert text.endswith(begin)
    assert not LossMaskCertifier(spec).certify([("f", LocatedRow(1, prompt))]).faults
    pair = {"messages": [*ASKED, TALK[-1]], "rejected_response": "Final Answer: 5", "tools": [ADD]}
    spec = made_spec("react_en", "dpo")
    encoded = next(PreferenceEncoder(spec).read([("f", LocatedRow(1, pair))]))
    assert not isinstance(encoded, RowError)
    assert [spans_of(one) for one in encoded.rendered] == [[f"Final Answer: {n}<|im_end|>"] for n in (4, 5)]


def test_what_is_refused() -> None:
    encoder = RowEncoder(made_spec("qwen_en"))
    with pytest.raises(RowError, match="follows no assistant message"):
        encoder.render({"messages": [*ASKED, TALK[3], TALK[-1]]})
    thinking = [TALK[0], {"role": "assistant", "content": "<think>a</think>"}, *TALK[2:4]]
    thinking.append({"role": "assistant", "content": "<think>b</think>Final Answer: 4"})
    with pytest.raises(RowError, match="changes the assistant's text"):
        RowEncoder(made_spec("react_grpo", chat_template="qwen3")).render({"messages": thinking, "tools": [ADD]})
    assert RowEncoder(made_spec("react_grpo")).render({"messages": thinking, "tools": [ADD]}).spans
    with pytest.raises(ConfigError, match="prose of the ToolBench data set"):
        made_spec("toolbench")
    own = [{"role": "system", "content": "Be kind."}, *TALK]
    assert "unused_system" in RowEncoder(made_spec("react_en")).render({"messages": own, "tools": [ADD]}).notes
