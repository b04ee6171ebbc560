"""Batches: the order of rows by plain Python, shifted labels by hand, packing's edges, ranks, evaluation, resume,
streaming.

Covers: megaswift/data/batches/collate.py, megaswift/data/batches/epoch_order.py.
"""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.data.batches.collate import PaddingShape, collate_packed, collate_rows
from megaswift.data.batches.epoch_order import EpochOrder
from megaswift.data.batches.loader import DocumentRows
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.batches.step_packing import StepPacking
from megaswift.data.build import build_train_and_eval_sources
from megaswift.errors import DataError
from megaswift.losses.contract import Batch
from tests.data.makers import chat, config, jsonl, tokenizer


def doc(ids: list[int], mask: list[int], number: int) -> Any:
    return np.array(ids, np.int32), np.array(mask, np.uint8), number


def source(tmp_path: Path, rows: int, geometry: LoaderGeometry, **options: Any) -> Any:
    path = tmp_path / "d.jsonl"
    if not path.exists():
        jsonl(path, [chat(f"hello {i}", "answer " * (1 + i * 7 % 11)) for i in range(rows)])
    cfg = config(tmp_path, str(path), **options)
    return build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), geometry)


def ids_of(batches: list[Any]) -> list[int]:
    return [i for b in batches for i in b.sample_ids.tolist()]


def test_rows_are_shifted_padded_and_masked_by_hand() -> None:
    b = collate_rows(
        [doc([5, 6, 7], [1, 0, 1], 3), None, doc([8, 9], [0, 1], 4)], PaddingShape(pad_id=1, row_multiple=4), 4
    )
    assert b.input_ids.tolist() == [[5, 6, 7, 1], [1, 1, 1, 1], [8, 9, 1, 1]]
    assert b.labels.tolist() == [[6, 7, 1, 1], [1, 1, 1, 1], [9, 1, 1, 1]]
    assert b.loss_weights.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert b.valid.tolist() == [[True] * 3 + [False], [False] * 4, [True, True, False, False]]
    assert b.positions.tolist() == [[0, 1, 2, 3]] * 3 and b.cu_seqlens is None
    assert b.sample_ids is not None and b.sample_ids.tolist() == [3, -1, 4]
    assert (b.input_ids.dtype, b.loss_weights.dtype, b.valid.dtype) == (torch.int64, torch.float32, torch.bool)


def test_packed_rows_by_hand() -> None:
    shape = PaddingShape(doc_multiple=4, row_multiple=8, pad_id=0)
    row = [doc([5, 6, 7, 8, 9], [0, 1, 1, 1, 1], 3), doc([4, 3], [0, 1], 1)]
    assert shape.packed_length(row) == 16
    b = collate_packed([row, []], shape, [16, 8])
    assert b.cu_seqlens is not None and b.cu_seqlens.tolist() == [0, 8, 16, 24] and b.cu_seqlens.dtype == torch.int32
    assert b.input_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0, 4, 3] + [0] * 14]
    assert b.loss_weights.tolist() == [[1.0] * 4 + [0] * 4 + [1.0] + [0] * 15]
    assert b.labels[0, :9].tolist() == [6, 7, 8, 9, 0, 0, 0, 0, 3]
    assert b.positions.tolist() == [list(range(8)) * 3]
    assert b.tokens == 7 and b.label_tokens == 5


def test_labels_never_cross_documents() -> None:
    b = collate_packed([[doc([5, 6], [1, 1], 0), doc([7, 8], [1, 1], 1)]], PaddingShape(), [4])
    assert b.loss_weights.tolist() == [[1, 0, 1, 0]]


@pytest.mark.parametrize(("dp", "per", "accumulation"), [(1, 1, 1), (2, 2, 2), (3, 1, 2)])
def test_without_shuffle_global_batch_k_is_rows_k_gbs(tmp_path: Path, dp: int, per: int, accumulation: int) -> None:
    gbs = dp * per * accumulation
    ranks = [source(tmp_path, 17, LoaderGeometry(r, dp, per, accumulation), shuffle=False)[0] for r in range(dp)]
    for k in range(5):
        steps = [s.next() for s in ranks]
        assert all(len(step) == accumulation and all(b.input_ids.shape[0] == per for b in step) for step in steps)
        assert sorted(i for step in steps for i in ids_of(step)) == sorted(
            i % 17 for i in range(k * gbs, (k + 1) * gbs)
        )


