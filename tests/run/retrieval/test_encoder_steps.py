"""Encoders as embedding models and rerankers, beside sentence-transformers: five steps of its own models and losses on
the joined batch of all ranks, and what the run exports.

Covers: megaswift/run/checks/encoders.py, megaswift/data/encode/encoder_text.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.cross_encoder import losses as pair_losses
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoModel, AutoModelForSequenceClassification, pipeline

from megaswift import infer
from megaswift.trainers.hooks.metrics import read_lines
from tests.encoder_folders import WORDS, write_encoder, write_rows
from tests.trainers.runs import run
from tests.trainers.test_trajectories_trl import ALIKE, BATCH, RATE, SPREAD, STEPS, assert_same

pytestmark = pytest.mark.process
SLOW = pytest.mark.slow
ROWS = STEPS * BATCH
PROMPTS = {"query": "who is the ", "document": "the book "}


def words(i: int, count: int) -> str:
    return " ".join(WORDS[(i * 5 + 3 * j) % len(WORDS)] for j in range(count))


def row_of(i: int) -> dict[str, Any]:
    """A query with a positive and two negatives, some of them longer than a model reads."""
    negatives = [words(i + 2, 3 + (5 * i) % 40), words(i + 3, 2 + i % 7)]
    return {"query": words(i, 2 + i % 9), "positive": words(i + 1, 1 + (7 * i) % 30), "negative": negatives}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("encoders")
    write_rows(made / "rows.jsonl", [row_of(i) for i in range(ROWS)])
    for kind in ("bert", "xlm-roberta", "modernbert"):
        write_encoder(made / kind, kind)
        write_encoder(made / f"{kind}-pairs", kind, "AutoModelForSequenceClassification", num_labels=1)
    # as bge and e5 are published
    cls = [Transformer(str(made / "xlm-roberta")), Pooling(32, "cls"), Normalize()]
    published = SentenceTransformer(modules=cls, device="cpu", prompts=PROMPTS)
    published.save(str(made / "published"), create_model_card=False)
    return made


def ours(
    folder: Path, model: str, out: Path, *options: object, task: str = "embedding", data: str = "rows"
) -> list[tuple[float, float]]:
    """The run's curve."""
    usual = [] if "--per_device_train_batch_size" in options else ["--per_device_train_batch_size", str(BATCH)]
    rows = str(folder / f"{data}.jsonl")
    inputs = ["--model", str(folder / model), "--dataset", rows, "--val_dataset", rows, *usual]
    inputs += ["--dataset_cache_dir", str(folder / "cache")]
    pairs = zip(ALIKE[::2], ALIKE[1::2], strict=True)
    given = {*options, "--export_hf"}
    alike = [word for name, value in pairs if name not in given for word in (name, value)]
    run(inputs, out, *alike, "--export_hf", "true", *options, task=task, ranks=2 if "--engine" in options else 1)
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


