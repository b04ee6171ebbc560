"""A reference that is asked once before training: the numbers find their rows, and runs are those of a reference that
is kept.

Covers: megaswift/trainers/batch_fields.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.config import load_config
from megaswift.data.batches.loader import EvaluationSource
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.preference.collate import PreferenceDataset
from megaswift.data.preference.documents import PreferenceDocuments
from megaswift.data.store.documents import Documents
from megaswift.losses.contract import Batch, ModelOutputs, RequestedModelOutputs
from megaswift.run.build import forward_pass_count_before_step
from megaswift.run.dataset_task import make_batch_transform
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.reference_logprobs import compute_reference_logprobs
from tests.trainers.inputs import preference_inputs, write_preferences
from tests.trainers.runs import run

SLOW = pytest.mark.slow
USUAL = (
    "--max_steps",
    4,
    "--eval_steps",
    2,
    "--report_to",
    "none",
    "--lr",
    "1e-2",
    "--per_device_train_batch_size",
    2,
    "--global_batch_size",
    4,
    "--split_dataset_ratio",
    0.2,
)


class Store:
    """A token store in memory."""

    def __init__(self, documents: list[tuple[list[int], list[int]]]) -> None:
        self.tokens = np.concatenate([ids for ids, _ in documents]).astype(np.int32)
        self.mask = np.concatenate([mask for _, mask in documents]).astype(np.uint8)
        self.manifest = {"content": "x"}


def units(pairs: int) -> PreferenceDocuments:
    """Pairs of documents of random lengths, the tokens all different; row i of the file twice where i is even."""
    draw, made, sample = random.Random(1), [], []
    rows = [i for i in range(pairs) for _ in range(2 - i % 2)]
    for i in rows:
        for side in range(2):
            prompt, answer = draw.randint(1, 5), draw.randint(1, 6)
            first = 1000 * i + 100 * side
            made.append(([first + k for k in range(prompt + answer)], [0] * prompt + [1] * answer))
            sample.append(i)
        if i % 2 == 0 and len(made) >= 4 and sample[-3] == i:  # the same row again
            made[-2:] = made[-4:-2]
    lengths = np.array([len(ids) for ids, _ in made])
    docs = Documents(
        (Store(made),),
        np.zeros(len(made), dtype=np.int32),
        np.cumsum(lengths) - lengths,
        lengths,  # type: ignore[arg-type]
        np.array([sum(mask[1:]) for _, mask in made]),
        np.array(sample),
        np.zeros(len(made), dtype=np.int64),
    )
    return PreferenceDocuments(docs, np.full(len(rows), np.nan, dtype=np.float32))


def by_token(batches: Any) -> list[torch.Tensor]:
    """As if each label's log-probability were its id, negative, whatever stands around it."""
    return [-batch.labels.float() * (batch.loss_weights != 0) for batch in batches]


@pytest.mark.parametrize("packing", [True, False])
def test_numbers_find_their_rows(packing: bool) -> None:
    rows = PreferenceDataset(units(9), packing)
    once = EvaluationSource(rows, LoaderGeometry(per_device=2, accumulation=2), shape=shape())
    known = compute_reference_logprobs(once, by_token, "tests")
    assert len(known.samples) == 9 and len(known.values) < int(rows.docs.labels.sum())
    for numbers in ([[3, 0], [13, 5]], [[7], [1, 2, 9]]):  # other micro-batches than were scored
        made = [rows.batches([[rows.read(i) for i in micro]], shape(), False)[0] for micro in numbers]
        for batch, wanted in zip(made, by_token(made), strict=True):
            assert torch.equal(known.of(batch), wanted)
    filler: Batch = rows.batches([[(), rows.read(4)]], shape(), False)[0]
    assert torch.equal(known.of(filler), by_token([filler])[0])


class Asked:
    """An engine that counts how often it is asked, and of which weights."""

    def __init__(self) -> None:
        self.passes: list[tuple[bool, int]] = []
        """(of the reference, documents) of each."""
        self.away = False

    @contextmanager
    def reference(self) -> Iterator[None]:
        self.away = True
        yield
        self.away = False

    def score(self, batches: list[Batch], needs: RequestedModelOutputs) -> list[ModelOutputs]:
        assert all(len(batch.input_ids) == 1 and batch.cu_seqlens is not None for batch in batches)
        self.passes.append((self.away, sum(batch.cu_seqlens.numel() - 1 for batch in batches)))  # type: ignore[union-attr]
        return [ModelOutputs(logprobs=torch.zeros(batch.labels.shape)) for batch in batches]