def test_shuffled_epochs_are_permutations_and_run_on(tmp_path: Path) -> None:
    s, _ = source(tmp_path, 10, LoaderGeometry(per_device=4), seed=3)
    seen = [i for _ in range(5) for i in ids_of(s.next())]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != list(range(10)) and seen[:10] != seen[10:]
    assert (s.epoch, s.steps_per_epoch, s.steps_for(1.0), s.steps_for(2.0)) == (2.0, 2, 3, 5)
    assert [s.steps_left(epochs) for epochs in (1.0, 2.0, 2.1, 3.0)] == [0, 0, 1, 3]
    again = source(tmp_path, 10, LoaderGeometry(per_device=4), seed=3)[0]
    other = source(tmp_path, 10, LoaderGeometry(per_device=4), seed=3, data_seed=4)[0]
    assert ids_of(again.next()) == seen[:4] and ids_of(other.next()) != seen[:4]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("threads", [0, 2])
def test_resume_goes_on_exactly(tmp_path: Path, packing: bool, threads: int) -> None:
    geometry = LoaderGeometry(1, 2, 1, 2, doc_multiple=4, row_multiple=8)
    options: dict[str, Any] = {"packing": packing, "max_length": 128, "dataloader_num_workers": threads}
    s = source(tmp_path, 60, geometry, **options)[0]
    for _ in range(3):
        s.next()
    state = json.loads(json.dumps(s.state_dict()))
    ahead = [s.next() for _ in range(9)]
    t = source(tmp_path, 60, geometry, **options)[0]
    t.load_state_dict(state)
    for batches in ahead:
        for a, b in zip(batches, t.next(), strict=True):
            assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.loss_weights, b.loss_weights)
            assert torch.equal(a.sample_ids, b.sample_ids)


@pytest.mark.parametrize("kind", ["padded", "packed", "step"])
def test_threads_prepare_the_same_batches_in_the_same_order(tmp_path: Path, kind: str) -> None:
    """Every tensor, over the end of an epoch and from a saved position on; what the engine prepares is done ahead."""
    geometry = LoaderGeometry(1, 2, 1, 4, doc_multiple=4, row_multiple=8)
    options: dict[str, Any] = {"packing": kind == "packed", "max_length": 128}
    plain, ahead = (source(tmp_path, 60, geometry, dataloader_num_workers=n, **options)[0] for n in (0, 2))
    prepared: list[str] = []

    def prepare(batches: list[Batch]) -> list[Batch]:
        prepared.append(threading.current_thread().name)
        return [replace(b, ahead="prepared") for b in batches]

    ahead.prepare_ahead = prepare
    if kind == "step":
        for s in (plain, ahead):
            assert isinstance(s.data, DocumentRows)
            s.data.step_packing = StepPacking(capacity=256)
    for step in range(24):
        if step == 10:
            for s in (plain, ahead):
                s.load_state_dict(json.loads(json.dumps(plain.state_dict())))
        one, two = plain.next(), ahead.next()
        assert plain.state_dict() == ahead.state_dict()
        assert len(one) == len(two) and {b.ahead for b in two} == {"prepared"}
        for a, b in zip(one, two, strict=True):
            for name in ("input_ids", "labels", "loss_weights", "positions", "valid", "cu_seqlens", "sample_ids"):
                x, y = getattr(a, name), getattr(b, name)
                assert (x is None and y is None) or torch.equal(x, y), name
    assert all(name.startswith("megaswift-data") for name in prepared)


def test_nothing_is_prepared_while_a_batch_is_trained_on_alone(tmp_path: Path) -> None:
    """No thread has work during the step of that batch, as graphs are captured in it; the batches are the same."""
    geometry = LoaderGeometry(1, 2, 1, 4, doc_multiple=4, row_multiple=8)
    plain, ahead = (source(tmp_path, 60, geometry, dataloader_num_workers=n)[0] for n in (0, 2))
    ahead.alone = 1
    pending = []
    for _ in range(4):
        for a, b in zip(plain.next(), ahead.next(), strict=True):
            assert torch.equal(a.input_ids, b.input_ids)
        pending.append(len(ahead._ahead))
    assert pending == [0, 2, 2, 2]


def test_resume_on_other_ranks_sees_the_rows_that_come_next(tmp_path: Path) -> None:
    s = source(tmp_path, 20, LoaderGeometry(0, 1, 4))[0]
    seen = ids_of(s.next()) + ids_of(s.next())
    halves = [source(tmp_path, 20, LoaderGeometry(r, 2, 1, 2))[0] for r in (0, 1)]
    for h in halves:
        h.load_state_dict(s.state_dict())
    for _ in range(3):
        seen += [i for h in halves for i in ids_of(h.next())]
    assert sorted(seen) == list(range(20))


