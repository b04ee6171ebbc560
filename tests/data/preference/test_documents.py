"""Pairs and labeled answers: tokens and masks against TRL's own preparation, batches by hand, what is skipped, resume,
evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from trl import DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources, load_preference_splits
from megaswift.errors import DataError
from tests.data.makers import config, jsonl, tokenizer

S = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def pair(question: str, chosen: str, rejected: str, **more: Any) -> dict[str, Any]:
    return {"messages": [user(question), says(chosen)], "rejected_response": rejected, **more}


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CHATS = [
    {"prompt": [user("hello world")], "chosen": [says("The capital of France")], "rejected": [says("Paris.")]},
    {"prompt": [S, user("a"), says("b"), user("c")], "chosen": [says("d e f")], "rejected": [says("g")]},
    {"prompt": [user("日本語")], "chosen": [says("🙂🙂")], "rejected": [says("🙂")], "tools": json.dumps(TOOLS)},
]
WHOLE = [{"chosen": r["prompt"] + r["chosen"], "rejected": r["prompt"] + r["rejected"]} for r in CHATS[:2]]
# `hello` ` world`, but `hello` ` ` `z`...
PLAIN = [
    {"prompt": "The capital of", "chosen": " France is Paris", "rejected": " France"},
    {"prompt": "hello", "chosen": "world", "rejected": "worlds how are you<|im_end|>"},
    {"prompt": "hello ", "chosen": "world", "rejected": "zzz"},
]


def made(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    task: str = "dpo",
    kind: str = "qwen",
    name: str | None = "bare",
    **options: Any,
) -> Any:
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", rows), **options)
    return load_preference_splits(cfg.data, cfg.train, tokenizer(kind, name), task)[0]


def source(
    tmp_path: Path, rows: list[dict[str, Any]], geometry: LoaderGeometry, task: str = "dpo", **options: Any
) -> Any:
    prompt_labels = options.pop("prompt_labels", False)
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", rows), **{"shuffle": False, **options})
    return build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen", "bare"), geometry, task, prompt_labels)


def theirs(trainer: Any, rows: list[dict[str, Any]], tok: Any, batch: int = 1) -> list[dict[str, Any]]:
    """TRL's prepared rows."""
    args = SimpleNamespace(
        dataset_num_proc=None, max_length=None, truncation_mode="keep_start", per_device_train_batch_size=batch
    )
    me = SimpleNamespace(_tokenizer=tok, calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0)
    return list(trainer._prepare_dataset(me, datasets.Dataset.from_list(rows), tok, args, "train"))


@pytest.mark.parametrize(
    ("rows", "kind", "name"),
    [
        (CHATS[:2], "qwen", "bare"),
        (CHATS[2:], "qwen", "bare"),
        (WHOLE, "qwen", "bare"),
        (PLAIN, "qwen", "bare"),
        (PLAIN, "qwen", None),
        (PLAIN[:1], "llama", None),
        (PLAIN[:1], "mistral", None),
    ],
    ids=str,
)
def test_tokens_are_trls(tmp_path: Path, rows: list[dict[str, Any]], kind: str, name: str | None) -> None:
    ours = made(tmp_path, rows, kind=kind, name=name)
    expected = theirs(DPOTrainer, rows, tokenizer(kind, name))
    assert len(ours) == len(expected) == len(rows)
    for i, e in enumerate(expected):
        for side, answer in enumerate((e["chosen_ids"], e["rejected_ids"])):
            ids, mask = ours.docs.read(2 * i + side)
            assert ids.tolist() == e["prompt_ids"] + answer
            assert mask.tolist() == [0] * len(e["prompt_ids"]) + [1] * len(answer)


def test_the_text_s_own_beginning_stays(tmp_path: Path) -> None:
    """A tokenizer that puts a token before texts puts it before prompts, unless the prompt has it."""
    from tokenizers import processors

    tok = tokenizer("llama")
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", tok.convert_tokens_to_ids("<|begin_of_text|>"))],
    )
    rows = [*PLAIN[:1], {**PLAIN[0], "prompt": "<|begin_of_text|>The capital of"}]
    cfg = config(tmp_path, jsonl(tmp_path / "d.jsonl", rows))
    ours = load_preference_splits(cfg.data, cfg.train, tok, "dpo")[0]
    expected = theirs(DPOTrainer, rows[:1], tok)[0]
    for i in (0, 1):
        ids, mask = ours.docs.read(2 * i)
        assert ids.tolist() == expected["prompt_ids"] + expected["chosen_ids"] and mask.sum() == len(
            expected["chosen_ids"]
        )


