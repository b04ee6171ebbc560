"""What a chat template leaves out of a row, and answers that say nothing: counted and told everywhere.

Covers: megaswift/data/build.py, megaswift/data/preference/encode.py, megaswift/data/prompts/encode.py,
megaswift/data/formats/prompt.py, megaswift/data/prompts/rows.py, megaswift/data/untokenized_sample.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import (
    build_train_and_eval_sources,
    load_document_splits,
    load_preference_splits,
)
from megaswift.data.show.samples import data_summary
from megaswift.data.templates.render import ChatRenderer, load_chat_templates
from megaswift.data.untokenized_sample import RowError, checked_conversation_sample
from megaswift.errors import DataError
from megaswift.run.summary import data_text
from tests.data.makers import chat, config, jsonl, tokenizer
from tests.data.of_config import prompt_splits

PLAIN = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "<{{ m.role }}>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
"""Neither tools nor system messages."""
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
ASK, ANSWER = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
RESULT = {"from": "observation", "value": "r"}


def made(tmp_path: Path, rows: list[Any], template: str = PLAIN, **options: Any) -> Any:
    options = {"chat_template": template, "strict": False, **options}
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", rows), **options)
    return cfg, tokenizer("qwen")


def test_calls_and_results_that_a_template_leaves_out_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that is not written teaches nothing, not even the end token; the answers of its row are trained."""
    rows = [{"conversations": [ASK, CALL, RESULT, ANSWER]}, {"conversations": [ASK, RESULT, ANSWER]}, chat("q", "a")]
    cfg, tok = made(tmp_path, rows, strict=True)
    docs, _ = load_document_splits(cfg.data, cfg.train, tok)
    assert {k: n for k, n in docs.counted.items() if n} == {"rows": 3, "unused_calls": 1, "unused_messages": 2}
    for i in range(3):
        ids, mask = docs.read(i)
        assert tok.decode(ids[np.flatnonzero(mask)]) == "a<|im_end|>"
    said = capsys.readouterr().err
    assert "d.jsonl: 1 rows with a tool call that the chat template omits, which is not trained" in said
    assert "d.jsonl: 2 rows with a message that the chat template omits" in said
    cfg, tok = made(tmp_path, rows, streaming=True)
    source, _ = build_train_and_eval_sources(cfg.data, cfg.train, tok, LoaderGeometry(per_device=2))
    source.next()
    assert source.stats["unused_calls"] == 1 and source.stats["unused_messages"] == 2


def test_unknown_roles_are_named_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the warnings, the summary and `data show`; a typing error in the assistant's role costs its loss."""
    misspelt = {"messages": [{"role": "user", "content": "q"}, {"role": "asistant", "content": "a"}]}
    critic = {"messages": [*chat("q", "a")["messages"], {"role": "critic", "content": "c"}]}
    rows = [misspelt, critic, misspelt, chat("q", "a")]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}"
    cfg, tok = made(tmp_path, rows, template, strict=True)
    docs, _ = load_document_splits(cfg.data, cfg.train, tok)
    said = capsys.readouterr().err
    for role, count in (("asistant", 2), ("critic", 1)):
        text = f"{count} rows with a message of an unknown role, which carries no loss ({role!r})"
        assert f"d.jsonl: {text}" in said
        assert text.replace("rows ", "") in data_summary(docs, None)[0]
    trained = [tok.decode(ids[np.flatnonzero(mask)]) for ids, mask in map(docs.read, range(4))]
    assert trained == ["", "a<|im_end|>", "", "a<|im_end|>"]
    cfg, tok = made(tmp_path, rows, template, streaming=True)
    source, _ = build_train_and_eval_sources(cfg.data, cfg.train, tok, LoaderGeometry(per_device=2))
    source.next()
    assert "a row with a message of an unknown role, which carries no loss ('critic')" in capsys.readouterr().err
    assert "2 with a message of an unknown role, which carries no loss ('asistant')" in data_text(source.stats)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "mistral", "gptoss", "glm4moe"])