def test_resume_with_other_data_is_refused(tmp_path: Path) -> None:
    s = source(tmp_path, 20, LoaderGeometry())[0]
    for options, said in (
        ({"max_length": 40, "truncation_strategy": "right"}, "max_length"),
        ({"shuffle": False}, "shuffle"),
        ({"data_seed": 9}, "data_seed"),
    ):
        with pytest.raises(DataError, match=said):
            source(tmp_path, 20, LoaderGeometry(), **options)[0].load_state_dict(s.state_dict())


@pytest.mark.parametrize("packing", [False, True])
def test_uniform_steps_have_one_length(tmp_path: Path, packing: bool) -> None:
    geometry = LoaderGeometry(per_device=1, accumulation=6, doc_multiple=2, row_multiple=8, uniform=True)
    s = source(tmp_path, 60, geometry, packing=packing, max_length=90)[0]
    for _ in range(2):
        lengths = {b.input_ids.shape[1] for b in s.next()}
        assert len(lengths) == 1 and lengths.pop() % 8 == 0
    plain = source(tmp_path, 60, LoaderGeometry(accumulation=6, row_multiple=8), max_length=90)[0].next()
    assert len({b.input_ids.shape[1] for b in plain}) > 1 and all(b.input_ids.shape[1] % 8 == 0 for b in plain)


def test_packed_epoch_holds_every_document_once_and_says_its_fill(tmp_path: Path) -> None:
    s = source(tmp_path, 60, LoaderGeometry(per_device=2, doc_multiple=4), packing=True, max_length=256)[0]
    seen: list[int] = []
    tokens = padded = 0
    for _ in range(s.rows // 2):
        for b in s.next():
            assert b.input_ids.shape[0] == 1 and b.cu_seqlens[-1] == b.input_ids.shape[1]
            assert (b.cu_seqlens % 4 == 0).all()
            seen += b.sample_ids.tolist()
            tokens += b.tokens
            padded += b.input_ids.shape[1]
    assert s.rows % 2 or sorted(seen) == list(range(60))
    assert s.stats["fill"] < s.stats["padded_fill"] <= 1
    assert s.stats["fill"] == pytest.approx(s.stats["tokens"] / (s.rows * 256))


@pytest.mark.parametrize("packing", [False, True])
def test_evaluation_takes_every_row_once_and_fills_up_without_weight(tmp_path: Path, packing: bool) -> None:
    ranks = [
        source(tmp_path, 30, LoaderGeometry(r, 2, 2), split_dataset_ratio=0.3, packing=packing, max_length=128)[1]
        for r in (0, 1)
    ]
    taken = [list(e.eval_batches()) for e in ranks]
    assert len({len(t) for t in taken}) == 1
    ids = [i for t in taken for step in t for i in ids_of(step)]
    held = sorted(i for i in ids if i >= 0)
    assert len(held) == len(set(held)) == 9
    filler = [b for t in taken for step in t for b in step if (b.sample_ids == -1).all()]
    assert all(b.label_tokens == 0 and b.tokens == 0 for b in filler)
    train = source(tmp_path, 30, LoaderGeometry(), split_dataset_ratio=0.3)[0]
    assert sorted(ids_of([b for _ in range(21) for b in train.next()]) + held) == list(range(30))


@pytest.mark.parametrize("limit", [None, 5])
def test_evaluation_takes_the_same_rows_on_every_layout(tmp_path: Path, limit: int | None) -> None:
    """Ranks, rows a micro-batch, micro-batches of a pipeline."""

    def held(dp: int, per_device: int, accumulation: int) -> list[int]:
        ids = []
        for rank in range(dp):
            made = source(
                tmp_path,
                30,
                LoaderGeometry(rank, dp, 2),
                split_dataset_ratio=0.3,
                per_device_eval_batch_size=per_device,
            )[1]
            assert made is not None
            made = replace(made, geometry=replace(made.geometry, accumulation=accumulation))
            ids += [i for step in made.eval_batches(limit) for i in ids_of(step) if i >= 0]
        return sorted(ids)

    one = held(1, 1, 1)
    assert len(one) == len(set(one)) == (limit or 9)
    assert one == held(2, 1, 1) == held(3, 2, 1) == held(1, 4, 2) == held(2, 3, 4)


def test_a_ratio_that_leaves_nothing_names_one_that_does(tmp_path: Path) -> None:
    for ratio in (0.001, 0.999):
        with pytest.raises(
            DataError, match=r"for training and \d+ for evaluation\n    try: --split_dataset_ratio 0.033$"
        ):
            source(tmp_path, 30, LoaderGeometry(), split_dataset_ratio=ratio)
    assert source(tmp_path, 30, LoaderGeometry(), split_dataset_ratio=0.033)[1] is not None


def test_a_data_set_shorter_than_a_global_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="10 rows, fewer than one global batch of 12"):
        source(tmp_path, 10, LoaderGeometry(0, 3, 4))


