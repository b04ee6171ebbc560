"""Five steps of classifiers beside transformers' Trainer: the same model, rows and optimizer, float32; loss and
gradient norm of every step, on engines and layouts, and then what the run leaves behind.

Covers: megaswift/losses/classification.py, megaswift/data/labeled/collate.py, megaswift/run/classes.py,
megaswift/bridge/adapters/merge.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.pool import shared  # noqa: F401 (starts before torch's threads)
from tests.trainers.inputs import write_model
from tests.trainers.runs import run
from tests.trainers.test_trajectories_trl import ALIKE, BATCH, RATE, SPREAD, STEPS, assert_same
from tests.trainers.trl_steps import ARGUMENTS, trained

SLOW = pytest.mark.slow
CLASSES = ("few", "some", "many")


@dataclass(frozen=True)
class Kind:
    """A kind of classifier: its task, options, and the labels that transformers gets."""

    task: str
    problem: str | None
    labels: int
    options: tuple[object, ...] = ()


KINDS = {
    "names": Kind("seq_cls", "single_label_classification", 3),
    "several": Kind("seq_cls", "multi_label_classification", 3, ("--problem_type", "multi_label_classification")),
    "numbers": Kind("seq_cls", "regression", 2, ("--problem_type", "regression", "--num_labels", 2)),
    "tags": Kind("token_cls", None, 3),
}


def text_of(i: int) -> str:
    return ("abcdefgh" * 3)[i % 7 : i % 7 + 3 + (5 * i) % 9]


def row_of(kind: str, i: int) -> dict[str, Any]:
    """A row as a file has it."""
    text = text_of(i)
    size = len(text)
    if kind == "tags":
        words = [word for word in text.split("d") if word]
        return {"tokens": words, "ner_tags": [("I", "O", "B")[(i + len(word)) % 3] for word in words]}
    label = {
        "names": CLASSES[size % 3],
        "several": [name for j, name in enumerate(CLASSES) if (size >> j) % 2],
        "numbers": [size / 10, -(i % 5) / 2],
    }[kind]
    ask = {"messages": [{"role": "user", "content": text}]} if i % 2 else {"query": text}
    return {**ask, "label": label}


def example_of(kind: str, i: int, tokenizer: Any) -> dict[str, Any]:
    """The same as transformers' examples make it."""
    row = row_of(kind, i)
    if kind == "tags":
        # as the example of token classification: a label at the first token of each word, -100 elsewhere
        words = [row["tokens"][0], *(f" {word}" for word in row["tokens"][1:])]
        ids: list[int] = []
        labels: list[int] = []
        for j, word in enumerate(words):
            pieces = tokenizer(word, add_special_tokens=False)["input_ids"]
            first = int(j > 0)  # the space is a token of its own
            own = sorted(["I", "O", "B"]).index(row["ner_tags"][j])
            ids += pieces
            labels += [own if k == first else -100 for k in range(len(pieces))]
        return {"input_ids": ids, "labels": labels}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": text_of(i)}], tokenize=False, add_generation_prompt=True
    )
    names = sorted(CLASSES)
    label: Any = row["label"]
    if kind == "names":
        label = names.index(label)
    if kind == "several":
        label = [float(name in label) for name in names]
    return {"input_ids": tokenizer(text, add_special_tokens=False)["input_ids"], "labels": label}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, and rows of each kind."""
    made = tmp_path_factory.mktemp("classifiers")
    write_model(made / "model")
    for kind in KINDS:
        rows = [row_of(kind, i) for i in range(STEPS * BATCH)]
        (made / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def auto(kind: str) -> Any:
    import transformers

    tokens = KINDS[kind].task == "token_cls"
    return transformers.AutoModelForTokenClassification if tokens else transformers.AutoModelForSequenceClassification


def collated(kind: str, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Right padding, as transformers' collators."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows])
    labels = padded("labels", -100) if kind == "tags" else torch.tensor([row["labels"] for row in rows])
    return {"input_ids": padded("input_ids", 0), "attention_mask": mask, "labels": labels}


def of_transformers(folder: Path, kind: str, model: Any) -> list[tuple[float, float]]:
    """The Trainer's curve."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    examples = [example_of(kind, i, tokenizer) for i in range(STEPS * BATCH)]
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
        model=model, args=arguments, train_dataset=examples, data_collator=lambda rows: collated(kind, rows)
    )
    return [(loss, float(logged["grad_norm"])) for loss, logged in trained(trainer)]