@pytest.mark.parametrize(
    "words, passes",
    [
        ("dpo", [(True, 6)]),
        ("kto --loss_type apo_zero_unpaired", [(True, 6)]),
        ("kto --loss_type bco", [(True, 6), (False, 6)]),
        ("kto --micro_batch_size 6", [(True, 6), (True, 6), (False, 6)]),
    ],
)
def test_a_reference_is_asked_once_about_both_sides_of_all_pairs(words: str, passes: list[tuple[bool, int]]) -> None:
    """Chosen and rejected lie in one row; kto goes through the answers of others too, by the reference and the
    policy."""
    task, *options = words.split()
    cfg, rows, engine = (
        load_config(task, options, environ={}),
        PreferenceDataset(units(4) if task == "dpo" else judged(6), True),
        Asked(),
    )
    batches = rows.batches([[rows.read(i) for i in range(len(rows) if task != "dpo" else 3)]], shape(), False)
    preparation = make_batch_transform(cfg, lambda given, _: list(given), {})
    assert preparation is not None
    made = preparation.prepare(engine, batches, True)  # type: ignore[arg-type]
    assert engine.passes == passes and len(passes) == forward_pass_count_before_step(cfg)
    assert len(made) == 1 and made[0].fields["reference"].shape == batches[0].labels.shape


def judged(count: int) -> PreferenceDocuments:
    """Examples in place of pairs."""
    pairs = units(count)
    return PreferenceDocuments(pairs.docs.take(np.arange(0, 2 * count, 2)), np.arange(count, dtype=np.float32) % 2)


def test_other_data_are_noticed() -> None:
    rows = PreferenceDataset(units(4), True)
    known = compute_reference_logprobs(EvaluationSource(rows, LoaderGeometry(per_device=2), shape()), by_token, "tests")
    batch = rows.batches([[rows.read(0)]], shape(), False)[0]
    assert batch.sample_ids is not None
    with pytest.raises(AssertionError, match="other data"):
        known.of(replace(batch, sample_ids=torch.full_like(batch.sample_ids, 4)))


def shape() -> Any:
    from megaswift.data.batches.collate import PaddingShape

    return PaddingShape(doc_multiple=1, row_multiple=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("known")
    write_preferences(made, rows=30)
    return made


def curves(folder: Path, out: Path, task: str, *options: object, ranks: int = 2) -> list[dict[str, Any]]:
    """The lines of training and of evaluation, without times."""
    run(preference_inputs(folder, task), out, *USUAL, *options, ranks=ranks, task=task)
    lines = read_lines(out / "metrics.jsonl") + read_lines(out / "eval.jsonl")
    return [{k: v for k, v in line.items() if k in ("loss", "grad_norm") or "/" in k} for line in lines]


def assert_close(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert len(some) == len(others) and some
    for a, b in zip(some, others, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


@pytest.mark.process
@pytest.mark.parametrize(
    "task, options",
    [
        ("dpo", ("--tp", 2)),
        *(
            pytest.param(task, options, marks=SLOW)
            for task, options in (
                ("dpo", ("--pp", 2, "--packing", "false")),
                ("dpo", ("--cp", 2)),
                ("dpo", ()),
                ("dpo", ("--engine", "zero3")),
                ("kto", ("--loss_type", "bco")),
                ("kto", ("--loss_type", "apo_zero_unpaired", "--engine", "ddp")),
                ("dpo", ("--train_type", "lora", "--lora_rank", 4)),
                ("dpo", ("--train_type", "lora", "--engine", "ddp")),
            )
        ),
    ],
)
def test_a_run_is_that_of_a_reference_that_is_kept(
    task: str, options: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    """Training and evaluation; the first loss of DPO is log 2 on either."""
    once = curves(folder, tmp_path / "once", task, *options, "--precompute_ref_log_probs", "true")
    assert_close(once, curves(folder, tmp_path / "kept", task, *options))
    assert task == "kto" or once[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)


@pytest.mark.process
@SLOW
def test_a_reference_of_its_own_and_a_resumed_run(folder: Path, tmp_path: Path) -> None:
    """--ref_model is scored in place of the model, and again by a run that goes on."""
    curves(folder, tmp_path / "other", "dpo", "--reference_free", "true", "--tp", 2)
    ask = ("--tp", 2, "--ref_model", tmp_path / "other" / "hf")
    once = curves(folder, tmp_path / "once", "dpo", *ask, "--precompute_ref_log_probs", "true", "--save_steps", 2)
    assert_close(once, curves(folder, tmp_path / "kept", "dpo", *ask))
    assert abs(once[0]["loss"] - 0.6931472) > 1e-3
    saved = tmp_path / "once/checkpoints/step-2"
    again = curves(
        folder, tmp_path / "again", "dpo", *ask, "--precompute_ref_log_probs", "true", "--resume_from_checkpoint", saved
    )
    assert again == [*once[2:4], once[-1]]