def test_published_templates_write_their_tools(name: str) -> None:
    """Nothing is refused or counted of a conversation with tools that the template was made for."""
    kind = "llama" if name.startswith("llama") else "mistral" if name == "mistral" else "qwen"
    try:
        tok = tokenizer(kind, name)
    except FileNotFoundError:
        pytest.skip("this TRL carries no such template")
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    turns = [
        {"role": "user", "content": "q"},
        call,
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "a"},
    ]
    renderer = ChatRenderer(load_chat_templates(tok, None))
    text = tok.apply_chat_template(turns, tools=[TOOL], tokenize=False)
    assert ('"f"' in text or "f" in text) and "r" in text
    assert renderer.prompt_notes(checked_conversation_sample(turns, "messages", tools=[TOOL])) == ()


NOTED = [
    {"messages": [{"role": "system", "content": "s"}, *chat("q", "a")["messages"]]},
    {**chat("q", "a"), "tools": [TOOL]},
    chat("q", " \n"),
    {"messages": [*chat("q", "")["messages"], *chat("q", "a")["messages"]]},
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "loss": False},
            *chat("q", "a")["messages"],
        ]
    },
    chat("q", "word " * 400),
    {"messages": "["},
    {"messages": [{"role": "user", "content": "q"}]},
]
COUNTS = {
    "rows": 7,
    "malformed": 1,
    "unused_system": 1,
    "unused_tools": 1,
    "empty_answers": 2,
    "deleted": 1,
    "without_labels": 1,
}


def test_every_reason_is_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg, tok = made(tmp_path, NOTED, max_length=300)
    docs, _ = load_document_splits(cfg.data, cfg.train, tok)
    assert docs.counted == COUNTS
    said = capsys.readouterr().err
    for part in (
        "d.jsonl: 1 malformed rows skipped",
        "d.jsonl: 2 rows with an empty completion, which trains the model to stop immediately",
        "d.jsonl: 1 rows with tools that the chat template does not use",
        "d.jsonl: 1 rows with a system message that the chat template omits",
        "1 of 7 rows deleted (longer than --max_length 300)",
        "1 of 6 rows have no label tokens",
    ):
        assert part in said
    source, _ = build_train_and_eval_sources(cfg.data, cfg.train, tok, LoaderGeometry())
    for text in (data_text(source.stats), data_summary(docs, None)[0]):
        for part in (
            "1 malformed and skipped",
            "1 deleted (longer than --max_length)",
            "2 with an empty completion",
            "1 with tools that the chat template does not use",
            "1 with a system message that the chat template omits",
            "1 without label tokens",
        ):
            assert part in text


def test_streams_count_the_same(tmp_path: Path) -> None:
    cfg, tok = made(tmp_path, NOTED, max_length=300, streaming=True)
    source, _ = build_train_and_eval_sources(cfg.data, cfg.train, tok, LoaderGeometry(per_device=8))
    source.next()
    assert source.stats == {"rows_read": 8.0} | {k: float(v) for k, v in COUNTS.items() if k != "rows"}


def test_pairs_and_prompts_count_too(tmp_path: Path) -> None:
    row = {**chat("q", "a"), "rejected_response": "b", "tools": [TOOL]}
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", [row]), "dpo", chat_template=PLAIN)
    made_units, _ = load_preference_splits(cfg.data, cfg.train, tokenizer("qwen"), "dpo")
    assert made_units.docs.counted["unused_tools"] == 1
    cfg = config(
        tmp_path,
        jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "q"}], "tools": [TOOL]}]),
        "grpo",
        chat_template=PLAIN,
    )
    source, _ = prompt_splits(cfg, tokenizer("qwen"), 1)
    assert source.stats["unused_tools"] == 1


def test_calls_and_reasoning_are_no_empty_answers() -> None:
    renderer = ChatRenderer(load_chat_templates(tokenizer("qwen", "qwen3"), None))
    for extra in (
        {"reasoning_content": "r"},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
    ):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", **extra}]
        assert renderer.render(checked_conversation_sample(messages, "messages")).notes == ()


