"""Five steps of encoders beside transformers' Trainer, as classifiers of texts, of pairs of texts and of tokens: loss
and gradient norm of every step, and what the run exports.

Covers: megaswift/models/encoders.py, megaswift/engine/torch/encoder_parts.py, megaswift/data/batches/token_types.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.trainers.hooks.metrics import read_lines
from tests.encoder_folders import LENGTH, WORDS, encoder_config, write_encoder, write_rows
from tests.parity.pool import shared  # noqa: F401 (starts before torch's threads)
from tests.trainers.runs import run
from tests.trainers.test_trajectories_trl import ALIKE, BATCH, RATE, SPREAD, STEPS, assert_same
from tests.trainers.trl_steps import ARGUMENTS, trained

pytestmark = pytest.mark.process
SLOW = pytest.mark.slow
CLASSES = ("few", "many", "some")
TAGS = ("B", "I", "O")
ROWS = STEPS * BATCH


@dataclass(frozen=True)
class Kind:
    """A kind of classifier: its task, and what transformers' configuration says of it."""

    task: str
    labels: int
    problem: str | None = None
    options: tuple[object, ...] = ()


KINDS = {
    "names": Kind("seq_cls", 3, "single_label_classification"),
    "several": Kind("seq_cls", 3, "multi_label_classification", ("--problem_type", "multi_label_classification")),
    "numbers": Kind("seq_cls", 2, "regression", ("--problem_type", "regression", "--num_labels", 2)),
    "pairs": Kind("seq_cls", 3, "single_label_classification"),
    "tags": Kind("token_cls", 3),
}


def words_of(i: int) -> list[str]:
    """A few words; some rows are longer than a model reads."""
    return [WORDS[(i * 7 + 3 * j) % len(WORDS)] + "x" * (j % 3 == 1) for j in range(2 + (11 * i) % 19)]


def row_of(kind: str, i: int) -> dict[str, Any]:
    """A row as a file has it."""
    words = words_of(i)
    if kind == "tags":
        tags = [TAGS[(i + len(word)) % 3] if j % 4 else -100 for j, word in enumerate(words)]
        return {"tokens": words, "ner_tags": tags}
    text = " ".join(words)
    if kind == "pairs":
        return {"sentence1": text, "sentence2": " ".join(words_of(i + 5)), "label": CLASSES[i % 3]}
    label: Any = {
        "names": CLASSES[i % 3],
        "several": [name for j, name in enumerate(CLASSES) if (i >> j) % 2],
        "numbers": [len(words) / 10, -(i % 5) / 2],
    }[kind]
    return {"text": text, "label": label}


def example_of(kind: str, i: int, tokenizer: Any) -> dict[str, Any]:
    """The same as transformers' examples make it."""
    row = row_of(kind, i)
    cut = {"truncation": True, "max_length": LENGTH}
    if kind == "tags":
        # as the example of token classification; a space belongs to the word behind it where tokenizers keep spaces
        spaced = "Ġ" in tokenizer.get_vocab()
        texts = [" " * (spaced and j > 0) + word for j, word in enumerate(row["tokens"])]
        encoded = tokenizer(texts, is_split_into_words=True, **cut)
        labels: list[int] = []
        labeled = set[int]()
        for word, token in zip(encoded.word_ids(), encoded.tokens(), strict=True):
            tag = -100 if word is None or word in labeled or token == "Ġ" else row["ner_tags"][word]
            labels.append(-100 if tag == -100 else TAGS.index(tag))
            labeled |= {word} if word is not None and token != "Ġ" else set()
        return {**encoded, "labels": labels}
    encoded = tokenizer(row["sentence1"], row["sentence2"], **cut) if kind == "pairs" else tokenizer(row["text"], **cut)
    label: Any = row["label"]
    if kind in ("names", "pairs"):
        label = CLASSES.index(label)
    if kind == "several":
        label = [float(name in label) for name in CLASSES]
    return {**encoded, "labels": label}