def test_only_what_the_assistant_wrote_carries_loss_in_longer_completions(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "I add."}
    row = {
        "prompt": [user("add")],
        "chosen": [call, {"role": "tool", "content": "3"}, says("It is 3.")],
        "rejected": [says("no")],
    }
    ours, tok = made(tmp_path, [row]), tokenizer("qwen", "bare")
    ids, mask = ours.docs.read(0)
    runs = [tok.decode(part) for part in np.split(ids, np.flatnonzero(np.diff(mask)) + 1)]
    assert runs == [
        "<|im_start|>user\nadd<|im_end|><|im_start|>assistant\n",
        "I add.<|im_end|>",
        "<|im_start|>tool\n3<|im_end|><|im_start|>assistant\n",
        "It is 3.<|im_end|>",
    ]
    assert tok.decode(ours.docs.read(1)[0][ours.docs.read(1)[1] == 1]) == "no<|im_end|>"


def test_reasoning_on_one_side_only(tmp_path: Path) -> None:
    """Qwen3's template writes an empty thought before an answer without one: no loss on it, and no other prompt."""
    row = pair("q", "<think>\nwell\n</think>\n\nyes", "no")
    ours, tok = made(tmp_path, [row], name="qwen3"), tokenizer("qwen", "qwen3")
    said = [tok.decode(ids[mask == 1]) for ids, mask in map(ours.docs.read, (0, 1))]
    assert said == ["<think>\nwell\n</think>\n\nyes<|im_end|>", "no<|im_end|>"]


SEES_THE_END = (
    "{% for m in messages %}{{ '<|im_start|>' + (messages[-1].content | length | string) }}{% if m.role == 'assistant' "
    "%}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
USELESS = [
    (pair("q", "a", "a"), "identical completions"),
    (pair("q", "a", " "), "an empty completion"),
    (pair("q", "  a", "a "), "identical completions"),
    ({"chosen": [says("a")], "rejected": [says("b")]}, "no prompt"),
    ({"chosen": [user("x"), says("a")], "rejected": [user("y"), says("b")]}, "two prompts"),
]


def test_rows_of_no_use_stop_the_run_with_their_place(tmp_path: Path) -> None:
    for i, (row, _) in enumerate(USELESS):
        with pytest.raises(DataError, match=rf"(?s)d.jsonl:{i + 1}: (column|tokens:) .*--strict false"):
            made(tmp_path, [pair("q", f"{k}", "b") for k in range(i)] + [row], name="mistral", kind="mistral")


def test_or_are_skipped_and_counted_by_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row, _ in USELESS] + [
        pair("q", "a", "b"),
        pair("q", "a", "a"),
        {"messages": 3, "rejected_response": "x"},
    ]
    kept = made(tmp_path, rows, strict=False, kind="mistral", name="mistral")
    assert len(kept) == 1 and kept.docs.sample.tolist() == [0, 0]
    assert (
        "d.jsonl: 7 rows skipped: 1 malformed, 1 with an empty completion, 3 with identical completions, 1 with no "
        "prompt, 1 with two prompts (--strict false)"
    ) in capsys.readouterr().err
    with pytest.raises(DataError, match="no row is usable; 5 rows skipped"):
        made(tmp_path, rows[:5], strict=False, kind="mistral", name="mistral")


def test_a_template_whose_prompt_depends_on_the_answer_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="renders the prompt differently for the two completions, from token"):
        made(tmp_path, [pair("q", "a", "bcd")], chat_template=SEES_THE_END)


