"""Streams of rows: resume on any number of ranks, the part of a pass, rows of no use, the same tokens as stored.

Covers: megaswift/data/stream/cursor.py, megaswift/data/stream/rows.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources
from megaswift.data.sources.files import DatasetFiles
from megaswift.data.stream.cursor import Cursor, StreamFractionalEpoch, read_from_cursor, sampled_files_fingerprint
from megaswift.errors import DataError
from tests.data.batches.test_loader import ids_of, source
from tests.data.makers import chat, config, jsonl, tokenizer


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_streams_resume_on_any_number_of_ranks(
    tmp_path: Path, packing: bool, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaswift.data.stream.batches.BLOCK", 7)
    options: dict[str, Any] = {"streaming": True, "shuffle": shuffle, "packing": packing, "max_length": 512}
    whole = source(tmp_path, 17, LoaderGeometry(0, 1, 4), **options)[0]
    steps = [ids_of(whole.next()) for _ in range(7)]
    if not packing:
        flat = [i % 17 for s in steps for i in s]
        assert sorted(flat[:17]) == list(range(17)) and (flat == [i % 17 for i in range(28)]) != shuffle
    halves = [source(tmp_path, 17, LoaderGeometry(r, 2, 2), **options)[0] for r in (0, 1)]
    for k in range(3):
        assert [i for h in halves for i in ids_of(h.next())] == steps[k]
    later = source(tmp_path, 17, LoaderGeometry(0, 1, 4), **options)[0]
    later.load_state_dict(json.loads(json.dumps(halves[1].state_dict())))
    assert [ids_of(later.next()) for _ in range(4)] == steps[3:]


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"packing": True, "max_length": 128}], ids=str)
def test_a_stream_tells_the_part_of_a_pass(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaswift.data.stream.batches.BLOCK", 7)
    jsonl(tmp_path / "d.jsonl", [chat(str(i), "a") for i in range(10)])  # rows of equal bytes
    s = source(tmp_path, 10, LoaderGeometry(per_device=1), streaming=True, **options)[0]
    rows, epochs = 0, [s.epoch]
    while rows < 30:
        rows += len({i for i in ids_of(s.next()) if i >= 0})
        epochs.append(s.epoch)
        if not options.get("packing"):
            assert s.epoch == pytest.approx(rows / 10, abs=1e-12)
    assert epochs[0] == 0 and epochs == sorted(epochs) and len(set(epochs)) == len(epochs)
    assert {1.0, 2.0, 3.0} <= set(epochs)
    again = source(tmp_path, 10, LoaderGeometry(per_device=1), streaming=True, **options)[0]
    again.load_state_dict(json.loads(json.dumps(s.state_dict())))
    assert again.epoch == s.epoch


def test_other_files_have_another_fingerprint(tmp_path: Path) -> None:
    """Another byte at the beginning, middle or end of a large file; another size or name of any of many files."""

    def sources(folder: str, count: int = 200) -> list[DatasetFiles]:
        (tmp_path / folder).mkdir(exist_ok=True)
        files = [tmp_path / folder / f"{i}.jsonl" for i in range(count)]
        for i, file in enumerate(files):
            if not file.exists():
                file.write_bytes(bytes(range(256)) * (4096 if i == 0 else 1))
        return [DatasetFiles("a", tuple(files[:2])), DatasetFiles("b", tuple(files[2:]), rows=7)]

    here, large = sampled_files_fingerprint(sources("here")), tmp_path / "there/0.jsonl"
    assert here == sampled_files_fingerprint(sources("there")) and here.startswith("200 files of 1,099,520 bytes, ")
    seen, content = {here}, large.read_bytes()
    for place in (0, len(content) // 7, len(content) - 1):
        large.write_bytes(content[:place] + b"\xff\xfe"[content[place] == 255 :][:1] + content[place + 1 :])
        seen.add(sampled_files_fingerprint(sources("there")))
    large.write_bytes(content)
    (tmp_path / "there/137.jsonl").write_bytes(b"longer" * 99)
    seen |= {sampled_files_fingerprint(sources("there")), sampled_files_fingerprint(sources("here", 199))}
    seen.add(sampled_files_fingerprint([replace(s, rows=8) for s in sources("here")]))
    assert len(seen) == 7 and source(tmp_path, 9, LoaderGeometry(), streaming=True)[0].data_fingerprint not in seen


def test_the_part_of_a_pass_by_rows_bytes_and_files(tmp_path: Path) -> None:
    rows = [{"text": str(i)} for i in range(4)]
    lines, columns, table = tmp_path / "d.jsonl", tmp_path / "d.parquet", tmp_path / "d.csv"
    jsonl(lines, rows)
    pq.write_table(pa.Table.from_pylist(rows), columns)
    table.write_text("text\n0\n1\n2\n3\n")

    def parts(*sources: DatasetFiles) -> list[float]:
        cursors = (cursor for _, _, cursor in read_from_cursor(sources, Cursor()))
        return [StreamFractionalEpoch(sources).at(cursor) for cursor in islice(cursors, 8)]

    quarters = pytest.approx([0.25 * n for n in range(1, 9)])
    assert parts(DatasetFiles("", (lines,))) == quarters and parts(DatasetFiles("", (columns,))) == quarters
    assert parts(DatasetFiles("", (lines,), 8)) == pytest.approx([n / 8 for n in range(1, 9)])
    assert parts(DatasetFiles("", (lines,), 2), DatasetFiles("", (columns,), 2)) == quarters
    assert parts(DatasetFiles("", (table,)))[:5] == [0, 0, 0, 0, 1]
    a, b = lines.stat().st_size, columns.stat().st_size
    assert parts(DatasetFiles("", (lines, columns))) == pytest.approx(
        [*(n * a / 4 / (a + b) for n in range(1, 5)), *((a + n * b / 4) / (a + b) for n in range(1, 5))]
    )
    assert set(parts(DatasetFiles("", (lines,), 2), DatasetFiles("", (columns,)))) == {0, 1}


def test_a_stream_stops_at_a_malformed_row_with_its_position_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.jsonl"
    jsonl(path, [chat(str(i), "a") for i in range(5)] + [{"messages": 3}] + [chat("x", "y")] * 3)
    s = source(tmp_path, 0, LoaderGeometry(per_device=2), streaming=True, shuffle=False)[0]
    assert [ids_of(s.next()) for _ in range(2)] == [[0, 1], [2, 3]]
    state = s.state_dict()
    with pytest.raises(
        DataError, match=r"d.jsonl:6: column messages(.|\n)*try: correct the row, or give --strict false(.|\n)*latest"
    ):
        s.next()
    assert s.state_dict() == state
    jsonl(path, [chat("q", "a") | {"messages": [chat("q", "a")["messages"][0]]}, {"messages": 3}, chat("x", "y")])
    # before a row of use: at once
    with pytest.raises(DataError, match=r"(?s)d.jsonl:2: column messages.*correct the row, or give --strict"):
        source(tmp_path, 0, LoaderGeometry(), streaming=True)
    jsonl(path, [chat(str(i), "a") for i in range(5)] + [{"messages": 3}] + [chat("x", "y")] * 3)
    lenient = source(tmp_path, 0, LoaderGeometry(per_device=2), streaming=True, shuffle=False, strict=False)[0]
    assert capsys.readouterr().err == ""  # the look at the first rows tells nothing of them
    assert [ids_of(lenient.next()) for _ in range(3)][2] == [4, -1]
    assert lenient.stats["malformed"] == 1
    told = capsys.readouterr().err
    assert told.count("d.jsonl:6: column messages") == 1 and "(1 rows skipped so far)" in told


def test_a_stream_without_a_label_is_refused(tmp_path: Path) -> None:
    question, answer = chat("q", "a")["messages"]
    jsonl(tmp_path / "d.jsonl", [{"messages": [question, answer | {"loss": False}]}] * 3)
    with pytest.raises(DataError, match="d.jsonl: none of 3 rows has label tokens"):
        source(tmp_path, 0, LoaderGeometry(), streaming=True)
    jsonl(tmp_path / "d.jsonl", [{"messages": 3}] * 3)
    with pytest.raises(DataError, match="d.jsonl: none of its 3 rows is valid"):
        source(tmp_path, 0, LoaderGeometry(), streaming=True, strict=False)
    silent = {"messages": [question, answer | {"loss": False}]}
    jsonl(tmp_path / "d.jsonl", [silent] * 300 + [chat("q", "a")])
    assert source(tmp_path, 0, LoaderGeometry(), streaming=True)[0].stats["rows_read"] == 0


def test_streamed_tokens_are_the_stored_ones(tmp_path: Path) -> None:
    stored = source(tmp_path, 9, LoaderGeometry(per_device=3), shuffle=False)[0]
    streamed = source(tmp_path, 9, LoaderGeometry(per_device=3), shuffle=False, streaming=True)[0]
    for _ in range(4):
        for a, b in zip(stored.next(), streamed.next(), strict=True):
            assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.loss_weights, b.loss_weights)


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_without_a_usable_row_is_refused(
    tmp_path: Path, packing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"streaming": True, "packing": packing, "shuffle": False, "truncation_strategy": "delete"}
    jsonl(tmp_path / "d.jsonl", [chat("q", "word " * 200)] * 3 + [chat("q", "a")])
    s = source(tmp_path, 0, LoaderGeometry(per_device=4), max_length=128, **options)[0]
    assert [i for i in ids_of(s.next()) if i >= 0][:1] == [3] and s.stats["deleted"] >= 3
    assert capsys.readouterr().err.count("deleted") == 1
    with pytest.raises(DataError, match="no row of a whole epoch.*--max_length 4 "):
        source(tmp_path, 0, LoaderGeometry(), max_length=4, **options)
    # what stops it at its first row stops it now
    with pytest.raises(DataError, match=r"row 1: \d+ tokens, --max_length is 128"):
        source(tmp_path, 0, LoaderGeometry(), max_length=128, **options | {"truncation_strategy": "raise"})
    if packing:
        s.contents.options = replace(s.options, max_length=4)
        s._block = None
        with pytest.raises(DataError, match="no row of a whole epoch"):
            s.next()


def test_a_stream_resumes_with_the_same_options_only(tmp_path: Path) -> None:
    state = source(tmp_path, 9, LoaderGeometry(), streaming=True)[0].state_dict()
    for options, said in (
        ({"data_seed": 9}, "--data_seed"),
        ({"shuffle": False}, "--shuffle was True in the checkpoint, but is False now"),
        ({"packing": True}, "--packing"),
        ({"max_length": 99}, "--max_length"),
        ({"truncation_strategy": "right"}, "--truncation_strategy"),
    ):
        other = source(tmp_path, 9, LoaderGeometry(), streaming=True, **options)[0]
        with pytest.raises(DataError, match=said):
            other.load_state_dict(state)
        other.load_state_dict({k: v for k, v in state.items() if k != "options"})


def test_a_stream_splits_only_into_packed_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a b c"}])
    cfg = config(tmp_path, path, "pt", streaming=True, truncation_strategy="split", packing=False)
    with pytest.raises(DataError, match="only the first piece"):
        build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen"), LoaderGeometry(), "pt")
