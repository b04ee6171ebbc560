"""The certificate of loss masks: sound templates of many kinds pass, planted faults of templates and of masks are
found, and masks of all kinds are those of a plain Python rendering.

Covers: megaswift/data/templates/text_search.py, megaswift/data/show/certificate.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaswift.data.encode.rows import EncodeSpec, RowEncoder, encode_spec
from megaswift.data.formats import parse_sample
from megaswift.data.show import loss_mask as certify
from megaswift.data.show.certificate import certificate_lines, certify_sources
from megaswift.data.show.loss_mask import Findings, LossMaskCertifier
from megaswift.data.sources.files import DatasetFiles
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.templates import text_search as search
from megaswift.data.templates.render import ChatRenderer, RenderedConversation
from megaswift.data.templates.turns import AssistantTurnFinder
from megaswift.data.untokenized_sample import UntokenizedSample
from tests.data.chat_template_kinds import (
    MARKED,
    TEMPLATE_FAULTS,
    TemplateKind,
    all_kinds,
    conversations,
    jinja,
    rendered,
)
from tests.data.makers import chat, config, jsonl, template, tokenizer

KINDS = all_kinds()
SPECIAL = (
    *("<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "</s>", "<｜User｜>", "<｜Assistant｜>"),
    "<｜end▁of▁sentence｜>",
)
FOUND_AS = {
    "user_marked": {certify.PROMPT_TRAINED},
    "header_marked": {certify.PROMPT_TRAINED},
    "all_marked": {certify.PROMPT_TRAINED},
    "end_unmarked": {certify.END_UNTRAINED},
    "first_character_unmarked": {certify.ANSWER_UNTRAINED},
    "last_answer_unmarked": {certify.ANSWER_UNTRAINED},
    "calls_unmarked": {certify.END_UNTRAINED},
    "reasoning_unmarked": {certify.ANSWER_UNTRAINED},
    "no_end": {search.NO_END, certify.END_UNTRAINED},
    "answer_cut": {search.ANSWER_CHANGED, "refused"},
    "answer_lower": {search.ANSWER_CHANGED},
    "tools_dropped": {search.TOOL_MISSING},
    "tool_parameters_dropped": {search.TOOL_MISSING},
    "calls_dropped": {search.CALL_MISSING},
    "call_arguments_dropped": {search.CALL_MISSING},
    "results_dropped": {search.MESSAGE_MISSING},
    "system_dropped": {search.SYSTEM_MISSING},
    "first_user_dropped": {search.MESSAGE_MISSING},
    "reasoning_dropped": {search.REASONING_MISSING},
    "answer_in_prompt": {certify.PROMPT_DIFFERS, search.ANSWER_CHANGED},
}


ADD = {"name": "add", "arguments": {"a": 1}}


def spec_of(text: str, kind: str = "qwen", task: str = "sft", **options: Any) -> EncodeSpec:
    tok = tokenizer(kind)
    tok.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tok.chat_template = text
    return encode_spec(config(Path("/tmp"), "x", **options).data, tok, task)


def certified(spec: EncodeSpec, rows: Sequence[dict[str, Any]]) -> Findings:
    return LossMaskCertifier(spec).certify(("d.jsonl", LocatedRow(i + 1, row)) for i, row in enumerate(rows))


def check_kind(kind: TemplateKind, seed: int, count: int) -> None:
    """Text and spans are the plain rendering's, and the certificate holds."""
    spec, rows = spec_of(jinja(kind)), list(conversations(seed, count, kind))
    assert spec.templates is not None
    renderer = ChatRenderer(spec.templates)
    for row in rows:
        sample = parse_sample(row, "sft")
        assert isinstance(sample, UntokenizedSample)
        got = renderer.render(sample)
        assert (got.text, list(got.spans)) == rendered(kind, row)
    findings = certified(spec, rows)
    assert not findings.faults and not findings.refused, findings
    assert findings.answers == sum(m["role"] == "assistant" for row in rows for m in row["messages"])


def test_there_are_many_kinds() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) == 64
    for field in ("frame", "marked", "strip", "newline", "thinking", "system", "calls", "begin"):
        assert len({getattr(kind, field) for kind in KINDS}) > 1


@pytest.mark.wide
@pytest.mark.parametrize("group", range(8))
def test_masks_of_every_kind_are_those_of_a_plain_rendering(group: int) -> None:
    for seed, kind in enumerate(KINDS[group::8]):
        check_kind(kind, seed, 4)


