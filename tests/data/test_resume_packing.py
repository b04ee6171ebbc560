"""Resuming packed rows under another layout: over the resume, every row of an epoch comes exactly once. Counted by
sample ids, which collating takes from the rows themselves.

Covers: megaswift/data/resume_check.py, megaswift/data/batches/repacking.py.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.errors import DataError
from tests.data.batches.test_loader import ids_of, source
from tests.data.makers import chat, config, jsonl

CP1, CP2 = LoaderGeometry(per_device=1), LoaderGeometry(per_device=1, doc_multiple=4, row_multiple=4)
CP4 = LoaderGeometry(per_device=1, doc_multiple=8, row_multiple=8)
ROWS = 240


def made(folder: Path, geometry: LoaderGeometry, **options: Any) -> Any:
    if not (path := folder / "d.jsonl").exists():
        jsonl(path, [chat(f"hello {i}", "answer " * (1 + i * 7 % 61)) for i in range(ROWS)])
    options = {"packing": True, "max_length": 512} | options
    return source(folder, ROWS, geometry, **options)[0]


def through(state: Any) -> Any:
    return json.loads(json.dumps(state))


def rest_of_epoch(s: Any, seen: Counter[int], epochs: int = 1) -> None:
    while s.epoch < epochs - 1e-9:
        seen.update(i for i in ids_of(s.next()) if i >= 0)


def each(times: int) -> dict[int, int]:
    return dict.fromkeys(range(ROWS), times)


@pytest.mark.wide
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    "layouts",
    [(CP1, CP2), (CP2, CP1), (CP1, CP2, CP1), (CP2, CP4, CP4, CP1), (CP1, CP4, CP2, CP1)],
    ids=["1-2", "2-1", "1-2-1", "2-4-4-1", "1-4-2-1"],
)
def test_every_row_comes_once_over_resumes_on_other_layouts(
    layouts: tuple[LoaderGeometry, ...], shuffle: bool, tmp_path: Path
) -> None:
    seen: Counter[int] = Counter()
    s = made(tmp_path, layouts[0], shuffle=shuffle)
    for geometry in layouts[1:]:
        for _ in range(7):
            seen.update(ids_of(s.next()))
        before = s.state_dict()
        s = made(tmp_path, geometry, shuffle=shuffle)
        s.load_state_dict(through(before))
    assert len(seen) < ROWS
    left = s.steps_left(1.0)
    rest_of_epoch(s, seen)
    assert seen == each(1) and s.steps_left(1.0) == 0 and left > 0
    rest_of_epoch(s, seen, epochs=2)
    assert seen == each(2)


def test_in_the_second_epoch_and_at_its_begin(tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    s = made(tmp_path, CP1)
    rest_of_epoch(s, seen)
    for _ in range(2):
        again = made(tmp_path, CP2)
        again.load_state_dict(through(s.state_dict()))
        mine = Counter(seen)
        rest_of_epoch(again, mine, epochs=2)
        assert mine == each(2)
        for _ in range(5):
            seen.update(ids_of(s.next()))


@pytest.mark.parametrize("threads", [0, 2])
def test_a_global_batch_over_the_end_of_the_rest(tmp_path: Path, threads: int) -> None:
    """Two data-parallel ranks of two micro-batches, read ahead; the rest of the epoch and the next share a step."""
    s, seen = made(tmp_path, CP1), Counter()
    for _ in range(5):
        seen.update(ids_of(s.next()))
    ranks = []
    for r in (0, 1):
        ranks.append(made(tmp_path, LoaderGeometry(r, 2, 1, 2, 4, 4), dataloader_num_workers=threads))
        ranks[-1].load_state_dict(through(s.state_dict()))
    while ranks[0].epoch < 2:
        for rank in ranks:
            seen.update(ids_of(rank.next()))
    assert all(2 <= seen[i] <= 3 for i in range(ROWS)) and min(seen.values()) == 2
    assert ranks[0].state_dict() == ranks[1].state_dict() and "rest" not in ranks[0].state_dict()


def test_packing_switched_off_and_another_length_of_rows(tmp_path: Path) -> None:
    for change in ({"packing": False}, {"max_length": 640}):
        s, seen = made(tmp_path, CP1), Counter()
        for _ in range(6):
            seen.update(ids_of(s.next()))
        t = made(tmp_path, CP2, **change)
        t.load_state_dict(through(s.state_dict()))
        rest_of_epoch(t, seen)
        assert seen == each(1), change


def test_what_an_older_version_saved_goes_on_with_its_own_rows_only(tmp_path: Path) -> None:
    s = made(tmp_path, CP1)
    s.next()
    state = {k: v for k, v in s.state_dict().items() if k not in ("packing", "documents", "data_sets")}
    again = made(tmp_path, CP1)
    again.load_state_dict(through(state))
    assert ids_of(again.next()) == ids_of(s.next())
    with pytest.raises(DataError, match=r"packed for another layout\n    try: use --cp"):
        made(tmp_path, replace(CP4, doc_multiple=64)).load_state_dict(through(state))


def test_a_packed_stream_refuses_another_layout_within_a_block(tmp_path: Path) -> None:
    s = made(tmp_path, CP1, streaming=True)
    s.next()
    state = through(s.state_dict())
    made(tmp_path, CP1, streaming=True).load_state_dict(state)
    with pytest.raises(DataError, match=r"padded to 1 tokens, now 4(.|\n)*try: use --cp"):
        made(tmp_path, CP2, streaming=True).load_state_dict(state)


def test_what_differs_in_the_data_is_named(tmp_path: Path) -> None:
    s = made(tmp_path, CP1)
    state = through(s.state_dict())
    with pytest.raises(DataError, match=r"240 documents in the checkpoint, now \d+ \(max_length"):
        made(tmp_path, CP1, max_length=110, truncation_strategy="delete").load_state_dict(state)
    jsonl(tmp_path / "d.jsonl", [chat(f"hello {i}", "answer " * (1 + i * 7 % 11)) for i in range(ROWS - 1)])
    with pytest.raises(DataError, match=r"d.jsonl has other content: 240 rows in the checkpoint, now 239, "):
        made(tmp_path, CP1).load_state_dict(state)
    jsonl(tmp_path / "e.jsonl", [chat("a", "b")] * 300)
    from megaswift.data.build import build_train_and_eval_sources
    from tests.data.makers import tokenizer

    cfg = config(tmp_path, str(tmp_path / "d.jsonl"), packing=True, max_length=512)
    cfg = cfg.replace(dataset=(str(tmp_path / "d.jsonl"), str(tmp_path / "e.jsonl")))
    two = build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), CP1)[0]
    with pytest.raises(
        DataError, match=r"the data sets were .*d.jsonl in the checkpoint, but are .*d.jsonl, .*e.jsonl now"
    ):
        two.load_state_dict(state)
