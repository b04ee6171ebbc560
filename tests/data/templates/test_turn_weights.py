"""Loss weights of parts of an answer, from rows to batches.

Covers: megaswift/data/templates/turn_weights.py, megaswift/data/templates/message_loss.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources
from megaswift.data.encode.rows import RowEncoder, encode_spec
from megaswift.data.options.loss_scale import parse_loss_scale
from megaswift.data.preference.encode import PreferenceEncoder
from megaswift.data.show.loss_mask import LossMaskCertifier
from megaswift.data.sources.readers import LocatedRow
from megaswift.data.templates.turn_weights import TurnWeights
from megaswift.data.tokenization import tokenize_datasets
from megaswift.data.untokenized_sample import RowError
from tests.data.makers import config, jsonl, tokenizer

CALL = '<tool_call>\n{"name": "add"}\n</tool_call>'
WEIGHED = [
    ("default", "abc", "q", [("abc", 1)]),
    ("hermes", f"a{CALL}b{CALL}", "q", [("a", 1), (CALL, 2), ("b", 1), (CALL, 2)]),
    (
        "react",
        "Thought: t\nAction: a\nAction Input: i\nObservation: o\nFinal Answer: f",
        "q",
        [("Thought: t\n", 1), ("Action: a\nAction Input: i\nObservation:", 2), ("Final Answer: f", 1)],
    ),
    ("ignore_empty_think", "<think>\n\n</think>\n\nyes", "q", [("yes", 1)]),
    ("ignore_empty_think", "<think>\nso\n</think>\n\nyes", "q", [("<think>\nso\n</think>\n\nyes", 1)]),
    ("ignore_empty_think", "no<think>\n\n</think>\n\nyes", "q", [("no<think>\n\n</think>\n\nyes", 1)]),
    ("hermes+ignore_empty_think", f"<think></think>{CALL}.", "q", [(CALL, 2), (".", 1)]),
    ("react+hermes", f"Action: {CALL}", "q", [("Action: ", 2), (CALL, 4)]),
    ("agentflan", "seven", "What is the value of x?", [("seven", 3)]),
    ("agentflan", "Arguments: 7", "Hello", [("Arguments:", 1), (" 7", 3)]),
]


@pytest.mark.parametrize(("scale", "answer", "question", "parts"), WEIGHED)
def test_parts_by_hand(scale: str, answer: str, question: str, parts: list[tuple[str, float]]) -> None:
    """The end of a turn has weight 1 whatever its last part has."""
    weights = TurnWeights(parse_loss_scale(scale).tables, ["<|im_end|>", "<|endoftext|>"])
    text = f"<|im_start|>{answer}<|im_end|>\n"
    spans = weights.spans(text, 12, len(text), question)
    made: list[tuple[str, float]] = []
    for a, b, weight in spans:
        if made and made[-1][1] == weight and text.startswith(made[-1][0], a - len(made[-1][0])):
            made[-1] = (made[-1][0] + text[a:b], weight)
        else:
            made.append((text[a:b], weight))
    last, weight = parts[-1]
    end = "<|im_end|>\n"
    assert made == ([*parts[:-1], (last + end, 1)] if weight == 1 else [*parts, (end, 1)])


def test_text_after_an_observation_has_no_loss_but_the_end_of_the_turn_has() -> None:
    weights = TurnWeights(parse_loss_scale("react").tables, ["</s>"])
    text = "Observation: o</s>"
    assert weights.spans(text, 0, len(text), "") == [(0, 12, 2.0), (14, 18, 1.0)]


def row(answer: str, first: str = "fine") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "How are you?"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": answer},
        ]
    }


@pytest.mark.parametrize(("kind", "name"), [("qwen", "qwen2_5"), ("mistral", "mistral"), ("qwen", "qwen3_training")])
def test_weights_of_tokens(kind: str, name: str) -> None:
    """By the characters that a token comes from, for tokenizers that are cut into pieces and those that are not, and
    templates with and without generation marks."""
    tok = tokenizer(kind, name)
    encoder = RowEncoder(encode_spec(config(Path("/tmp"), "x", loss_scale="last_round+hermes").data, tok, "sft"))
    rendered = encoder.render(row(f"I add. {CALL} done"))
    ids, weights = next(encoder.tokenize([rendered]))
    assert weights.dtype == np.float32
    encoding = encoder._tokenizer.encode(rendered.text, add_special_tokens=False)
    assert encoding.ids == ids.tolist()
    begin = rendered.text.index(CALL)
    end, turn = begin + len(CALL), rendered.text.index("I add.")
    if name == "qwen3_training":  # generates the reasoning's tags too
        turn = rendered.text.rindex("<think>")
    for (a, b), weight in zip(encoding.offsets, weights.tolist(), strict=True):
        if b <= turn:
            assert weight == 0
        elif begin <= a and b <= end:
            assert weight == 2
        elif turn <= a and (b <= begin or a >= end) and rendered.text[a:b].strip():
            assert weight == 1
    assert {0.0, 1.0, 2.0} == set(weights.tolist())


OWN: list[tuple[str, dict[str, Any], list[tuple[str, float]]]] = [
    ("hermes", {}, [("fine", 1), ("so ", 1), (CALL, 2), ("<|im_end|>", 1)]),
    ("hermes", {"loss_scale": 1}, [("fine", 1), (f"so {CALL}<|im_end|>", 1)]),
    ("hermes", {"loss_scale": 1.0, "loss": True}, [("fine", 1), (f"so {CALL}<|im_end|>", 1)]),
    ("hermes", {"loss_scale": 1, "loss": False}, [("fine", 1)]),
    ("hermes", {"loss_scale": 0}, [("fine", 1)]),
    ("last_round+hermes", {"loss_scale": 1}, [(f"so {CALL}<|im_end|>", 1)]),
    ("default", {"loss_scale": 1}, [("fine", 1), (f"so {CALL}<|im_end|>", 1)]),
]


@pytest.mark.parametrize(("scale", "own", "parts"), OWN)
def test_a_message_s_own_weight_goes_before_the_tables(
    scale: str, own: dict[str, Any], parts: list[tuple[str, float]]
) -> None:
    """As in ms-swift 4.6: the message has its `loss_scale` throughout, where `loss` or the turns include it."""
    spec = encode_spec(config(Path("/tmp"), "x", loss_scale=scale).data, tokenizer("qwen", "qwen2_5"), "sft")
    talk = row(f"so {CALL}")
    talk["messages"][3] |= own
    rendered = RowEncoder(spec).render(talk)
    spans = [rendered.text[a:b].removesuffix("\n") for a, b in rendered.spans]
    found = list(zip(spans, rendered.weights or (1.0,) * len(spans), strict=True))
    assert [(text.removesuffix("<|im_end|>") if text == "fine<|im_end|>" else text, w) for text, w in found] == parts
    assert not LossMaskCertifier(spec).certify([("f", LocatedRow(1, talk))]).faults


def test_an_own_weight_does_not_include_an_earlier_turn() -> None:
    """Under `last_round`, `loss` does; the weight of an included turn is its own."""
    spec = encode_spec(
        config(Path("/tmp"), "x", loss_scale="last_round+ignore_empty_think").data, tokenizer("qwen", "qwen2_5"), "sft"
    )
    for own, count in (({"loss_scale": 1}, 0), ({"loss_scale": 1, "loss": True}, 1)):
        talk = row("yes", "<think>\n\n</think>\n\nno")
        talk["messages"][1] |= own
        rendered = RowEncoder(spec).render(talk)
        spans = [rendered.text[a:b] for a, b in rendered.spans]
        assert sum(span.startswith("<think>") for span in spans) == count and len(spans) == 1 + count


def test_pairs_keep_own_weights() -> None:
    """Of the completions; what the answers share carries no loss."""
    spec = encode_spec(config(Path("/tmp"), "x", loss_scale="hermes").data, tokenizer("qwen", "qwen2_5"), "dpo")
    talk = row(CALL)
    talk["messages"][3] |= {"loss_scale": 1}
    encoder = PreferenceEncoder(spec)
    (unit,) = encoder.read([("f", LocatedRow(1, talk | {"rejected_response": f"{CALL}!"}))])
    assert not isinstance(unit, RowError)
    chosen, rejected = (set(weights.tolist()) for _, weights in unit.sides)
    assert chosen == {0.0, 1.0} and rejected == {0.0, 1.0, 2.0}


def test_weights_of_0_and_1_need_no_floats() -> None:
    tok = tokenizer("qwen", "qwen3")
    encoder = RowEncoder(encode_spec(config(Path("/tmp"), "x", loss_scale="ignore_empty_think").data, tok, "sft"))
    _, mask = next(encoder.tokenize([encoder.render(row("x"))]))
    assert mask.dtype == np.uint8 and mask.any()


@pytest.mark.process
def test_stored_by_worker_processes_and_batched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaswift.data.tokenization.WORKER_BYTES", 1)
    own = tmp_path / "w.json"
    own.write_text(json.dumps({"done": [0.5]}))
    path = jsonl(tmp_path / "d.jsonl", [row(f"{'word ' * (i % 7)}{CALL} done") for i in range(600)])
    tok, scale = tokenizer("qwen", "qwen2_5"), f"hermes+{own}"
    stores = [
        tokenize_datasets(config(tmp_path / str(n), path, loss_scale=scale, dataset_num_proc=n).data, tok)[0][1]
        for n in (1, 2)
    ]
    one, two = (store.folder for store in stores)
    for name in ("tokens.bin", "mask.bin", "rows.npy", "labels.npy"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert {0.0, 0.5, 1.0, 2.0} <= set(np.unique(stores[0].mask).tolist())
    for i in range(0, 600, 97):
        assert stores[0].labels[i] == np.count_nonzero(stores[0].row(i)[1][1:])
    for options in ({}, {"packing": True}, {"streaming": True, "max_steps": 2}):
        cfg = config(tmp_path, path, loss_scale=scale, shuffle=False, max_length=512, **options)
        source, _ = build_train_and_eval_sources(cfg.data, cfg.train, tok, LoaderGeometry(per_device=4), "sft")
        (batch,) = source.next()
        assert {0.0, 0.5, 1.0, 2.0} <= set(batch.loss_weights.unique().tolist()), options


def test_another_file_of_the_same_name_is_another_cache(tmp_path: Path) -> None:
    path, own = jsonl(tmp_path / "d.jsonl", [row("done")]), tmp_path / "w.json"
    folders = []
    for weight in (0.5, 0.25, 0.5):
        own.write_text(json.dumps({"done": [weight]}))
        data = config(tmp_path, path, loss_scale=str(own)).data
        folders.append(tokenize_datasets(data, tokenizer("qwen", "qwen2_5"))[0][1].folder)
    assert folders[0] != folders[1] and folders[0] == folders[2]