def test_results_that_the_template_also_writes_before_them() -> None:
    """[INST] around a tool's result INST is not the result."""
    kind = next(k for k in KINDS if (k.frame, k.thinking, k.calls, k.marked) == ("inst", "empty", "list", False))
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": ADD}]}
    results = [{"role": "tool", "content": text} for text in ("INST ", "INST")]
    row = {"messages": [{"role": "user", "content": "I"}, call, *results, {**call, "content": "think"}]}
    findings = certified(spec_of(jinja(kind)), [row])
    assert findings.answers == 2 and not findings.faults and not findings.refused, findings


@pytest.mark.slow
@pytest.mark.parametrize("group", range(8))
def test_ten_thousand_conversations(group: int) -> None:
    for seed, kind in enumerate(KINDS[group::8]):
        check_kind(kind, 100 + seed, 160)


def planted() -> Iterator[tuple[TemplateKind, str]]:
    """Every fault in every kind of template where it is one."""
    for kind in KINDS:
        for fault in TEMPLATE_FAULTS:
            marked = fault in MARKED and not kind.marked
            header = fault == "header_marked" and kind.frame == "inst"  # which has none
            if jinja(kind, fault) != jinja(kind) and not marked and not header:
                yield kind, fault


def check_fault(kind: TemplateKind, fault: str, count: int) -> None:
    findings = certified(spec_of(jinja(kind, fault)), list(conversations(7, count, kind)))
    found = {k for k, n in findings.counts.items() if n} | ({"refused"} if findings.refused else set())
    assert found & FOUND_AS[fault], (kind.name, fault, found)