def collated(tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded by the tokenizer, as in transformers' collators."""
    batch = dict(tokenizer.pad([{k: v for k, v in row.items() if k != "labels"} for row in rows], return_tensors="pt"))
    labels = [row["labels"] for row in rows]
    if rows and isinstance(labels[0], list) and len(labels[0]) == len(rows[0]["input_ids"]):
        longest = batch["input_ids"].shape[1]
        labels = [one + [-100] * (longest - len(one)) for one in labels]
    return {**batch, "labels": torch.tensor(labels)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of each kind."""
    made = tmp_path_factory.mktemp("encoders")
    for kind in KINDS:
        write_rows(made / f"{kind}.jsonl", [row_of(kind, i) for i in range(ROWS)])
    return made


def classifier(folder: Path, model_type: str, kind: str) -> Path:
    """An encoder with the head of a classifier, whose weights both sides start from."""
    made = folder / f"{model_type}-{kind}"
    if not made.is_dir():
        names = TAGS if kind == "tags" else CLASSES
        labels = {i: names[i] for i in range(KINDS[kind].labels)}
        fields = {"id2label": labels, "label2id": {name: i for i, name in labels.items()}}
        write_encoder(made, model_type, auto(kind), problem_type=KINDS[kind].problem, **fields)
    return made


def auto(kind: str) -> str:
    return f"AutoModelFor{'Token' if kind == 'tags' else 'Sequence'}Classification"


def of_transformers(folder: Path, model: Any, kind: str, tokenizer: Any) -> list[tuple[float, float]]:
    """The Trainer's curve."""
    import transformers

    arguments = transformers.TrainingArguments(
        **ARGUMENTS,
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=RATE,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[example_of(kind, i, tokenizer) for i in range(ROWS)],
        data_collator=lambda rows: collated(tokenizer, rows),
    )
    return [(loss, float(logged["grad_norm"])) for loss, logged in trained(trainer)]


def loaded(model: Path, kind: str) -> Any:
    import transformers

    return getattr(transformers, auto(kind)).from_pretrained(model)


def ours(folder: Path, model: Path, out: Path, kind: str, *options: object) -> list[tuple[float, float]]:
    """The run's curve."""
    usual = [] if "--per_device_train_batch_size" in options else ["--per_device_train_batch_size", str(BATCH)]
    data = ["--model", str(model), "--dataset", str(folder / f"{kind}.jsonl"), *usual]
    if "--streaming" not in options:
        data += ["--dataset_cache_dir", str(folder / "cache")]
    pairs = zip(ALIKE[::2], ALIKE[1::2], strict=True)
    alike = [word for name, value in pairs if name not in options for word in (name, value)]
    ranks = 2 if "--global_batch_size" in options else 1
    run(data, out, *alike, *KINDS[kind].options, *options, task=KINDS[kind].task, ranks=ranks)
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


CASES: list[Any] = [
    ("bert", "pairs", ("--engine", "ddp", *SPREAD)),
    ("modernbert", "names", ("--engine", "fsdp2", *SPREAD)),
    ("bert", "tags", ()),
    *(
        pytest.param(*case, marks=SLOW)
        for case in (
            ("bert", "names", ()),
            ("bert", "several", ("--engine", "zero2", *SPREAD)),
            ("bert", "numbers", ("--engine", "zero3", *SPREAD)),
            ("bert", "pairs", ("--engine", "zero1", *SPREAD)),
            ("bert", "names", ("--streaming", "true")),
            ("bert", "pairs", ("--streaming", "true")),
            ("bert", "names", ("--gradient_checkpointing", "true")),
            ("modernbert", "several", ("--engine", "ddp", *SPREAD)),
            ("modernbert", "numbers", ()),
            ("modernbert", "pairs", ("--engine", "zero3", *SPREAD)),
            ("modernbert", "tags", ("--engine", "zero3", *SPREAD)),
            ("xlm-roberta", "pairs", ("--engine", "fsdp2", *SPREAD)),
            ("xlm-roberta", "tags", ("--engine", "ddp", *SPREAD)),
            ("roberta", "names", ("--engine", "ddp", *SPREAD)),
            ("distilbert", "names", ("--engine", "zero3", *SPREAD)),
            ("distilbert", "tags", ("--engine", "fsdp2", *SPREAD)),
        )
    ),
]


@pytest.mark.parametrize(("model_type", "kind", "layout"), CASES)
def test_beside_the_trainer(
    model_type: str, kind: str, layout: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    import transformers

    model = classifier(folder, model_type, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    theirs = loaded(model, kind)
    wanted = of_transformers(folder, theirs, kind, tokenizer)
    assert_same(ours(folder, model, tmp_path / "out", kind, *layout, "--export_hf", "true"), wanted)

    # What the run leaves behind is what the Trainer has trained.
    exported, told = getattr(transformers, auto(kind)).from_pretrained(tmp_path / "out/hf", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert exported.config.problem_type == KINDS[kind].problem
    rows = collated(tokenizer, [example_of(kind, i, tokenizer) for i in range(4)])
    del rows["labels"]
    with torch.no_grad():
        torch.testing.assert_close(exported.eval()(**rows).logits, theirs.eval()(**rows).logits, atol=2e-4, rtol=1e-4)


def test_rows_are_long_and_have_pieces(folder: Path) -> None:
    """The comparison would show a text that is cut elsewhere, and a label at another token."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier(folder, "bert", "pairs"))
    lengths = [len(example_of("pairs", i, tokenizer)["input_ids"]) for i in range(ROWS)]
    assert lengths.count(LENGTH) > 3 and min(lengths) < LENGTH / 2
    tags = [example_of("tags", i, tokenizer)["labels"] for i in range(ROWS)]
    assert all({-100, 0, 1, 2} <= {label for row in tags for label in row} for _ in tags)
    assert encoder_config("bert").hidden_dropout_prob == 0
