"""Rows that no reader can turn into text: named with their place, skipped and counted, alike in streams and workers.

Covers: megaswift/data/formats/query_response.py, megaswift/data/sources/json_text.py,
megaswift/data/sources/readers.py, megaswift/data/tokenize_worker.py.
"""

from __future__ import annotations

import csv
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources, load_document_splits
from megaswift.data.sources import readers
from megaswift.data.sources.json_text import MOST_NESTED
from megaswift.data.untokenized_sample import RowError
from megaswift.errors import DataError
from tests.data.makers import chat, config, jsonl, tokenizer

GOOD = chat("hello 0", "answer 0")
DIGITS = sys.get_int_max_str_digits() + 1
DEEP = 100_000


def row(answer: str) -> str:
    """A line whose answer is this JSON text."""
    return '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ' + answer + "}]}"


BROKEN: list[tuple[bytes, str]] = [
    (row(r'"b \ud83d"').encode(), r"messages[1].content: \ud83d at character 3 is an unpaired surrogate"),
    (row(r'"b \uD83D \ude00"').encode(), r"messages[1].content: \ud83d at character 3"),
    (rb'{"messages": [], "id\udc00": 1}', r"\udc00 at character 3"),
    (b'{"n": ' + b"7" * DIGITS + b"}", "an integer of more than 4,300 digits"),
    (b'{"n": ' + b"[" * DEEP + b"]" * DEEP + b"}", f"nested too deeply; expected at most {MOST_NESTED} levels"),
    (b'{"n": ' + b"[" * 300 + b"]" * 300 + b"}", "nested too deep"),
    (b'{"messages": "a\tb"}', """character 16: not JSON: Invalid control character near '{"messages": "a\\tb"}'"""),
    (b'{"messages": [', "not JSON: Expecting value near '{\"messages\": ['"),
    (b'{"messages": "\xff"}', "byte 15: not UTF-8"),
    (b'{"messages": "\0"}', "a NUL byte"),
]


def lines(path: Path, *rows: bytes) -> str:
    path.write_bytes(b"\n".join(rows) + b"\n")
    return str(path)


def good() -> bytes:
    return json.dumps(GOOD).encode()


def counted(tmp_path: Path, path: str, task: str = "sft", **options: Any) -> tuple[int, dict[str, int]]:
    cfg = config(tmp_path, path, task, **{"strict": False, "max_length": 8192, **options})
    docs, _ = load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), task)
    return len(docs), {name: count for name, count in docs.counted.items() if count}


@pytest.mark.parametrize(("line", "said"), BROKEN)
def test_a_broken_line_names_its_place(tmp_path: Path, line: bytes, said: str) -> None:
    path = lines(tmp_path / "d.jsonl", good(), line, good())
    cfg = config(tmp_path, path)
    with pytest.raises(DataError) as e:
        load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"))
    assert "d.jsonl:2: " in str(e.value) and said in str(e.value)
    assert "--strict false" in str(e.value) and len(str(e.value)) < 700


def test_broken_lines_are_skipped_and_counted_in_files_and_streams(tmp_path: Path, capsys: Any) -> None:
    path = lines(tmp_path / "d.jsonl", good(), *(line for line, _ in BROKEN), good())
    assert counted(tmp_path, path) == (2, {"rows": 2, "malformed": len(BROKEN)})
    assert f"{len(BROKEN)} malformed rows skipped (--strict false)" in capsys.readouterr().err
    cfg = config(tmp_path, path, strict=False, streaming=True)
    source, _ = build_train_and_eval_sources(
        cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), LoaderGeometry(per_device=12)
    )
    source.next()
    assert source.stats["malformed"] == len(BROKEN)
    strict = config(tmp_path, lines(tmp_path / "e.jsonl", BROKEN[0][0], good()), streaming=True)
    with pytest.raises(DataError, match=r"e.jsonl:1: messages\[1\].content: .* unpaired surrogate"):
        build_train_and_eval_sources(strict.data, strict.train, tokenizer("qwen", "qwen2_5"), LoaderGeometry())