def test_what_is_said_of_too_few_packed_rows_is_enough(tmp_path: Path) -> None:
    with pytest.raises(DataError) as told:
        source(tmp_path, 40, LoaderGeometry(per_device=50), packing=True, max_length=256)
    rows = re.search(
        r"40 rows, packed into (\d+), fewer than one global batch of 50\n.*d.jsonl#(\d+) to repeat", str(told.value)
    )
    assert rows is not None and int(rows[1]) < 40 < int(rows[2])
    cfg = config(tmp_path, f"{tmp_path / 'd.jsonl'}#{rows[2]}", packing=True, max_length=256)
    made = build_train_and_eval_sources(
        cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), LoaderGeometry(per_device=50)
    )[0]
    assert made.rows is not None and 50 <= made.rows < 60


def test_the_fingerprint_knows_rows_not_paths(tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    a, b = source(tmp_path, 20, LoaderGeometry())[0], source(tmp_path / "2", 20, LoaderGeometry())[0]
    assert a.data.docs.stores[0].folder.name != b.data.docs.stores[0].folder.name
    b.load_state_dict(a.state_dict())
    with pytest.raises(DataError, match="the data set"):
        b.load_state_dict(a.state_dict() | {"fingerprint": a.data.docs.take(np.arange(19)).fingerprint})


def test_other_text_of_equal_length_is_other_data(tmp_path: Path) -> None:
    """Resume compares the tokens, not only how many there are."""
    made = []
    for name, answer in (("as", "a"), ("changed", "b")):
        (tmp_path / name).mkdir()
        jsonl(tmp_path / name / "d.jsonl", [chat("q", answer)] * 4)
        made.append(source(tmp_path / name, 4, LoaderGeometry())[0])
    assert made[0].data.docs.length.tolist() == made[1].data.docs.length.tolist()
    with pytest.raises(DataError, match="the data set"):
        made[1].load_state_dict(made[0].state_dict())


@pytest.mark.process
def test_the_fingerprint_does_not_know_how_many_processes_tokenized(tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    a, b = source(tmp_path, 4000, LoaderGeometry()), source(tmp_path / "2", 4000, LoaderGeometry(), dataset_num_proc=2)
    assert a[0].data.docs.fingerprint == b[0].data.docs.fingerprint


def test_a_run_goes_on_when_the_template_s_date_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3.2's template says which day it is."""
    dated = (
        "{% for m in messages %}{{ strftime_now('%Y-%m-%d') }}{% generation %}{{ m.content }}{% endgeneration "
        "%}{% endfor %}"
    )
    first = source(tmp_path, 4, LoaderGeometry(), chat_template=dated)[0]
    day, strftime = datetime(2031, 7, 5), time.strftime
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", SimpleNamespace(now=lambda: day))
    monkeypatch.setattr("time.strftime", lambda form, when=None: strftime(form, when or day.timetuple()))
    later = source(tmp_path, 4, LoaderGeometry(), chat_template=dated)[0]
    assert later.data.docs.stores[0].folder != first.data.docs.stores[0].folder
    assert later.data.docs.read(0)[0].tolist() != first.data.docs.read(0)[0].tolist()
    later.load_state_dict(first.state_dict())


def test_warnings_and_errors_name_the_evaluation_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    val = jsonl(tmp_path / "v.jsonl", [chat("q", "word " * 200), chat("q", "a")])
    source(tmp_path, 4, LoaderGeometry(), val_dataset=[val], max_length=128, truncation_strategy="delete")
    assert "v.jsonl: 1 of 2 rows deleted" in capsys.readouterr().err
    jsonl(
        tmp_path / "v.jsonl",
        [{"messages": [*chat("q", "a")["messages"][:1], {"role": "assistant", "content": "a", "loss": False}]}],
    )
    with pytest.raises(DataError, match=r"v.jsonl: none of 1 rows has label tokens"):
        source(tmp_path, 4, LoaderGeometry(), val_dataset=[val])


def test_rows_in_file_order_take_no_time_that_grows_with_their_number() -> None:
    """A list of 2^50 numbers would have no room; each row of a batch asks for its place by itself."""
    rows = 1 << 50
    assert EpochOrder(rows, False, 0).slice(5, 8).tolist() == [5, 6, 7]
    assert EpochOrder(rows, False, 0).slice(rows - 1, rows + 2).tolist() == [rows - 1, 0, 1]
    for start, stop in ((0, 0), (0, 20), (3, 4), (4, 6), (11, 19)):
        assert EpochOrder(5, False, 0).slice(start, stop).tolist() == [i % 5 for i in range(start, stop)]
