"""Pairs and labeled answers that are read as they are needed: the batches of stored data, what is skipped, ranks,
going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.errors import DataError
from megaswift.losses.contract import Batch
from tests.data.makers import jsonl
from tests.data.preference.test_documents import LONG, USELESS, pair, says, source, user

PAIRS = [pair(f"q {i}", "a " * (i % 5 + 1), "b " * (i % 3 + 1) + "c") for i in range(17)]
JUDGED = [{"messages": [user(f"q {i}"), says("a " * (i % 4 + 1))], "label": i % 3 == 0} for i in range(17)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaswift.data.stream.batches.BLOCK", 7)


def streamed(
    tmp_path: Path, rows: list[dict[str, Any]], geometry: LoaderGeometry, task: str = "dpo", **options: Any
) -> Any:
    return source(tmp_path, rows, geometry, task, streaming=True, **options)[0]


def assert_equal(ours: list[Batch], stored: list[Batch]) -> None:
    assert len(ours) == len(stored)
    for a, b in zip(ours, stored, strict=True):
        for name in ("input_ids", "labels", "loss_weights", "positions", "valid"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert a.fields.keys() == b.fields.keys() and all(
            torch.equal(t, b.fields[name]) for name, t in a.fields.items()
        )
        assert (a.cu_seqlens is None) == (b.cu_seqlens is None) or torch.equal(a.cu_seqlens, b.cu_seqlens)  # type: ignore[arg-type]


@pytest.mark.wide
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("task", "rows", "options"),
    [
        ("dpo", PAIRS, {}),
        ("rm", [{**row, "margin": i} for i, row in enumerate(PAIRS)], {}),
        ("orpo", PAIRS, {"prompt_labels": True}),
        ("cpo", LONG + PAIRS, {"max_length": 40, "truncation_strategy": "right"}),
        ("simpo", LONG + PAIRS, {"max_length": 40, "truncation_strategy": "left"}),
        ("dpo", LONG + PAIRS, {"max_length": 40}),
        ("kto", JUDGED, {}),
    ],
)
def test_batches_are_those_of_stored_data(
    task: str, rows: list[dict[str, Any]], options: dict[str, Any], packing: bool, tmp_path: Path
) -> None:
    """Over the end of an epoch too; what is left out for its length leaves no gap."""
    geometry = LoaderGeometry(per_device=2, accumulation=2, doc_multiple=2, row_multiple=4)
    stored = source(tmp_path, rows, geometry, task, packing=packing, **options)[0]
    ours = streamed(tmp_path, rows, geometry, task, packing=packing, **options)
    for _ in range(6):
        assert_equal(ours.next(), stored.next())
    assert {
        k: v for k, v in ours.stats.items() if k in ("deleted", "truncated")
    }.keys() == stored.data.docs.counted.keys() & {"deleted", "truncated"}


def test_rows_of_no_use_are_skipped_counted_and_leave_no_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [row for row, _ in USELESS if row["messages" if "messages" in row else "chosen"]]
    rows = [*PAIRS[:3], bad[0], *PAIRS[3:6], bad[1], {"messages": 3, "rejected_response": "x"}, *PAIRS[6:], bad[4]]
    geometry = LoaderGeometry(per_device=4)
    stored = source(tmp_path, rows, geometry, strict=False)[0]
    ours = streamed(tmp_path, rows, geometry, strict=False)
    capsys.readouterr()
    for _ in range(4):
        assert_equal(ours.next(), stored.next())
    told = {k: v for k, v in ours.stats.items() if k != "rows_read"}
    assert told == {"identical completions": 1, "an empty completion": 1, "malformed": 1, "two prompts": 1}
    said = capsys.readouterr().err
    assert (
        "d.jsonl:4: column" in said
        and "(1 rows skipped so far: identical completions)" in said
        and "d.jsonl:9: column messages" in said
    )


def test_or_stop_the_run_with_its_position_kept(tmp_path: Path) -> None:
    s = streamed(tmp_path, [*PAIRS[:5], USELESS[0][0], *PAIRS[5:]], LoaderGeometry(per_device=2))
    assert [s.next()[0].sample_ids.tolist() for _ in range(2)] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    state = s.state_dict()
    with pytest.raises(DataError, match="d.jsonl:6: column rejected_response"):
        s.next()
    assert s.state_dict() == state
    with pytest.raises(DataError, match="d.jsonl:1: column rejected_response"):  # before a pair of use: at once
        streamed(tmp_path, [USELESS[0][0], *PAIRS], LoaderGeometry())
    long = streamed(tmp_path, LONG, LoaderGeometry(), max_length=40, truncation_strategy="raise")
    long.next()
    with pytest.raises(DataError, match=r"d.jsonl:2: \d+ tokens, --max_length is 40"):
        long.next()


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_read_other_rows_and_go_on_anywhere(shuffle: bool, tmp_path: Path) -> None:
    rows = [*PAIRS[:4], USELESS[0][0], *PAIRS[4:]]
    options: dict[str, Any] = {"strict": False, "shuffle": shuffle}
    whole = streamed(tmp_path, rows, LoaderGeometry(0, 1, 4), **options)
    steps = [whole.next()[0].sample_ids[::2].tolist() for _ in range(9)]
    first = [i % 18 for step in steps for i in step][:17]
    assert sorted(first) == [i for i in range(18) if i != 4] and (first == sorted(first)) != shuffle
    halves = [streamed(tmp_path, rows, LoaderGeometry(r, 2, 2), **options) for r in (0, 1)]
    for k in range(5):
        one, other = (h.next()[0].sample_ids[::2].tolist() for h in halves)
        assert one + other == steps[k] and set(one).isdisjoint(other)
    later = streamed(tmp_path, rows, LoaderGeometry(0, 1, 4), **options)
    later.load_state_dict(json.loads(json.dumps(halves[1].state_dict())))
    assert [later.next()[0].sample_ids[::2].tolist() for _ in range(4)] == steps[5:]
    apart = streamed(tmp_path, rows, LoaderGeometry(), **{**options, "shuffle": not shuffle})
    with pytest.raises(DataError, match="--shuffle"):
        apart.load_state_dict(later.state_dict())
    unpacked = streamed(tmp_path, rows, LoaderGeometry(), **options, packing=False)
    unpacked.load_state_dict(later.state_dict())


def test_margins_are_for_all_rows_or_none(tmp_path: Path) -> None:
    for rows, said in ((({"margin": 1}, {}), "has no `margin`"), (({}, {"margin": 1}), "has a `margin`")):
        s = streamed(tmp_path, [pair("q", "a", "b", **more) for more in rows], LoaderGeometry())
        s.next()
        with pytest.raises(DataError, match=f"d.jsonl:2: {said}"):
            s.next()


def test_data_of_no_use_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no pair of a whole epoch is usable within --max_length 2048 .*: 40 identical completions"
    ):
        streamed(tmp_path, [pair("q", "a", "a")] * 40, LoaderGeometry(), strict=False)
    with pytest.raises(DataError, match="no row of a whole epoch is usable within --max_length 4 .*: 17 deleted"):
        streamed(tmp_path, JUDGED, LoaderGeometry(), "kto", max_length=4)
    val = jsonl(tmp_path / "v.jsonl", PAIRS[:3])
    s, held = source(
        tmp_path,
        PAIRS,
        LoaderGeometry(per_device=4),
        streaming=True,
        val_dataset=[val],
        dataset_cache_dir=str(tmp_path),
    )
    assert held is not None and len(held.data) == 3 and s.stats["rows_read"] == 0