@pytest.mark.parametrize("kind", ["qwen", "llama", "mistral"])
def test_a_text_completion_is_trained_as_trl_does(tmp_path: Path, kind: str) -> None:
    """The tokenizer's own tokens before the text, the completion with the end-of-text token as labels."""
    tok = tokenizer(kind)
    rows = [
        {"prompt": "What is ", "completion": "the capital?"},
        {"prompt": "hello ", "completion": f"you{tok.eos_token}"},
    ]
    path = jsonl(tmp_path / "d.jsonl", rows)
    cfg = config(tmp_path, path)
    docs, _ = load_document_splits(cfg.data, cfg.train, tok)
    for i, row in enumerate(rows):
        ids, mask = docs.read(i)
        whole = row["prompt"] + row["completion"].removesuffix(tok.eos_token) + tok.eos_token
        assert ids.tolist() == tok(whole)["input_ids"]
        kept = np.flatnonzero(mask)
        assert tok.decode(ids[kept]).lstrip() == row["completion"].removesuffix(tok.eos_token) + tok.eos_token
        assert kept.tolist() == list(range(int(kept[0]), len(ids)))
    stream = config(tmp_path, path, streaming=True, shuffle=False)
    source, _ = build_train_and_eval_sources(stream.data, stream.train, tok, LoaderGeometry(per_device=2))
    batch = source.next()[0]
    assert batch.input_ids[0][: len(docs.read(0)[0])].tolist() == docs.read(0)[0].tolist()
    with pytest.raises(DataError, match="--system cannot be applied"):
        cfg = config(tmp_path, path, system="s")
        load_document_splits(cfg.data, cfg.train, tok)


def test_messages_of_a_base_model_are_refused_with_the_template_to_give(tmp_path: Path) -> None:
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", [chat("q", "a")]))
    with pytest.raises(DataError, match=r"d.jsonl:1: column messages: the tokenizer has no chat template.*FILE.jinja"):
        load_document_splits(cfg.data, cfg.train, tokenizer("qwen"))


def test_text_files_as_whole_documents(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in (("a.txt", "one\n\ntwo\n"), ("b.md", "# three"), ("c.txt", " \n")):
        (folder / name).write_text(text)
    tok = tokenizer("qwen")

    def texts(**options: Any) -> list[str]:
        cfg = config(tmp_path, str(folder), "pt", **options)
        docs, _ = load_document_splits(cfg.data, cfg.train, tok, "pt")
        return [tok.decode(docs.read(i)[0][:-1]) for i in range(len(docs))]

    assert texts() == ["one", "two", "# three"]
    assert texts(sample_by="document") == ["one\n\ntwo\n", "# three"]
    cfg = config(tmp_path, str(folder), "pt", sample_by="document", streaming=True, shuffle=False)
    source, _ = build_train_and_eval_sources(cfg.data, cfg.train, tok, LoaderGeometry(per_device=2), "pt")
    rows = source.next()[0].input_ids
    assert tok.decode(rows[0][rows[0] != tok.pad_token_id]).startswith("one\n\ntwo\n")
    assert source.epoch == pytest.approx(1.0, abs=0.15)  # the blank file counts by its bytes


def test_a_template_that_writes_half_a_character_is_refused(tmp_path: Path) -> None:
    cfg, tok = made(tmp_path, [chat("q", "a")], PLAIN + "{{ '\\ud83d' }}", strict=True)
    with pytest.raises(DataError, match=r"an unpaired surrogate \(\\ud83d\) after rendering"):
        load_document_splits(cfg.data, cfg.train, tok)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_proposed_columns_are_ready_to_paste(tmp_path: Path, rows: int) -> None:
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", [{"q": "q", "answer": "a"}] * rows))
    with pytest.raises(DataError) as e:
        load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"))
    assert str(e.value).endswith("try: no valid row so far: --columns q=query answer=response")


def test_a_cell_of_many_levels_is_refused() -> None:
    with pytest.raises(RowError, match="nested too deep"):
        checked_conversation_sample(json.dumps([[]]).replace("[]", "[" * 500 + "]" * 500), "messages")


def test_texts_for_fine_tuning_are_trained_on_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens and labels are those of pretraining on the same file, and a line says so."""
    data = jsonl(tmp_path / "d.jsonl", [{"text": "one two"}, {"text": "three", "id": 1}])
    tok = tokenizer("llama", "llama3")
    made = {}
    for task in ("sft", "pt"):
        cfg = config(tmp_path, data, task)
        docs, _ = load_document_splits(cfg.data, cfg.train, tok, task)
        made[task] = [[part.tolist() for part in docs.read(i)] for i in range(len(docs))]
    assert made["sft"] == made["pt"] and len(made["sft"]) == 2
    said = capsys.readouterr().err
    assert said.count("2 rows of plain text, trained on whole and without the chat template") == 1
    cfg = config(tmp_path, data, system="s")
    with pytest.raises(DataError, match="--system cannot be applied"):
        load_document_splits(cfg.data, cfg.train, tok)