@pytest.mark.process
def test_worker_processes_tell_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaswift.data.tokenization.WORKER_BYTES", 1)
    path = lines(tmp_path / "d.jsonl", *[good()] * 1500, *(line for line, _ in BROKEN), *[good()] * 1500)
    said = []
    for processes in (1, 2):
        cfg = config(tmp_path / str(processes), path, dataset_num_proc=processes)
        with pytest.raises(DataError) as e:
            load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"))
        said.append(str(e.value))
    assert said[0] == said[1] and "d.jsonl:1501 and 1 more like it: messages[1].content" in said[0]
    assert counted(tmp_path / "3", path, dataset_num_proc=2) == (3000, {"rows": 3000, "malformed": len(BROKEN)})


def test_items_of_a_json_list(tmp_path: Path) -> None:
    """Syntax ends the file, with line and column; an item that cannot be text is skipped by itself."""
    items = [line.decode() for line, _ in (*BROKEN[:2], *BROKEN[3:6])]
    (tmp_path / "a.json").write_text("[" + ", ".join([json.dumps(GOOD), *items, json.dumps(GOOD), "7"]) + "]")
    assert counted(tmp_path, str(tmp_path / "a.json")) == (2, {"rows": 2, "malformed": len(items) + 1})
    (tmp_path / "b.json").write_bytes(b"[" + good() + b',\n{"messages": "\xff"}]')
    assert counted(tmp_path, str(tmp_path / "b.json")) == (1, {"rows": 1, "malformed": 1})
    (tmp_path / "c.json").write_text('{"rows": ' + "[" * DEEP + "]" * DEEP + "}")
    with pytest.raises(DataError, match="c.json: lists or objects nested too deep"):
        counted(tmp_path, str(tmp_path / "c.json"))
    (tmp_path / "d.json").write_text('[{"a":\n "b\n"}]')
    with pytest.raises(DataError, match=r"d.json:2:4: not JSON: Invalid control character near"):
        counted(tmp_path, str(tmp_path / "d.json"))


def test_deep_json_is_split_as_json_reads_it() -> None:
    values = [{"a": '],[{"\\" x'}, {"b": [1, {"c": "}"}]}, {}, {"d": [[]]}]
    for text in (json.dumps(values), json.dumps(values, indent=2), "[]"):
        found = readers.json_text.split_json_list(text)
        assert found is not None and [json.loads(item) for item in found] == (values if text != "[]" else [])
    assert readers.json_text.split_json_list("{}") is None


CSV = [
    (b"query,response\na,b\nc\0,d\ne,f\n", 2, ":3: column query: a NUL byte"),
    (b"query,response\na,b\nc,\xff\ne,f\n", 2, ":3: column response: not UTF-8"),
    (b'query,response\na,b\nc,"open\ne,f\n', 1, ":3: lines 3 to 4: an opening quote that is not closed"),
    (b'query,response\na,b\n"c"x,d\ne,f\n', 2, ":3: row: not CSV: ',' expected after '\"'"),
    (b"query,response\na,b\nc,d,e\ne,f\n", 2, ":3: row: 3 cells; expected 2"),
    (b"\xef\xbb\xbf\n\nquery,response\na,b\n", 1, ""),
    ("query,response\na,b\n".encode("utf-16"), None, ":1: is not UTF-8"),
    (b"query,response,query\na,b,c\n", None, ":1: two columns are named query"),
]


@pytest.fixture(autouse=True)
def _cells() -> Any:
    """The limit of the csv module is the process's."""
    before = csv.field_size_limit()
    yield
    csv.field_size_limit(before)


@pytest.mark.parametrize(("content", "kept", "said"), CSV)
def test_csv(tmp_path: Path, content: bytes, kept: int | None, said: str) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(content)
    cfg = config(tmp_path, str(path))
    if said:
        with pytest.raises(DataError) as e:
            load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"))
        assert "d.csv" + said in str(e.value)
    if kept is not None:
        assert counted(tmp_path, str(path)) == (kept, {"rows": kept} | ({"malformed": 1} if said else {}))