def test_a_conversation_needs_a_template_and_texts_do_not(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template; .*|--chat_template FILE"):
        made(tmp_path, [pair("q", "a", "b")], name=None)


def test_a_system_message_goes_into_both_conversations_and_into_no_text(tmp_path: Path) -> None:
    kept, tok = made(tmp_path, [pair("q", "a", "b")], system="be"), tokenizer("qwen", "bare")
    assert all(tok.decode(kept.docs.read(i)[0]).startswith("<|im_start|>system\nbe<|im_end|>") for i in (0, 1))
    with pytest.raises(DataError, match="--system cannot be applied"):
        made(tmp_path, PLAIN[:1], system="be")


LONG = [
    pair("q", "a", "b"),
    pair("q", "a " * 30, "b"),
    pair("word " * 40, "a", "b"),
    pair("q", "same " * 40 + "a", "same " * 40 + "b"),
]


def test_delete_takes_the_unit_when_one_side_is_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = made(tmp_path, LONG, max_length=40)
    assert kept.docs.sample.tolist() == [0, 0] and kept.docs.counted == {"rows": 4, "deleted": 3}
    assert "3 of 4 rows deleted (longer than --max_length 40)" in capsys.readouterr().err


def test_right_cuts_answers_and_left_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = made(tmp_path, LONG)
    right = made(tmp_path, LONG, max_length=40, truncation_strategy="right")
    assert right.docs.sample[::2].tolist() == [0, 1]
    assert right.docs.counted == {
        "rows": 4,
        "truncated": 3,
        "the completion truncated away": 1,
        "identical completions": 1,
    }
    assert right.docs.read(2)[0].tolist() == whole.docs.read(2)[0][:40].tolist()
    assert right.docs.read(3)[0].tolist() == whole.docs.read(3)[0].tolist()
    said = capsys.readouterr().err
    for part in (
        "3 of 4 rows truncated",
        "1 of 4 rows skipped with the completion truncated away",
        "1 of 4 rows skipped with ident",
    ):
        assert part in said
    left = made(tmp_path, LONG, max_length=40, truncation_strategy="left")
    assert left.docs.sample[::2].tolist() == [0, 2] and left.docs.counted == {
        "rows": 4,
        "truncated": 3,
        "the prompt truncated away": 2,
    }
    assert left.docs.read(2)[0].tolist() == whole.docs.read(4)[0][-40:].tolist()
    assert left.docs.labels.tolist() == [left.docs.read(i)[1][1:].sum() for i in range(4)]
    with pytest.raises(DataError, match=r"d.jsonl:2: \d+ tokens, --max_length is 40"):
        made(tmp_path, LONG, max_length=40, truncation_strategy="raise")
    with pytest.raises(DataError, match="none of 1 pairs remains"):
        made(tmp_path, LONG[1:2], max_length=9)


@pytest.mark.parametrize("side", ["right", "left"])
def test_truncation_is_that_of_trls_collator(tmp_path: Path, side: str) -> None:
    rows = [CHATS[0], {**CHATS[0], "chosen": [says("d e f " * 4)], "rejected": [says("hello " * 9)]}]
    size = int(made(tmp_path, rows).docs.length.max()) - 3
    kept = made(tmp_path, rows, max_length=size, truncation_strategy=side)
    assert len(kept) == 2 and kept.docs.counted["truncated"] == 1
    collator = DataCollatorForPreference(0, size, "keep_start" if side == "right" else "keep_end")
    batch = collator.torch_call(theirs(DPOTrainer, rows, tokenizer("qwen", "bare")))
    for i, row in enumerate((0, 2, 1, 3)):  # TRL: both chosen, then both rejected
        ids, mask = kept.docs.read(row)
        assert ids.tolist() == batch["input_ids"][i][batch["attention_mask"][i] == 1].tolist()
        assert mask.tolist() == batch["completion_mask"][i][: len(ids)].tolist()


def test_rows_of_a_data_set_are_units(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [pair(f"q{i}", "a", "b", margin=i) for i in range(3)])
    cfg = config(tmp_path, [f"{path}#5", path], split_dataset_ratio=0.5)
    train, held = load_preference_splits(cfg.data, cfg.train, tokenizer("qwen", "bare"), "dpo")
    assert held is not None and len(train) + len(held) == 8
    assert train.docs.sample[::2].tolist() == train.docs.sample[1::2].tolist()
    assert set(train.docs.sample.tolist()).isdisjoint(held.docs.sample.tolist())
    for part in (train, held):
        assert (part.docs.sample[::2] % 3).tolist() == part.values.tolist()


def test_margins_are_for_all_rows_or_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d.jsonl:2: 1 of 2 rows have no `margin`"):
        made(tmp_path, [pair("q", "a", "b", margin=1), pair("q", "a", "b")])


def test_stores_of_tasks_are_apart_and_know_their_labels(tmp_path: Path) -> None:
    row = {"messages": [user("q"), says("a")], "label": True}
    stores = [
        made(tmp_path, [row], "kto"),
        made(tmp_path, [{**row, "label": False}], "kto"),
        made(tmp_path, [pair("q", "a", "b")]),
        made(tmp_path, [pair("q", "a", "b", margin=1.0)]),
    ]
    assert len({s.docs.stores[0].folder for s in stores}) == 4
    assert len({s.docs.fingerprint for s in stores}) == 4
    assert [s.values.tolist() for s in stores[:2]] == [[1.0], [0.0]] and np.isnan(stores[2].values).all()
    cfg = config(tmp_path, str(tmp_path / "d.jsonl"))
    with pytest.raises(DataError, match="is for megaswift dpo.*not for sft"):
        build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen", "bare"), LoaderGeometry())
