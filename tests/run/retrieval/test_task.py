"""Runs of embedding models and rerankers: what they export gives in sentence-transformers the numbers of their own
evaluation.

Covers: megaswift/run/retrieval/texts.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoModel

from megaswift.config import SwiftConfig
from megaswift.data.groups.documents import GroupDataset
from megaswift.errors import ConfigError
from megaswift.run.retrieval.task import refuse_nothing_to_compare, refuse_wide_matryoshka
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_model
from tests.trainers.runs import run

pytestmark = pytest.mark.process
SLOW = pytest.mark.slow
ROWS = [
    {"anchor": f"{a} + {b} = ?", "positive": f"{a + b}", "negative": [f"{a + b + 1}", f"{a * b + 50} no"]}
    for a in range(2, 6)
    for b in range(3, 7)
]
TRAIN = ("--max_steps", 2, "--per_device_train_batch_size", 2, "--learning_rate", 0.003, "--max_length", 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ whose tokenizer ends each text with a token, and rows."""
    made = tmp_path_factory.mktemp("retrieval")
    model = write_model(made / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    end = next(token for token in tokenizer["added_tokens"] if token["content"] == "<e>")
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<e>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<e>": {"id": "<e>", "ids": [end["id"]], "tokens": ["<e>"]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    scored = [{"sentence1": row["anchor"], "sentence2": row["positive"], "score": i / 16} for i, row in enumerate(ROWS)]
    (made / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    return made


def evaluated(
    folder: Path, out: Path, *options: object, task: str = "embedding", rows: str = "rows", ranks: int = 1
) -> dict[str, Any]:
    """The last line of a run's evaluations."""
    model = [] if "--model" in options else ["--model", str(folder / "model")]
    data = [word for flag in ("--dataset", "--val_dataset") for word in (flag, str(folder / f"{rows}.jsonl"))]
    cache = ["--dataset_cache_dir", str(folder / "cache")]
    run([*model, *data, *cache], out, *TRAIN, *options, task=task, ranks=ranks)
    return read_lines(out / "eval.jsonl")[-1]


def unit(vectors: Any) -> np.ndarray:
    """The vectors with length 1."""
    array = np.asarray(vectors, dtype=np.float64)
    return array / np.linalg.norm(array, axis=-1, keepdims=True)


def mean_positive(model: SentenceTransformer, query: str = "", document: str = "") -> float:
    """The mean cosine of queries and their positives."""
    queries = unit(model.encode([query + row["anchor"] for row in ROWS]))
    documents = unit(model.encode([document + str(row["positive"]) for row in ROWS]))
    return float((queries * documents).sum(1).mean())


LAYOUTS: list[Any] = [
    (("--tp", 2), 2),
    (("--engine", "fsdp2"), 2),
    *(
        pytest.param(options, ranks, marks=SLOW)
        for options, ranks in (
            ((), 1),
            (("--pp", 2), 2),
            (("--cp", 2), 2),
            ((), 2),
            (("--packing", "false"), 2),
            (("--engine", "ddp"), 2),
            (("--engine", "zero3"), 2),
            (("--pooling", "mean", "--matryoshka_dims", 8, 32), 1),
        )
    ),
]


@pytest.mark.parametrize(("options", "ranks"), LAYOUTS)
def test_an_export_gives_the_vectors_of_the_evaluation(
    options: Sequence[object], ranks: int, folder: Path, tmp_path: Path
) -> None:
    prompts = ("--query_prompt", "ask ", "--document_prompt", "say ")
    line = evaluated(folder, tmp_path / "out", *options, *prompts, ranks=ranks)
    model = SentenceTransformer(str(tmp_path / "out" / "hf"), device="cpu")
    assert model.prompts == {"query": "ask ", "document": "say "}
    assert line["mean_pos"] == pytest.approx(mean_positive(model, "ask ", "say "), abs=1e-6)
    assert line["mean_pos"] != pytest.approx(mean_positive(model), abs=1e-4)
    by_name = model.encode(ROWS[0]["anchor"], prompt_name="query")
    np.testing.assert_allclose(by_name, model.encode("ask " + str(ROWS[0]["anchor"])), atol=1e-6)
    assert np.linalg.norm(by_name) == pytest.approx(1, abs=1e-6)
    config = json.loads((tmp_path / "out" / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"]


@pytest.mark.parametrize(
    "options",
    [
        ("--engine", "ddp"),
        pytest.param((), marks=SLOW),
        pytest.param(("--pooling", "mean"), marks=SLOW),
    ],
)
def test_adapters(options: Sequence[object], folder: Path, tmp_path: Path) -> None:
    """The adapter folder over its base, and the merged export."""
    out = tmp_path / "out"
    lora = ("--train_type", "lora", "--lora_rank", 4, "--merge_lora", "true")
    line = evaluated(folder, out, *lora, *options)
    before = mean_positive(SentenceTransformer(str(out / "hf"), device="cpu"))
    assert line["mean_pos"] == pytest.approx(before, abs=1e-6)
    over_base = mean_positive(SentenceTransformer(str(out / "adapter"), device="cpu"))
    assert line["mean_pos"] == pytest.approx(over_base, abs=1e-6)
    base = AutoModel.from_pretrained(folder / "model")
    ids = torch.tensor([[4, 5, 6, 1]])
    without = base(ids).last_hidden_state
    adapted = PeftModel.from_pretrained(base, str(out / "adapter"))
    merged = AutoModel.from_pretrained(out / "hf")(ids).last_hidden_state
    torch.testing.assert_close(adapted(ids).last_hidden_state, merged, rtol=1e-4, atol=1e-5)
    assert (merged - without).abs().max() > 1e-3


@pytest.mark.parametrize("options", [(), pytest.param(("--engine", "ddp"), marks=SLOW)])
def test_a_folder_of_sentence_transformers_is_gone_on_from(
    options: Sequence[object], folder: Path, tmp_path: Path
) -> None:
    """Weights without a prefix, mean pooling and prompts are the folder's; of labeled pairs the prompts are left
    out."""
    transformer = Transformer(str(folder / "model"))
    began = SentenceTransformer(modules=[transformer, Pooling(32, "mean")], device="cpu")
    began.prompts = {"query": "ask ", "passage": "say "}
    began.save(str(tmp_path / "model"), create_model_card=False)
    (tmp_path / "model" / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')  # plain texts, no chat
    began = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    still = ("--model", str(tmp_path / "model"), "--learning_rate", 1e-12, *options)
    line = evaluated(folder, tmp_path / "out", *still)
    assert line["mean_pos"] == pytest.approx(mean_positive(began, "ask ", "say "), abs=1e-6)
    exported = SentenceTransformer(str(tmp_path / "out" / "hf"), device="cpu")
    assert exported.prompts == began.prompts and len(exported) == 2
    np.testing.assert_allclose(exported.encode("ask 1"), began.encode("ask 1"), atol=1e-6)
    line = evaluated(folder, tmp_path / "graded", *still, "--loss_type", "cosine_similarity", rows="scored")
    cosines = (unit(began.encode([r["anchor"] for r in ROWS])) * unit(began.encode([r["positive"] for r in ROWS]))).sum(
        1
    )
    assert line["loss"] == pytest.approx(float(((cosines - np.arange(16) / 16) ** 2).mean()), abs=1e-6)
    assert line["pearson_cosine"] == pytest.approx(float(np.corrcoef(cosines, np.arange(16))[0, 1]), abs=1e-5)


REFUSED: list[Any] = [
    ({"loss_type": ["infonce"]}, 2, 1, "nothing to compare a positive with: rows have no negatives, and a micro-batch"),
    ({"infonce_use_batch": False}, 2, 8, "infonce_use_batch is false"),
    ({"task": "reranker", "loss_type": ["listwise_reranker"]}, 1, 8, "compares the documents of a row"),
]


@pytest.mark.parametrize(("options", "width", "per_device", "words"), REFUSED)
def test_losses_without_meaning_are_refused(options: dict[str, Any], width: int, per_device: int, words: str) -> None:
    cfg = SwiftConfig(**{"task": "embedding", "per_device_train_batch_size": per_device, **options})
    for enough in (False, True):
        groups: Any = SimpleNamespace(width=width + enough)
        rows = GroupDataset(groups, True, width + enough)
        plan: Any = SimpleNamespace(cfg=cfg, layout=SimpleNamespace(dp=1))
        data: Any = SimpleNamespace(source=SimpleNamespace(data=rows))
        if enough:
            refuse_nothing_to_compare(plan, data)
            continue
        with pytest.raises(ConfigError, match=words):
            refuse_nothing_to_compare(plan, data)


def test_a_width_beyond_the_model_s_is_refused() -> None:
    cfg = SwiftConfig(task="embedding", matryoshka_dims=[8, 64])
    plan: Any = SimpleNamespace(cfg=cfg, spec=SimpleNamespace(hidden_size=32))
    with pytest.raises(ConfigError, match="is wider than the model's embeddings, which have 32"):
        refuse_wide_matryoshka(plan)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("generative_reranker", ("--loss_type", "listwise_reranker", "--positive_token", "y", "--negative_token", "n")),
        ("reranker", ("--engine", "ddp")),
        pytest.param("reranker", ("--loss_type", "listnet_reranker"), marks=SLOW),
    ],
)
def test_a_reranker_s_export_gives_the_scores_of_the_evaluation(
    task: str, options: Sequence[object], folder: Path, tmp_path: Path
) -> None:
    """Losses and rankings of the evaluation, from the scores of a CrossEncoder."""
    template = ("--reranker_template", "{instruction} ? {query} ? {document} = ", "--reranker_instruction", "judge it")
    line = evaluated(folder, tmp_path / "out", *options, *template, task=task)
    model = CrossEncoder(str(tmp_path / "out" / "hf"), device="cpu")
    pairs = [(row["anchor"], text) for row in ROWS for text in (row["positive"], *row["negative"])]
    scores = torch.from_numpy(model.predict(pairs, activation_fn=torch.nn.Identity())).double().view(len(ROWS), 3)
    places = 1 + (scores[:, 1:] >= scores[:, :1]).sum(1)
    assert line["mrr"] == pytest.approx(float((1 / places).mean()), abs=1e-6)
    relevant = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand_as(scores)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(scores, relevant)
    if "listwise_reranker" in options:
        expected = -scores.log_softmax(1)[:, 0].mean()
    elif "listnet_reranker" in options:
        expected = -(relevant.softmax(1) * scores.log_softmax(1)).sum(1).mean()
    assert line["loss"] == pytest.approx(float(expected), abs=1e-5)