@pytest.mark.wide
@pytest.mark.parametrize("fault", TEMPLATE_FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    kinds = [kind for kind, planted_fault in planted() if planted_fault == fault]
    for kind in kinds[:: max(1, len(kinds) // 4)]:
        check_fault(kind, fault, 40)


@pytest.mark.slow
@pytest.mark.parametrize("fault", TEMPLATE_FAULTS)
def test_a_planted_fault_is_found_in_every_kind(fault: str) -> None:
    for kind, planted_fault in planted():
        if planted_fault == fault:
            check_fault(kind, fault, 60)


def _shifted(mask: np.ndarray, by: int) -> np.ndarray:
    return np.roll(mask, by)


def _cut(mask: np.ndarray, side: int) -> np.ndarray:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
    out = mask.copy()
    out[edges[-1][0] if side == 0 else edges[-1][1] - 1] = 0
    return out


def _grown(mask: np.ndarray) -> np.ndarray:
    out = mask.copy()
    out[int(mask.argmax()) - 1] = 1
    return out


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3"])
@pytest.mark.parametrize(
    ("harm", "kinds"),
    [
        (lambda m: _shifted(m, 1), {certify.ANSWER_UNTRAINED}),
        (lambda m: _shifted(m, -1), {certify.PROMPT_TRAINED, certify.END_UNTRAINED}),
        (lambda m: _cut(m, 0), {certify.ANSWER_UNTRAINED}),
        (lambda m: _cut(m, 1), {certify.END_UNTRAINED}),
        (_grown, {certify.PROMPT_TRAINED}),
        (np.zeros_like, {certify.ANSWER_UNTRAINED, certify.END_UNTRAINED}),
        (np.ones_like, {certify.PROMPT_TRAINED}),
    ],
)
def test_a_wrong_mask_is_found(monkeypatch: pytest.MonkeyPatch, name: str, harm: Any, kinds: set[str]) -> None:
    """The mask that training would use, changed by one token and more."""
    spec = spec_of(template(name), "llama" if name == "llama3" else "qwen")
    rows = [chat("hello world", "The capital of France"), chat("x", "Paris is it")]
    assert not certified(spec, rows).faults
    sound = RowEncoder.tokenize

    def harmed(self: RowEncoder, texts: Sequence[RenderedConversation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for ids, mask in sound(self, texts):
            yield ids, harm(mask)

    monkeypatch.setattr(RowEncoder, "tokenize", harmed)
    findings = certified(spec, rows)
    assert kinds <= set(findings.faults) and all(findings.counts[kind] == 2 for kind in kinds)


def test_tokens_of_another_text_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = RowEncoder.tokenize

    def harmed(self: RowEncoder, texts: Sequence[RenderedConversation]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for ids, mask in sound(self, texts):
            ids[3] += 1
            yield ids, mask

    monkeypatch.setattr(RowEncoder, "tokenize", harmed)
    assert certified(spec_of(template("qwen2_5")), [chat("a", "b")]).faults == {certify.TOKENS_DIFFER: 1}


PUBLISHED = [
    ("qwen3", set()),
    ("qwen3_training", set()),
    ("qwen3_5_think", set()),
    ("qwen3_5_nothink", set()),
    ("llama3_training", set()),
    ("glm4moe_training", set()),
    ("glm4moe", {search.NO_END}),
    ("deepseek_r1_distill_training", {certify.PROMPT_TRAINED}),
    ("qwen2_5_training", {certify.PROMPT_TRAINED}),
]
"""TRL's, and what is true of them: GLM's ends no turn; two train on the last token of the prompt."""


@pytest.mark.parametrize(("name", "kinds"), PUBLISHED)
def test_published_templates(name: str, kinds: set[str]) -> None:
    rows = [chat("hello", "Paris"), {"messages": chat("a", "b")["messages"] + chat("c", "a")["messages"]}]
    rows.append({"messages": [{"role": "system", "content": "Be brief."}, *chat("x", "assistant")["messages"]]})
    assert set(certified(spec_of(template(name)), rows).faults) == kinds


def test_answers_without_loss() -> None:
    messages = [*chat("a", "one")["messages"], *chat("b", "two")["messages"]]
    rows = [{"messages": [m | ({"loss": False} if i == 1 else {}) for i, m in enumerate(messages)]}]
    for options, row, answers, excluded in (
        ({}, rows, 1, 1),
        ({"loss_scale": "last_round"}, [{"messages": messages}], 1, 1),
        ({"loss_scale": "all"}, [{"messages": messages}], 2, 0),
        ({"loss_scale": "last_round+hermes"}, [{"messages": messages}], 1, 1),
    ):
        findings = certified(spec_of(template("qwen3"), **options), row)
        assert (findings.faults, findings.answers, findings.excluded) == ({}, answers, excluded)


def test_an_excluded_answer_with_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = ChatRenderer.render
    monkeypatch.setattr(ChatRenderer, "render", lambda chat, s: rendered(chat, replace(s, loss=(None,) * len(s.loss))))
    messages = [*chat("a", "one")["messages"], *chat("b", "two")["messages"]]
    rows = [{"messages": [m | ({"loss": False} if i == 1 else {}) for i, m in enumerate(messages)]}]
    assert certified(spec_of(template("qwen3")), rows).faults == {certify.EXCLUDED_TRAINED: 1}


ALWAYS_PROMPTING = (
    "{%- for m in messages -%}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content + '<|eot_id|>' }}"
    "{%- endfor -%}{{ '<|start_header_id|>assistant<|end_header_id|>' }}"
)


@pytest.mark.parametrize("eos", ["<|eot_id|>", "</s>"])
def test_the_end_of_a_turn_is_not_the_mask_s(monkeypatch: pytest.MonkeyPatch, eos: str) -> None:
    """A mask that takes the next header's token for a part of the end is found, with or without the tokenizer's."""
    rows = [{"messages": [*chat("a", "one")["messages"], *chat("b", "two")["messages"]]}]
    spec = spec_of(ALWAYS_PROMPTING)
    assert spec.templates is not None
    named = replace(spec.templates, special_tokens={**spec.templates.special_tokens, "eos_token": eos})
    spec = replace(spec, templates=named)
    assert not certified(spec, rows).faults
    learn = AssistantTurnFinder._learn_header_and_ends

    def wrong(finder: AssistantTurnFinder) -> tuple[str, tuple[str, ...]]:
        return learn(finder)[0], ("<|eot_id|><|start_header_id|>", "<|eot_id|>")

    monkeypatch.setattr(AssistantTurnFinder, "_learn_header_and_ends", wrong)
    assert certified(spec, rows).faults == {certify.PROMPT_TRAINED: 1}


def test_calls_and_results_within_one_turn() -> None:
    """Gemma 4's: certified with the mask that training uses."""
    call = {"type": "function", "id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    schema = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "well"},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c"},
        {"role": "assistant", "content": "Paris"},
    ]
    made = tokenizer("gemma", "gemma4")
    made.add_special_tokens({"additional_special_tokens": ["<|tool_response>", "<tool_response|>"]})
    spec = encode_spec(config(Path("/tmp"), "x").data, made, "sft")
    findings = certified(spec, [{"messages": messages, "tools": [{"type": "function", "function": schema}]}])
    assert (findings.faults, findings.refused, findings.answers) == ({}, 0, 2)


@pytest.mark.parametrize("results", [0, 1, 2])
@pytest.mark.parametrize("reasoning", [{}, {"reasoning_content": "well"}], ids=["", "reasoning"])
@pytest.mark.parametrize("content", ["", "Let me see."])
def test_a_content_behind_the_results_of_its_calls(content: str, reasoning: dict[str, str], results: int) -> None:
    """Gemma 4's: calls, results and content stand in one turn; nothing of a result carries loss."""
    calls = [{"type": "function", "id": c, "function": {"name": "add", "arguments": {"a": 1}}} for c in "cd"[:results]]
    calls = calls or [{"type": "function", "id": "c", "function": {"name": "add", "arguments": {"a": 1}}}]
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": content, "tool_calls": calls, **reasoning},
        *({"role": "tool", "content": "RESULT", "name": "add", "tool_call_id": c} for c in "cd"[:results]),
    ]
    turns += (
        [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "Paris"}]
        if results and not reasoning
        else []
    )
    made = tokenizer("gemma", "gemma4")
    made.add_special_tokens({"additional_special_tokens": ["<|tool_response>", "<tool_response|>"]})
    spec = encode_spec(config(Path("/tmp"), "x").data, made, "sft")
    assert spec.templates is not None
    rendered = ChatRenderer(spec.templates).render(parse_sample({"messages": turns}, "sft"))
    said = "".join(rendered.text[a:b] for a, b in rendered.spans)
    assert content in said and "well" * bool(reasoning) in said and "RESULT" not in said and "response:" not in said
    assert certified(spec, [{"messages": turns}]).faults == {}


@pytest.mark.parametrize("content", [{"sky": "sunny", "days": [1, {"at": "noon"}]}, ["sunny", 1], 7, None], ids=str)
@pytest.mark.parametrize(("kind", "name"), [("qwen", "qwen2_5"), ("llama", "llama3_1"), ("gemma", "gemma4_v5")])
def test_a_result_that_is_no_text(kind: str, name: str, content: Any) -> None:
    call = {"type": "function", "id": "c", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": content, "name": "add", "tool_call_id": "c"},
        {"role": "assistant", "content": "Paris"},
    ]
    made = tokenizer(kind, name)
    made.add_special_tokens({"additional_special_tokens": ["<|tool_response>", "<tool_response|>"]})
    spec = encode_spec(config(Path("/tmp"), "x").data, made, "sft")
    assert certified(spec, [{"messages": turns}]).faults == {}


def test_other_tasks() -> None:
    pair = {**chat("hello", "Paris"), "rejected_response": "you"}
    assert certified(spec_of(template("qwen3"), task="dpo"), [pair]).answers == 2
    label = {**chat("hello", "Paris"), "label": True}
    plain = {"prompt": "The capital of France", "completion": " is Paris."}
    plain_pair = {"prompt": "The capital of France", "chosen": " is Paris.", "rejected": " is you."}
    prompt = {"messages": [{"role": "user", "content": "hello"}], "solution": "x"}
    for task, row in (("dpo", pair), ("kto", label), ("sft", plain), ("dpo", plain_pair), ("grpo", prompt)):
        findings = certified(spec_of(template("qwen3"), task=task), [row])
        assert not findings.faults and not findings.refused, (task, findings)
    dropping = template("qwen3").replace("message.content", "message.content[:2]")
    assert search.MESSAGE_MISSING in certified(spec_of(dropping, task="grpo"), [prompt]).faults


@pytest.mark.wide
def test_several_processes_give_one_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same counts and the same first rows, and progress up to the last row."""
    rows = [chat("hello", "" if i % 100 == 7 else "Paris") | {"system": "Be brief."} for i in range(400)]
    faulty = template("qwen3").replace('message.role == "assistant"', "message.role == 'assistant'")
    path = Path(jsonl(tmp_path / "d.jsonl", rows))
    source = DatasetFiles("d", (path,))
    monkeypatch.setattr("megaswift.data.show.certificate.PROCESS_BYTES", 1)
    monkeypatch.setattr("megaswift.data.sources.files.PARTS", 4)
    spec, done = spec_of(faulty.replace("messages[0].role == 'system'", "false")), []
    one, two = (certify_sources([source], spec, n, done.append) for n in (1, 2))
    assert one == two and done[-1] == one.rows == 400 and one.faults == {search.SYSTEM_MISSING: 400}
    assert one.examples[search.SYSTEM_MISSING] == [f"{path}:{i}: messages[0]" for i in (1, 2, 3)]
    text = "\n".join(certificate_lines(one, "sft", "default"))
    assert "NOT certified (400 rows)" in text and "400 rows: the system message is not rendered" in text


def test_images_and_videos_cut_a_text() -> None:
    """Their placeholders are not searched for; what stands between them is."""
    content = "a<video>b<image> c <img>x.png</img>d"
    assert search.content_pieces({"content": content}) == ["a", "b", "c", "d"]
    assert search.content_pieces({"content": [{"type": "text", "text": "a"}, {"type": "video"}]}) == ["a"]


def test_a_prompt_with_more_than_stands_before_the_answer() -> None:
    """White space, or a token."""
    text, rows = template("qwen3_training"), [chat("hello", "Paris")]
    begin = "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n"
    assert text.count(begin) == 1 and not certified(spec_of(text), rows).counts
    for more in ("\\n", "<|im_end|>"):
        found = certified(spec_of(text.replace(begin, begin + more)), rows)
        assert found.counts == {certify.PROMPT_DIFFERS: 1} and not found.faults