def stepped(model: Any, losses_of_steps: Sequence[Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, by torch's AdamW with the run's settings."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), eps=1e-6, weight_decay=0)
    curve = []
    for loss_of_step in losses_of_steps:
        loss = loss_of_step()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append((float(loss.detach()), float(norm)))
    return curve


def of_embeddings(model: SentenceTransformer, prompts: dict[str, str]) -> list[tuple[float, float]]:
    loss = losses.MultipleNegativesRankingLoss(model, scale=10.0)

    def step(k: int) -> Any:
        rows = [row_of(i) for i in range(k * BATCH, (k + 1) * BATCH)]
        query, document = prompts.get("query", ""), prompts.get("document", "")
        columns = [[query + row["query"] for row in rows], [document + row["positive"] for row in rows]]
        columns += [[document + row["negative"][n] for row in rows] for n in range(2)]
        return loss([model.preprocess(texts) for texts in columns], None)

    return stepped(model, [lambda k=k: step(k) for k in range(STEPS)])


CASES: list[Any] = [
    ("bert", "bert", {}, ("--engine", "ddp", *SPREAD)),
    ("published", "published", PROMPTS, ()),
    *(
        pytest.param(*case, marks=SLOW)
        for case in (
            ("bert", "bert", {}, ("--engine", "zero3", *SPREAD)),
            ("modernbert", "modernbert", {}, ("--engine", "fsdp2", *SPREAD)),
            ("xlm-roberta", "xlm-roberta", {}, ("--engine", "zero2", *SPREAD)),
            ("published", "published", PROMPTS, ("--engine", "fsdp2", *SPREAD)),
        )
    ),
]


@pytest.mark.parametrize(("model", "oracle", "prompts", "options"), CASES)
def test_embeddings_beside_sentence_transformers(
    model: str, oracle: str, prompts: dict[str, str], options: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    """Mean pooling where the folder says nothing, else its pooling and prompts; the pooler is left as it was."""
    theirs = SentenceTransformer(str(folder / oracle), device="cpu")
    assert theirs[1].pooling_mode == ("cls" if prompts else "mean")
    wanted = of_embeddings(theirs, prompts)
    assert_same(ours(folder, model, tmp_path / "out", *options), wanted)

    exported = SentenceTransformer(str(tmp_path / "out/hf"), device="cpu")
    texts = [row_of(i)["positive"] for i in range(ROWS)]
    got, trained = (m.encode(texts, normalize_embeddings=True) for m in (exported, theirs))
    np.testing.assert_allclose(got, trained, atol=2e-4)
    assert exported.prompts.get("query", "") == prompts.get("query", "")
    assert exported.max_seq_length == 32
    # The run's own evaluation is of the same vectors as the export's.
    last = read_lines(tmp_path / "out/eval.jsonl")[-1]
    queries = exported.encode([prompts.get("query", "") + row_of(i)["query"] for i in range(ROWS)])
    documents = exported.encode([prompts.get("document", "") + text for text in texts])
    cosine = torch.nn.functional.cosine_similarity(torch.tensor(queries), torch.tensor(documents)).mean()
    assert last["mean_pos"] == pytest.approx(float(cosine), abs=1e-6)


def of_pairs(model: CrossEncoder) -> list[tuple[float, float]]:
    loss = pair_losses.BinaryCrossEntropyLoss(model)

    def step(k: int) -> Any:
        rows = [row_of(i) for i in range(k * BATCH, (k + 1) * BATCH)]
        queries = [row["query"] for row in rows for _ in range(3)]
        documents = [text for row in rows for text in (row["positive"], *row["negative"])]
        return loss([queries, documents], torch.tensor([1.0, 0.0, 0.0] * BATCH))

    return stepped(model, [lambda k=k: step(k) for k in range(STEPS)])


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("bert", ("--engine", "fsdp2", *SPREAD)),
        pytest.param("xlm-roberta", ("--engine", "ddp", *SPREAD), marks=SLOW),
        pytest.param("modernbert", ("--engine", "zero3", *SPREAD), marks=SLOW),
        pytest.param("xlm-roberta", (), marks=SLOW),
    ],
)
def test_rerankers_beside_sentence_transformers(
    model: str, options: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    theirs = CrossEncoder(str(folder / f"{model}-pairs"), device="cpu")
    wanted = of_pairs(theirs)
    assert_same(ours(folder, f"{model}-pairs", tmp_path / "out", *options, task="reranker"), wanted)

    exported = CrossEncoder(str(tmp_path / "out/hf"), device="cpu")
    pairs = [(row_of(i)["query"], row_of(i)["negative"][0]) for i in range(ROWS)]
    np.testing.assert_allclose(exported.predict(pairs), theirs.predict(pairs), atol=2e-4)
    # The same scores by transformers, before the sigmoid that CrossEncoder takes by default.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/hf").eval()
    encoded = exported.tokenizer(
        *map(list, zip(*pairs, strict=True)), padding=True, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        scores = plain(**encoded).logits[:, 0].sigmoid()
    np.testing.assert_allclose(exported.predict(pairs), scores.numpy(), atol=1e-6)


def inferred(model: Sequence[object], rows: list[dict[str, Any]], tmp_path: Path) -> list[Any]:
    """The numbers that megaswift infer gives for each row."""
    write_rows(tmp_path / "asked.jsonl", rows)
    answers = tmp_path / f"answers-{len(model)}.jsonl"
    command = ["--model", *map(str, model), "--dataset", str(tmp_path / "asked.jsonl")]
    assert infer.main([*command, "--result_path", str(answers)]) == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    return [
        line.get("embedding")
        or line.get("scores")
        or (list(line["probs"].values()) if "probs" in line else [one["score"] for one in line["labels"]])
        for line in lines
    ]


def answers_of_transformers(folder: Path, task: str, rows: list[dict[str, Any]]) -> list[Any]:
    """The same by sentence-transformers and by transformers' pipelines."""
    if task == "embedding":
        return list(SentenceTransformer(str(folder), device="cpu").encode([row["text"] for row in rows]))
    if task == "reranker":
        scorer = CrossEncoder(str(folder), device="cpu")
        return [scorer.predict([(row["query"], document) for document in row["documents"]]) for row in rows]
    if task == "token_cls":
        tagger = pipeline("token-classification", model=str(folder), device="cpu", ignore_labels=[])
        return [[one["score"] for one in tagger(" ".join(row["tokens"]))] for row in rows]
    labeler = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    found = [labeler({"text": row["text"], "text_pair": row["text_pair"]}) for row in rows]
    return [[one["score"] for one in sorted(scores, key=lambda one: one["label"])] for scores in found]


@pytest.mark.parametrize(
    ("model", "task", "options"),
    [
        ("bert", "seq_cls", ("--engine", "ddp")),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                ("bert", "embedding", ("--engine", "fsdp2")),
                ("modernbert", "embedding", ()),
                ("xlm-roberta", "reranker", ("--engine", "zero3")),
                ("modernbert", "seq_cls", ()),
                ("bert", "token_cls", ()),
                ("distilbert", "seq_cls", ("--engine", "fsdp2")),
            )
        ),
    ],
)
def test_adapters(model: str, task: str, options: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """New ones on an encoder as it was pretrained, whose head is drawn from the seed and trains whole. PEFT's model
    over the base, and the merged one, give the same; and a run that goes on from a checkpoint the same steps."""
    if not (folder / model).is_dir():
        write_encoder(folder / model, model)
    labels = [{"text": words(i, 4), "text_pair": words(i + 1, 3), "label": "abc"[i % 3]} for i in range(ROWS)]
    tags = [{"tokens": words(i, 5).split(), "tags": list("OBBOO")} for i in range(ROWS)]
    data = {"seq_cls": "labels", "token_cls": "tags"}.get(task, "rows")
    write_rows(folder / "labels.jsonl", labels)
    write_rows(folder / "tags.jsonl", tags)
    new = ("--train_type", "lora", "--lora_rank", 4, "--merge_lora", "true", "--save_steps", 2, *options)
    spread = SPREAD if options else ()
    out = tmp_path / "out"
    whole = ours(folder, model, out, *new, *spread, task=task, data=data)
    step = out / "checkpoints/step-2"
    again = ours(
        folder, model, tmp_path / "again", *new, *spread, "--resume_from_checkpoint", step, task=task, data=data
    )
    assert again == whole[2:] and whole[-1] != whole[0]

    import transformers

    head = {"embedding": "", "token_cls": "ForTokenClassification"}.get(task, "ForSequenceClassification")
    auto: Any = getattr(transformers, f"AutoModel{head}")
    merged, told = auto.from_pretrained(out / "hf", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    known = {} if task == "embedding" else {"num_labels": merged.config.num_labels}
    adapted = PeftModel.from_pretrained(auto.from_pretrained(folder / model, **known), str(out / "adapter"))
    started = auto.from_pretrained(folder / model, **known)
    ids = torch.tensor([[2, 40, 41, 44, 3]])
    with torch.no_grad():
        want, got, before = (m.eval()(ids)[0] for m in (adapted, merged, started))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert (got - before).abs().max() > 1e-3
    asked = {
        "seq_cls": [{"text": words(i, 2), "text_pair": words(i + 1, 2)} for i in range(4)],
        "token_cls": [{"tokens": words(i, 5).split()} for i in range(4)],
        "embedding": [{"text": words(i, 1 + i)} for i in range(4)],
        "reranker": [{"query": words(i, 4), "documents": [words(i + 1, 1), words(i, 2)]} for i in range(4)],
    }[task]
    want = answers_of_transformers(out / "hf", task, asked)
    for named in ([out / "hf"], [folder / model, "--adapters", out / "adapter"]):
        found = inferred(named, asked, tmp_path)
        assert len(found) == len(want) == 4
        for one, wanted in zip(found, want, strict=True):
            np.testing.assert_allclose(one, wanted, atol=2e-6)
    if task == "seq_cls":
        assert json.loads((out / "adapter/classes.json").read_text())["id2label"] == {"0": "a", "1": "b", "2": "c"}


def test_a_pooler_that_nothing_reads_stays(folder: Path, tmp_path: Path) -> None:
    """It is the folder's in the export, though all other weights have changed."""
    published = AutoModel.from_pretrained(folder / "published")
    ours(folder, "published", tmp_path / "out", "--max_steps", 1)
    trained = AutoModel.from_pretrained(tmp_path / "out/hf")
    same = {name for name, p in trained.named_parameters() if torch.equal(p, published.get_parameter(name))}
    assert same == {"pooler.dense.weight", "pooler.dense.bias"}
