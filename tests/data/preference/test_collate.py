"""Batches of pairs and labeled answers: by hand, packed, on ranks, resumed, evaluated; KTO's rotation against TRL.

Covers: megaswift/data/preference/collate.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import KTOTrainer

from megaswift.data.batches.collate import PaddingShape
from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.preference.collate import kto_kl_batches, labeled_documents, previous_in_global_batch
from megaswift.errors import DataError
from tests.data.makers import tokenizer
from tests.data.preference.test_documents import pair, says, source, theirs, user


def by_hand(packing: bool, geometry: LoaderGeometry, tmp_path: Path, **options: Any) -> Any:
    rows = [pair("q", "a", "b c d"), pair("hello", "b c", "a")]
    return source(tmp_path, rows, geometry, packing=packing, **options)[0]


def test_a_batch_of_pairs_by_hand(tmp_path: Path) -> None:
    s = by_hand(False, LoaderGeometry(per_device=2, row_multiple=8), tmp_path)
    (b,) = s.next()
    docs = [s.data.docs.read(i) for i in range(4)]
    length = -(-max(len(d[0]) for d in docs) // 8) * 8
    assert b.input_ids.shape == (4, length) and b.cu_seqlens is None
    for row, (ids, mask) in enumerate(docs):
        n = len(ids)
        assert b.input_ids[row, :n].tolist() == ids.tolist() and b.valid[row].tolist() == [True] * n + [False] * (
            length - n
        )
        assert b.labels[row, : n - 1].tolist() == ids[1:].tolist()
        assert b.loss_weights[row].tolist() == [*mask[1:].tolist(), *[0] * (length - n + 1)]
    assert (
        b.fields["pairs"].tolist() == [[0, 1], [2, 3]]
        and b.fields["pairs"].dtype == torch.int64
        and set(b.fields) == {"pairs"}
    )
    assert b.sample_ids.tolist() == [0, 0, 1, 1]


def test_packed_a_micro_batch_is_one_row(tmp_path: Path) -> None:
    geometry = LoaderGeometry(per_device=2, doc_multiple=4, row_multiple=8)
    s = by_hand(True, geometry, tmp_path)
    (b,) = s.next()
    docs = [s.data.docs.read(i) for i in range(4)]
    sizes = [-(-len(d[0]) // 4) * 4 for d in docs]
    starts = [sum(sizes[:i]) for i in range(4)]
    assert b.cu_seqlens.tolist() == [*starts, -(-sum(sizes) // 8) * 8] and b.input_ids.shape == (1, b.cu_seqlens[-1])
    for (ids, mask), at in zip(docs, starts, strict=True):
        assert b.input_ids[0, at : at + len(ids)].tolist() == ids.tolist()
        assert b.loss_weights[0, at : at + len(ids)].tolist() == [*mask[1:].tolist(), 0]
        assert b.positions[0, at : at + len(ids)].tolist() == list(range(len(ids)))
    assert b.fields["pairs"].tolist() == [[0, 1], [2, 3]] and b.sample_ids.tolist() == [0, 0, 1, 1]
    assert b.tokens == sum(len(d[0]) for d in docs) and b.label_tokens == sum(d[1].sum() for d in docs)


def test_packing_changes_no_micro_batch(tmp_path: Path) -> None:
    rows = [pair(f"q {i}", "a " * (i % 5 + 1), "b " * (i % 3 + 1), margin=i) for i in range(12)]
    sources = [source(tmp_path, rows, LoaderGeometry(1, 2, 2, 2), packing=p, shuffle=True)[0] for p in (False, True)]
    for _ in range(3):
        for plain, packed in zip(*(s.next() for s in sources), strict=True):
            assert plain.sample_ids.tolist() == packed.sample_ids.tolist()
            assert plain.fields["margin"].tolist() == packed.fields["margin"].tolist() == plain.sample_ids[::2].tolist()
            assert packed.fields["margin"].dtype == torch.float32


def test_a_unit_without_weight_may_stand_anywhere(tmp_path: Path) -> None:
    for packing, pairs, numbers in ((True, [[0, 1]], [0, 0]), (False, [[2, 3]], [-1, -1, 0, 0])):
        data = by_hand(packing, LoaderGeometry(), tmp_path).data
        (b,) = data.batches([[(), data.read(0)]], PaddingShape(), False)
        assert b.fields["pairs"].tolist() == pairs and b.sample_ids.tolist() == numbers


def test_labels_of_prompts_and_what_is_completion(tmp_path: Path) -> None:
    for packing in (False, True):
        geometry = LoaderGeometry(per_device=2, doc_multiple=2)
        (plain,), (orpo,) = (by_hand(packing, geometry, tmp_path, prompt_labels=p).next() for p in (False, True))
        assert torch.equal(orpo.fields["completion"], plain.loss_weights)
        assert torch.equal(orpo.input_ids, plain.input_ids) and torch.equal(orpo.fields["pairs"], plain.fields["pairs"])
        ends = (
            torch.roll(plain.valid, -1, dims=1)
            & plain.valid
            & (torch.roll(plain.positions, -1, dims=1) > plain.positions)
        )
        assert torch.equal(orpo.loss_weights > 0, ends)


@pytest.mark.parametrize("packing", [False, True])
def test_steps_for_pipelines_have_one_length(tmp_path: Path, packing: bool) -> None:
    rows = [pair(f"q {i}", "a " * (i + 1), "b") for i in range(8)]
    s = source(
        tmp_path, rows, LoaderGeometry(per_device=2, accumulation=4, row_multiple=4, uniform=True), packing=packing
    )[0]
    lengths = {b.input_ids.shape[1] for b in s.next()}
    assert len(lengths) == 1 and lengths.pop() % 4 == 0


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_evaluation_takes_every_unit_once(tmp_path: Path, packing: bool, task: str) -> None:
    labeled = [{"messages": [user(f"q {i}"), says("a")], "label": i % 2 == 0} for i in range(14)]
    rows = [pair(f"q {i}", "a", "b c") for i in range(14)] if task == "dpo" else labeled
    numbers: list[int] = []
    for rank in range(2):
        held = source(tmp_path, rows, LoaderGeometry(rank, 2, 2), task, split_dataset_ratio=0.5, packing=packing)[1]
        assert held is not None
        for (b,) in held.eval_batches():
            field, documents = ("pairs", 2) if task == "dpo" else ("examples", 1)
            count = b.cu_seqlens.numel() - 1 if packing else b.input_ids.shape[0]
            assert len(b.sample_ids) == count and (not packing or count == max(1, documents * len(b.fields[field])))
            numbers += b.sample_ids[b.fields[field].view(-1)].tolist()
            assert (b.sample_ids >= 0).sum() == documents * len(b.fields[field])
            if task == "kto":
                assert b.fields["label"].shape == (count,) and b.fields["label"].dtype == torch.bool
                assert b.fields["label"][b.fields["examples"]].tolist() == [
                    i % 2 == 0 for i in b.sample_ids[b.fields["examples"]].tolist()
                ]
            if not len(b.fields[field]):
                assert (
                    b.tokens == 0 and b.label_tokens == 0 and b.fields["pairs"].shape == (0, 2)
                    if task == "dpo"
                    else True
                )
    assert sorted(set(numbers)) == sorted(numbers[::2] if task == "dpo" else numbers) and len(set(numbers)) == 7


def test_resume_and_ranks_are_those_of_rows(tmp_path: Path) -> None:
    rows = [pair(f"q {i}", "a", "b") for i in range(10)]
    one = source(tmp_path, rows, LoaderGeometry(per_device=4), shuffle=True)[0]
    first = one.next()
    state = json.loads(json.dumps(one.state_dict()))
    assert state["rows_taken"] == 4 and one.rows == 10 and one.stats["pairs"] == 10 and one.stats["documents"] == 20
    halves = [source(tmp_path, rows, LoaderGeometry(r, 2, 2), shuffle=True)[0] for r in (0, 1)]
    for h in halves:
        h.load_state_dict(state)
    assert one.next()[0].sample_ids.tolist() == [i for h in halves for i in h.next()[0].sample_ids.tolist()]
    assert len(first) == 1
    with pytest.raises(DataError, match="10 pairs, fewer than one global batch of 12"):
        source(tmp_path, rows, LoaderGeometry(per_device=12))
    other = source(tmp_path, [pair(f"q {i}", "a", "c") for i in range(10)], LoaderGeometry(per_device=4), shuffle=True)[
        0
    ]
    with pytest.raises(DataError, match="the data set"):
        other.load_state_dict(state)


KTO = [
    {"prompt": [user(q)], "completion": [says(a)], "label": label}
    for q, a, label in (
        ("hello", "The capital", True),
        ("what is", "a b c d", False),
        ("q", "Paris", True),
        ("hello world how", "x", True),
        ("z", "y z", False),
    )
]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_mismatched_is_trls_rotation(tmp_path: Path, packing: bool, size: int) -> None:
    count = len(KTO) // size * size
    expected = theirs(KTOTrainer, KTO[:count], tokenizer("qwen", "bare"), size)
    s = source(
        tmp_path, KTO[:count], LoaderGeometry(per_device=size, doc_multiple=2, row_multiple=4), "kto", packing=packing
    )[0]
    for step in range(count // size):
        batches = s.next()
        (b,) = kto_kl_batches(batches, s.shape, 64)
        assert (b.cu_seqlens is not None) == packing and b.input_ids.shape[1] % 4 == 0
        for i, e in enumerate(expected[step * size : (step + 1) * size]):
            row, at = (0, int(b.cu_seqlens[i])) if packing else (i, 0)
            ids, n = e["prompt_ids"] + e["KL_completion_ids"], len(e["prompt_ids"])
            assert b.input_ids[row, at : at + len(ids)].tolist() == ids and b.valid[row, at : at + len(ids)].all()
            assert b.loss_weights[row, at : at + len(ids)].tolist() == [0] * (n - 1) + [1] * len(
                e["KL_completion_ids"]
            ) + [0]
        assert b.fields["examples"].tolist() == batches[0].fields["examples"].tolist()
        assert b.sample_ids.tolist() == batches[0].sample_ids.tolist()


def test_mismatched_leaves_fillers_alone_cuts_and_keeps_one_length(tmp_path: Path) -> None:
    held = source(tmp_path, KTO * 2, LoaderGeometry(per_device=4), "kto", split_dataset_ratio=0.5, packing=True)[1]
    steps = [b for step in held.eval_batches() for b in step]
    again = kto_kl_batches(steps, PaddingShape(), 64, uniform=True)
    assert len({b.input_ids.shape[1] for b in again}) == 1
    assert [b.fields["examples"].tolist() for b in again] == [[0, 1, 2, 3], [0]]
    assert again[1].label_tokens == steps[1].label_tokens  # alone, it keeps its own completion
    filler = replace(held, data=held.data, geometry=LoaderGeometry(1, 2, 4))
    assert [kto_kl_batches(step, PaddingShape(), 64)[0].tokens for step in filler.eval_batches()] == [
        held.data.docs.length[4:].sum()
    ]
    assert max(int(torch.diff(b.cu_seqlens).max()) for b in kto_kl_batches(steps, PaddingShape(), 9)) == 9


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("ranks", "per_device"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_mismatched_over_the_global_batch_is_one_rotation_in_every_layout(
    tmp_path: Path, packing: bool, ranks: int, per_device: int
) -> None:
    """TRL's rotation of one micro-batch with all rows of the step."""
    expected = theirs(KTOTrainer, KTO[:4], tokenizer("qwen", "bare"), 4)
    sources = [
        source(
            tmp_path,
            KTO[:4],
            LoaderGeometry(rank, ranks, per_device, 4 // ranks // per_device),
            "kto",
            packing=packing,
        )[0]
        for rank in range(ranks)
    ]
    steps = [s.next() for s in sources]
    documents = [labeled_documents(step) for step in steps]
    seen: list[list[int] | None] = [None] * 4
    for rank, step in enumerate(steps):
        turned = kto_kl_batches(step, sources[0].shape, 64, answers=previous_in_global_batch(documents, rank))
        for batch, own in zip(turned, step, strict=True):
            assert batch.fields["examples"].tolist() == own.fields["examples"].tolist()
            for ids, _, number in labeled_documents([batch])[0]:
                seen[number] = ids.tolist()
    assert seen == [e["prompt_ids"] + e["KL_completion_ids"] for e in expected]


def test_a_row_alone_in_a_global_batch_has_no_mismatched_pair(tmp_path: Path) -> None:
    held = source(tmp_path, KTO * 2, LoaderGeometry(0, 1, 1, 4), "kto", split_dataset_ratio=0.5, packing=True)[1]
    whole, last = replace(held, geometry=LoaderGeometry(0, 1, 1, 4)).eval_batches()
    for step, count in ((whole, 4), (last, 0)):
        answers = previous_in_global_batch([labeled_documents(step)], 0)
        turned = kto_kl_batches(step, PaddingShape(), 64, answers=answers)
        assert sum(len(b.fields["examples"]) for b in turned) == count
