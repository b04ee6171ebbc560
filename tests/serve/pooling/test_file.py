"""`megaswift infer` on a file of texts or pairs: labels, scores and vectors, in the order of the file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, pipeline

from megaswift.config import load_config
from megaswift.data.build import load_document_splits
from megaswift.errors import UserError
from megaswift.infer import main
from megaswift.options.files import CONFIG_HEADER
from tests.inference.pooling import folders
from tests.inference.pooling.folders import PAIRS, TEXTS
from tests.inference.pooling.test_model import opened
from tests.trainers.inputs import write_model

CLOSE = 2e-6


def inferred(folder: Path, rows: list[dict[str, Any]], tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tmp_path / "results.jsonl"
    assert main(["--model", str(folder), "--dataset", str(file), "--result_path", str(result), *words]) == 0
    return [json.loads(line) for line in result.read_text().splitlines()]


def test_labels_of_texts(tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "model", num_labels=3, id2label={0: "no", 1: "maybe", 2: "yes"})
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    found = inferred(folder, rows, tmp_path, "--batch_size", "2")
    theirs = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    assert [{k: row[k] for k in ("text", "id")} for row in found] == rows
    for row in found:
        wanted = {one["label"]: one["score"] for one in theirs(row["text"])[0]}
        assert row["probs"] == pytest.approx(wanted, abs=CLOSE) and row["label"] == max(wanted, key=wanted.__getitem__)
    talk = inferred_again(
        folder, [{"messages": [{"role": "user", "content": TEXTS[1]}]}, {"query": TEXTS[1]}], tmp_path
    )
    assert [row["probs"] for row in talk] == [found[1]["probs"]] * 2  # without a chat template: the text


def inferred_again(folder: Path, rows: list[dict[str, Any]], tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    again = tmp_path / f"again-{len(list(tmp_path.iterdir()))}"
    again.mkdir()
    return inferred(folder, rows, again, *words)


def test_several_labels_and_numbers(tmp_path: Path) -> None:
    several = folders.classifier(tmp_path / "several", num_labels=3, problem_type="multi_label_classification")
    (row,) = inferred_again(several, [{"text": "ab"}], tmp_path)
    assert row["label"] == [label for label, value in row["probs"].items() if value >= 0.5]
    numbers = folders.classifier(tmp_path / "numbers", num_labels=2, problem_type="regression")
    (row,) = inferred_again(numbers, [{"text": "ab"}], tmp_path)
    wanted = pipeline("text-classification", model=str(numbers), device="cpu", top_k=None)("ab")[0]
    assert row["scores"] == pytest.approx({one["label"]: one["score"] for one in wanted}, abs=CLOSE)


def test_vectors_of_texts_and_their_prompt(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    settings = {"prompts": {"query": "ask: "}, "default_prompt_name": "query"}
    folder = folders.sentence_model(tmp_path / "model", "mean", normalizes=True, **settings)
    texts = [*TEXTS, "abc " * 40]
    rows = [{"sentence": text} for text in texts]
    found = inferred(folder, rows, tmp_path, "--truncation_strategy", "right")
    wanted = SentenceTransformer(str(folder), device="cpu").encode(texts)
    assert np.abs(np.array([row["embedding"] for row in found]) - wanted).max() < CLOSE


def test_scores_of_pairs_and_of_conversations(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    folder = folders.decoder_classifier(tmp_path / "model")
    rows = [
        {"query": PAIRS[0][0], "documents": [PAIRS[0][1], PAIRS[1][1]]},
        {"question": PAIRS[2][0], "doc": PAIRS[2][1]},
    ]
    found = inferred(folder, rows, tmp_path, "--columns", "doc=document")
    wanted = CrossEncoder(str(folder), device="cpu").predict([list(pair) for pair in PAIRS]).tolist()
    assert found[0]["scores"] == pytest.approx(wanted[:2], abs=CLOSE)
    assert found[1]["score"] == pytest.approx(wanted[2], abs=CLOSE) and found[1]["doc"] == PAIRS[2][1]
    reward = folders.decoder_classifier(tmp_path / "reward", template=None)
    talks = [[{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": text}] for text in ("3", "zz")]
    scores = [row["score"] for row in inferred_again(reward, [{"messages": talk} for talk in talks], tmp_path)]
    assert scores[0] != scores[1] and not all(0 < score < 1 for score in scores)


@pytest.mark.parametrize("system", ["", "be quick"])
def test_a_classifier_reads_the_tokens_that_it_was_trained_on(system: str, tmp_path: Path) -> None:
    from megaswift.config import SwiftConfig
    from megaswift.data.encode.rows import encode_spec
    from megaswift.data.preference.encode import row_encoder_for_task
    from megaswift.data.sources.readers import LocatedRow
    from megaswift.inference.options.commands import PoolingOptions, PromptFileOptions
    from megaswift.serve.pooling.file import read_rows

    folder = folders.decoder_classifier(tmp_path / "model", labels=3, template=None)
    user = {"role": "user", "content": "1+2?"}
    rows = [
        {"messages": [user], "label": 0},
        {"messages": [user, {"role": "assistant", "content": "3"}], "label": 1},
        {"query": "ab", "label": 2},
    ]
    rows += [{"text": "plain", "label": 1}] if not system else []
    _, reader = opened(folder)
    data = SwiftConfig(task="seq_cls", num_labels=3, system=system or None).data
    encoder = row_encoder_for_task(encode_spec(data, reader.tokenizer, "seq_cls"))
    found = encoder.encode(("f", LocatedRow(i, row)) for i, row in enumerate(rows, 1))
    wanted = [part.tolist() for part in np.split(found.tokens, np.cumsum(found.lengths)[:-1])]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader.system = system
    read = read_rows(PromptFileOptions(dataset=(str(file),)), reader, PoolingOptions())
    assert [list(row.inputs[0].ids) for row in read] == wanted and not found.bad


def test_labels_of_tokens(tmp_path: Path) -> None:
    folder = folders.token_classifier(tmp_path / "model", num_labels=3)
    (row,) = inferred(folder, [{"text": TEXTS[0]}], tmp_path)
    wanted = pipeline("token-classification", model=str(folder), device="cpu", ignore_labels=[])(TEXTS[0])
    assert [(one["token"], one["label"]) for one in row["labels"]] == [(w["word"], w["entity"]) for w in wanted]
    assert [one["score"] for one in row["labels"]] == pytest.approx([w["score"] for w in wanted], abs=CLOSE)
    (words,) = inferred_again(folder, [{"tokens": ["what", "is", "it"]}], tmp_path)
    (text,) = inferred_again(folder, [{"text": "what is it"}], tmp_path)
    assert words["labels"] == text["labels"]


def test_typed_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folders.classifier(tmp_path / "model", num_labels=3, id2label={0: "no", 1: "maybe", 2: "yes"})
    monkeypatch.setattr(
        "sys.stdin", io.StringIO(f"{TEXTS[0]}\n\n{'abc ' * 40}\n{TEXTS[1]} \\\n{TEXTS[2]}\n/quit\nabc\n")
    )
    assert main(["--model", str(folder)]) == 0
    first, long, joined = capsys.readouterr().out.splitlines()
    theirs = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    for line, text in ((first, TEXTS[0]), (joined, f"{TEXTS[1]} \n{TEXTS[2]}")):
        wanted = {one["label"]: one["score"] for one in theirs(text)[0]}
        assert json.loads(line)["probs"] == pytest.approx(wanted, abs=CLOSE)
    assert long == "(an input has 161 tokens; the limit is 48)"


def test_rows_that_a_run_has_held_out(tmp_path: Path) -> None:
    """Those that are in none of its training documents; a run on pairs names no such rows."""
    run = tmp_path / "run"
    folder = folders.decoder_classifier(run / "hf", labels=2, template=None)
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"text": f"{i} + 1", "label": i % 2}) + "\n" for i in range(12)))
    words = ["--model", str(folder), "--dataset", str(data), "--split_dataset_ratio", "0.25", "--num_labels", "2"]
    cfg = load_config("seq_cls", words)
    (run / "config.yaml").write_text(f"{CONFIG_HEADER}\n{cfg.to_yaml()}")
    (run / "metrics.jsonl").touch()
    out = tmp_path / "out.jsonl"
    asked = ["--model", str(run), "--load_data_args", "true", "--result_path", str(out)]
    assert main(asked) == 0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    training, _ = load_document_splits(cfg.data, cfg.train, tokenizer, "seq_cls")
    learned = [tokenizer.decode(training.read(i)[0]) for i in range(len(training))]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 3 and not [row for row in rows if row["text"] in learned]
    assert [set(row["probs"]) for row in rows] == [{"LABEL_0", "LABEL_1"}] * 3
    pairs = load_config("reranker", [*words[:6]])
    (run / "config.yaml").write_text(f"{CONFIG_HEADER}\n{pairs.to_yaml()}")
    out.unlink()
    with pytest.raises(UserError, match="does not know the rows that a run of reranker held out"):
        main(asked)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"nothing": 1}, "rows.jsonl:1: "),
        ({"text": "abc " * 40}, "rows.jsonl:1: an input has 162 tokens; the limit is 48"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "rows.jsonl:1: "),
    ],
)
def test_rows_that_cannot_be_used(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = folders.classifier(tmp_path / "model", num_labels=2)
    with pytest.raises(UserError) as caught:
        inferred(folder, [row], tmp_path)
    assert words in str(caught.value)


def test_mistakes_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.classifier(tmp_path / "model", num_labels=2)
    with pytest.raises(UserError, match="gives no text .embedding.: it reads rows of files"):
        main(["--model", str(folders.bert(tmp_path / "vectors"))])
    words = ["--dataset", str(tmp_path / "rows.jsonl"), "--result_path", str(tmp_path / "out.jsonl")]
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match="several processes: are not supported"):
        main(["--model", str(folder), *words, "--nproc_per_node", "2"])
    with pytest.raises(UserError, match="--positive_token y: would be ignored"):
        main(["--model", str(folder), *words, "--positive_token", "y"])
    for given in (["--temperature", "0.5"], ["--logprobs"], ["--enable_thinking", "false"], ["--rope_scaling", "yarn"]):
        with pytest.raises(UserError, match=rf"{given[0]} .*: has no effect on a model that generates no text"):
            main(["--model", str(folder), *words, *given])
    language = write_model(tmp_path / "language")
    with pytest.raises(UserError, match="--pooling mean: applies to embeddings"):
        main(["--model", str(language), *words, "--pooling", "mean"])