def classifier(folder: Path, kind: str) -> Any:
    """A classifier of transformers on the language model."""
    from transformers import AutoConfig, AutoTokenizer

    torch.manual_seed(5)
    names = sorted(["I", "O", "B"] if kind == "tags" else CLASSES)[: KINDS[kind].labels]
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    config = AutoConfig.from_pretrained(folder / "model", **labels)
    config.problem_type = KINDS[kind].problem
    config.classifier_dropout = 0.0  # transformers takes 0.1 without it
    model = auto(kind).from_pretrained(folder / "model", config=config)
    model.save_pretrained(folder / f"{kind}-model")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / f"{kind}-model")
    return model


def ours(folder: Path, out: Path, kind: str, *options: object) -> list[tuple[float, float]]:
    """The run's curve."""
    base = [] if "--model" in options else ["--model", str(folder / f"{kind}-model")]
    usual = [] if "--per_device_train_batch_size" in options else ["--per_device_train_batch_size", str(BATCH)]
    cache = [] if "--streaming" in options else ["--dataset_cache_dir", str(folder / "cache")]
    data = ["--dataset", str(folder / f"{kind}.jsonl"), *cache]
    given = set(options)
    pairs = zip(ALIKE[::2], ALIKE[1::2], strict=True)
    alike = [word for name, value in pairs if name not in given for word in (name, value)]
    alike += ["--class_names", *sorted(CLASSES)] if kind == "several" and "--adapters" in options else []
    cut = [int(str(options[options.index(name) + 1])) for name in ("--tp", "--pp", "--cp") if name in options]
    ranks = math.prod(cut) * (2 if "--global_batch_size" in options else 1)
    run([*base, *data, *usual], out, *alike, *KINDS[kind].options, *options, task=KINDS[kind].task, ranks=ranks)
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def curves(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """transformers' curve of each kind."""
    return {kind: of_transformers(folder, kind, classifier(folder, kind)) for kind in KINDS}


CASES: list[Any] = [
    ("names", ("--tp", 2, "--sequence_parallel", "true")),
    ("tags", ("--cp", 2, "--packing", "true", "--max_length", 512)),
    *(
        pytest.param(kind, layout, marks=SLOW)
        for kind, layout in (
            ("several", ("--engine", "zero2", *SPREAD)),
            ("names", ("--pp", 2)),
            ("names", ("--cp", 2)),
            ("names", ("--packing", "true", "--max_length", 512)),
            ("names", ("--padding_free", "true", *SPREAD)),
            ("names", ("--engine", "ddp", *SPREAD)),
            ("names", ("--engine", "zero3", *SPREAD)),
            ("names", ("--streaming", "true", "--class_names", "few", "many", "some")),
            ("several", ("--tp", 2, "--pp", 2)),
            ("several", ("--engine", "fsdp2", *SPREAD)),
            ("numbers", ("--tp", 2)),
            ("numbers", ("--cp", 2, "--packing", "true", "--max_length", 512)),
            ("numbers", ("--engine", "zero3", *SPREAD)),
            ("numbers", SPREAD),
            ("tags", ("--tp", 2, "--sequence_parallel", "true", "--pp", 2)),
            ("tags", SPREAD),
            ("tags", ("--engine", "ddp", *SPREAD)),
            ("tags", ("--engine", "zero3", *SPREAD)),
            ("tags", ("--engine", "fsdp2", *SPREAD)),
            ("tags", ("--streaming", "true", "--class_names", "B", "I", "O")),
        )
    ),
]


@pytest.mark.process
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_beside_the_trainer(
    kind: str,
    layout: tuple[object, ...],
    folder: Path,
    curves: dict[str, list[tuple[float, float]]],
    tmp_path: Path,
) -> None:
    packed = "--packing" in layout
    mine = ours(folder, tmp_path / "out", kind, *layout, *(("--per_device_train_batch_size", 1) if packed else ()))
    if packed:
        # all rows lie in one packed row: the first step is the loss of all of them
        assert len(mine) == STEPS and mine[0][0] == pytest.approx(whole_loss(folder, kind), rel=1e-5)
        return
    assert_same(mine, curves[kind])


def whole_loss(folder: Path, kind: str) -> float:
    """transformers' loss over all rows at once, before the first step."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = classifier(folder, kind)
    with torch.no_grad():
        rows = [example_of(kind, i, tokenizer) for i in range(STEPS * BATCH)]
        found: float = model.eval()(**collated(kind, rows)).loss.item()
    return found


LORA: list[Any] = [
    ("tags", ("--engine", "ddp", *SPREAD)),
    *(
        pytest.param(kind, layout, marks=SLOW)
        for kind, layout in (
            ("names", ("--tp", 2)),
            ("tags", ("--tp", 2, "--sequence_parallel", "true")),
            ("tags", ("--pp", 2)),
            ("several", ("--cp", 2)),
            ("numbers", ("--engine", "zero3", *SPREAD)),
            ("names", ("--engine", "fsdp2", *SPREAD)),
        )
    ),
]


@pytest.mark.process
@pytest.mark.parametrize(("kind", "layout"), LORA)
def test_adapters_beside_the_trainer(kind: str, layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """From PEFT's adapters and head on a language model; then PEFT's model with the run's adapters, and the merged one,
    say the same, and both have the classes."""
    import peft
    from transformers import AutoTokenizer

    model = classifier(folder, kind)
    task = "TOKEN_CLS" if kind == "tags" else "SEQ_CLS"
    modules = {"target_modules": "all-linear", "exclude_modules": ["score"] if kind == "tags" else None}
    lora = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type=task, **modules)
    adapted = peft.get_peft_model(model, lora)
    adapted.save_pretrained(tmp_path / "started")
    wanted = of_transformers(folder, kind, adapted)
    begins = ("--model", folder / "model", "--train_type", "lora", "--adapters", tmp_path / "started")
    mine = ours(folder, tmp_path / "out", kind, *begins, "--merge_lora", "true", "--export_hf", "true", *layout)
    assert_same(mine, wanted)

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = collated(kind, [example_of(kind, i, tokenizer) for i in range(4)])
    del rows["labels"]
    merged, told = auto(kind).from_pretrained(tmp_path / "out" / "hf", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if kind != "numbers":  # which have no names
        assert merged.config.id2label == model.config.id2label
    assert merged.config.problem_type == KINDS[kind].problem
    again = peft.PeftModel.from_pretrained(classifier(folder, kind), tmp_path / "out" / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(**rows).logits, again.eval()(**rows).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--engine", "ddp", *SPREAD), ("--engine", "fsdp2", *SPREAD)])
@pytest.mark.parametrize("kind", ["names", "tags"])
def test_new_adapters_learn_and_go_on(kind: str, layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """Bit for bit from a checkpoint; the folder has the head and the names of its classes."""
    from safetensors.torch import load_file

    new = ("--model", folder / "model", "--train_type", "lora", "--lora_rank", 4, "--save_steps", 2, *layout)
    whole = ours(folder, tmp_path / "whole", kind, *new)
    step = tmp_path / "whole/checkpoints/step-2"
    again = ours(folder, tmp_path / "again", kind, *new, "--resume_from_checkpoint", step)
    assert again == whole[2:] and whole[-1] != whole[0]
    saved = load_file(tmp_path / "again/adapter/adapter_model.safetensors")
    heads = {name.removeprefix("base_model.model.") for name in saved if "score" in name}
    assert heads == ({"score.weight", "score.bias"} if kind == "tags" else {"score.weight"})
    names = json.loads((tmp_path / "again/adapter/classes.json").read_text())["id2label"]
    assert [*names.values()] == sorted(["I", "O", "B"] if kind == "tags" else CLASSES)


def test_labels_differ_between_rows() -> None:
    """The rows would show a label that went to another row."""
    assert {row_of("names", i)["label"] for i in range(STEPS * BATCH)} == {*CLASSES}
    assert np.std([row_of("numbers", i)["label"][0] for i in range(STEPS * BATCH)]) > 0.1