def test_a_cell_beyond_every_size_is_an_open_quote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MOST_CELL", 100)
    (tmp_path / "d.csv").write_text("query,response\na," + "b" * 200 + "\nc,d\n")
    assert counted(tmp_path, str(tmp_path / "d.csv")) == (1, {"rows": 1, "malformed": 1})


def test_text_lines(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_bytes(b"hello\nw\xffrld\nn\0l\nworld\n")
    assert counted(tmp_path, str(tmp_path / "d.txt"), "pt") == (2, {"rows": 2, "malformed": 2})


def test_packed_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl.gz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"\.gz files are not supported\n    try: gunzip d.jsonl.gz, then d.jsonl"):
        counted(tmp_path, str(tmp_path / "d.jsonl.gz"))


def parquet(rows: int = 40, group: int = 16) -> bytes:
    buffer = io.BytesIO()
    table = [chat(f"hello {i} " * 20, f"answer {i} " * 20) for i in range(rows)]
    pq.write_table(pa.Table.from_pylist(table), buffer, row_group_size=group)
    return buffer.getvalue()


def test_damaged_parquet_pages_name_their_rows(tmp_path: Path) -> None:
    """The first group's pages are damaged; the rows of the others are read."""
    whole = parquet()
    path = tmp_path / "d.parquet"
    path.write_bytes(whole)
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    damaged = bytearray(whole)
    for at in range(begin + 30, begin + 60):
        damaged[at] ^= 0xFF
    path.write_bytes(damaged)
    cfg = config(tmp_path, str(path))
    with pytest.raises(DataError, match=r"d.parquet:1 and 9 more like it: row: damaged Parquet data \("):
        load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"))
    assert counted(tmp_path, str(path)) == (24, {"rows": 24, "malformed": 16})
    rows = list(readers.READERS["parquet"](path, 10, 20, 1))
    assert [r.line for r in rows] == list(range(11, 21))
    assert [isinstance(r.row, RowError) for r in rows] == [True] * 6 + [False] * 4


def test_mutated_parquet_never_ends_in_another_error(tmp_path: Path) -> None:
    whole, rng, path = parquet(), random.Random(0), tmp_path / "d.parquet"
    seen = {"refused": 0, "rows": 0}
    for _ in range(200):
        mutated = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        path.write_bytes(mutated)
        try:
            count = readers.count_rows(path, "parquet")
            assert len(list(readers.READERS["parquet"](path, 0, count, 1))) == count
            seen["rows"] += 1
        except DataError:
            seen["refused"] += 1
    assert min(seen.values()) > 20


def test_nothing_is_wrong_with_whole_characters(tmp_path: Path) -> None:
    r"""Pairs as escapes, escaped backslashes before `ud83d`, depth and digits up to the limits."""
    texts = [r'"\ud83d\ude00"', r'"\\ud83d"', '"' + "7" * 5000 + '"', '"' + "[" * 500 + '"']
    path = lines(tmp_path / "d.jsonl", *(row(text).encode() for text in texts))
    deep = '{"n": ' + "[" * (MOST_NESTED - 1) + "]" * (MOST_NESTED - 1) + "}"
    assert isinstance(readers.parse_json_row(deep), dict) and isinstance(
        readers.parse_json_row('{"n": [' + deep + "]}"), RowError
    )
    assert counted(tmp_path, path) == (4, {"rows": 4})
    assert jsonl(tmp_path / "e.jsonl", [GOOD])


def test_parquet_text_that_is_not_utf_8_is_one_row(tmp_path: Path) -> None:
    places = pa.array([0, 5, 7, 9], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.string(), 3, [None, places, pa.py_buffer(b"hello\xff\xfeok")])
    pq.write_table(pa.table({"text": column}), tmp_path / "d.parquet")
    first, bad, last = (one.row for one in readers.READERS["parquet"](tmp_path / "d.parquet", 0, 3, 1))
    assert (first, last) == ({"text": "hello"}, {"text": "ok"})
    assert isinstance(bad, RowError) and "text that is not UTF-8" in str(bad)
