"""Files to stores: every kind of file, sampling, errors with file and line, the cache and who builds it.

Covers: megaswift/data/store/shared_build.py, megaswift/data/sources/columns.py,
megaswift/data/store/documents.py, megaswift/data/sources/hub.py."""

from __future__ import annotations

import csv
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megaswift.data.batches.numbered import LoaderGeometry
from megaswift.data.build import build_train_and_eval_sources, load_document_splits
from megaswift.data.encode import rows as encode_rows
from megaswift.data.store import shared_build
from megaswift.data.tokenization import tokenize_datasets
from megaswift.errors import DataError
from tests.data.makers import chat, config, jsonl, tokenizer
from tests.parity.pool import Pool

ROWS = [chat(f"hello {i}", f"answer {i}") for i in range(12)]


def texts(tmp_path: Path, dataset: Any, task: str = "sft", **options: Any) -> list[str]:
    """The decoded rows of a data set, in order."""
    cfg = config(tmp_path, dataset, task, **options)
    tok = tokenizer("qwen", "qwen2_5")
    docs, _ = load_document_splits(cfg.data, cfg.train, tok, task)
    return [tok.decode(docs.read(i)[0]) for i in range(len(docs))]


def expected(rows: list[dict[str, Any]]) -> list[str]:
    tok = tokenizer("qwen", "qwen2_5")
    return [tok.apply_chat_template(r["messages"], tokenize=False) for r in rows]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    flat = [{"query": r["messages"][0]["content"], "response": r["messages"][1]["content"]} for r in rows]
    if path.suffix == ".jsonl":
        jsonl(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as f:
            writer = csv.DictWriter(f, ["query", "response"], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(flat)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
    return str(path)


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.tsv", "d.parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    assert texts(tmp_path, path) == expected(ROWS)
    assert texts(tmp_path, f"{path}#:3") == texts(tmp_path, f"{path}#3", shuffle=False) == expected(ROWS[:3])
    assert texts(tmp_path, f"{path}#:30") == expected((ROWS * 3)[:30])


def test_json_variants(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": ROWS[:2]}))
    (tmp_path / "b.json").write_text("".join(json.dumps(r) + "\n" for r in ROWS[:2]))
    assert texts(tmp_path, str(tmp_path / "a.json")) == texts(tmp_path, str(tmp_path / "b.json")) == expected(ROWS[:2])


def test_folders_subsets_and_several_data_sets_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "more").mkdir(parents=True)
    for name, rows in (("b.jsonl", ROWS[2:4]), ("a.json", ROWS[:2]), ("more/c.parquet", ROWS[4:6])):
        write(folder / name, rows)
    (folder / "README.md").write_text("not data")
    assert texts(tmp_path, str(folder)) == expected(ROWS[:6])
    assert texts(tmp_path, f"{folder}:b") == expected(ROWS[2:4])
    assert texts(tmp_path, f"{folder}:more#:1") == expected(ROWS[4:5])
    assert texts(tmp_path, [f"{folder}:more", f"{folder}:a"]) == expected(ROWS[4:6] + ROWS[:2])


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"frage": "hello 0", "antwort": "answer 0"}])
    assert texts(tmp_path, path, columns={"frage": "query", "antwort": "response"}) == expected(ROWS[:1])


def test_a_column_that_no_row_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all data sets together; a warning where more rows follow than are looked at."""
    path = jsonl(tmp_path / "d.jsonl", [{"query": "q", "response": "a", "persona": "s"}] * 3)
    other = write(tmp_path / "e.csv", ROWS)
    wrong = {"presona": "system", "persona": "system"}
    for streaming in (False, True):
        with pytest.raises(
            DataError,
            match=r"--columns presona=system: no row has a column presona; columns are query, response, persona",
        ):
            cfg = config(tmp_path, [path, other], columns=wrong, streaming=streaming)
            build_train_and_eval_sources(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"), LoaderGeometry())
    jsonl(tmp_path / "v.jsonl", [{"query": "q", "response": "a", "presona": "s"}])
    assert len(texts(tmp_path, path, columns=wrong, val_dataset=[str(tmp_path / "v.jsonl")])) == 3
    monkeypatch.setattr("megaswift.data.sources.columns.LOOKED_AT", 2)
    assert "s<|im_end|>" in texts(tmp_path, path, columns=wrong)[0] and "in the first 2 rows" in capsys.readouterr().err


def test_a_renamed_column_goes_before_one_of_that_name(tmp_path: Path) -> None:
    for row in (
        {"query": "hello 0", "response": "x", "better": "answer 0"},
        {"better": "answer 0", "response": "x", "query": "hello 0"},
    ):
        path = jsonl(tmp_path / "d.jsonl", [row])
        assert texts(tmp_path, path, columns={"better": "response"}) == expected(ROWS[:1])


def test_plain_text_ends_with_the_end_token_and_splits(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("hello world\n\nhow are you\n")
    assert texts(tmp_path, str(tmp_path / "d.txt"), "pt") == ["hello world<|im_end|>", "how are you<|im_end|>"]
    path = jsonl(tmp_path / "d.jsonl", [{"text": "hello world, " * 9}])
    pieces = texts(tmp_path, path, "pt", max_length=8, truncation_strategy="split")
    assert "".join(pieces) == "hello world, " * 9 + "<|im_end|>" and len(pieces) > 2


def test_truncation(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [chat("hi", "a b c " * 40), ROWS[0]])
    tok = tokenizer("qwen", "qwen2_5")
    whole = tok.apply_chat_template(chat("hi", "a b c " * 40)["messages"], return_dict=True)["input_ids"]
    short = expected(ROWS[:1])
    size = len(tok.apply_chat_template(ROWS[0]["messages"], return_dict=True)["input_ids"]) + 1
    assert texts(tmp_path, path, max_length=size) == short
    assert texts(tmp_path, path, max_length=size, truncation_strategy="right") == [tok.decode(whole[:size]), *short]
    assert texts(tmp_path, path, max_length=size, truncation_strategy="left") == [tok.decode(whole[-size:]), *short]
    with pytest.raises(DataError, match=rf"d.jsonl:1: {len(whole)} tokens, --max_length is {size}"):
        texts(tmp_path, path, max_length=size, truncation_strategy="raise")
    cfg = config(tmp_path, path, max_length=size, truncation_strategy="right")
    docs, _ = load_document_splits(cfg.data, cfg.train, tok)
    assert docs.counted == {"rows": 2, "truncated": 1}
    assert docs.labels.tolist() == [docs.read(i)[1][1:].sum() for i in range(2)]
    with pytest.raises(DataError, match="none of 2 rows remains"):
        texts(tmp_path, path, max_length=2)


def test_malformed_rows_are_told_with_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    good = json.dumps(ROWS[0])
    path.write_text(f'{good}\n\n{{"messages": [\n{good}\n{{"messages": [{{"role": "user", "text": "q"}}]}}\n[1]\n')
    with pytest.raises(DataError) as e:
        texts(tmp_path, str(path))
    said = str(e.value)
    assert "(3 problems)" in said and "--strict false" in said
    for part in (
        f"{path}:3: character ",
        f"{path}:5: column messages[0].content: nothing, but a text in 'text'",
        f"{path}:6: line: ",
    ):
        assert part in said
    assert texts(tmp_path, str(path), strict=False) == expected([ROWS[0], ROWS[0]])
    cfg = config(tmp_path, str(path), strict=False)
    assert tokenize_datasets(cfg.data, tokenizer("qwen", "qwen2_5"))[0][1].manifest["bad"] == 3


def test_a_data_set_of_malformed_rows_alone(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"query": 1, "response": 2}] * 3)
    with pytest.raises(DataError, match="d.jsonl: none of its 3 rows is valid"):
        texts(tmp_path, path, strict=False)


def test_at_most_ten_are_shown(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", [{"query": "x", "response": i} for i in range(25)])
    with pytest.raises(DataError, match="and 15 more rows") as e:
        texts(tmp_path, path)
    assert len(e.value.problems) == 11 and "try: no valid row so far" in str(e.value)
    jsonl(tmp_path / "d.jsonl", [ROWS[0], *({"query": "x", "response": i} for i in range(25))])
    with pytest.raises(DataError, match="and 15 more rows(.|\n)*try: correct the row, or give --strict false"):
        texts(tmp_path, path)


def test_the_same_mistake_of_several_rows_is_told_once(tmp_path: Path) -> None:
    mixed = jsonl(tmp_path / "mixed.jsonl", [{"query": "x", "response": 1}, {"chosen": "t", "rejected": "u"}] * 2)
    with pytest.raises(DataError) as e:
        texts(tmp_path, mixed)
    assert [p.what for p in e.value.problems] == [f"{mixed}:1 and 1 more like it", f"{mixed}:2 and 1 more like it"]
    assert "is for megaswift dpo, orpo, cpo, simpo, rm, not for sft" in str(
        e.value
    ) and "try: no valid row so far" in str(e.value)


def test_csv_rows_of_the_wrong_width(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('query,response\n"two\nlines",b\nonly\n')
    with pytest.raises(DataError, match=r"d.csv:4: row: 1 cells; expected 2"):
        texts(tmp_path, str(tmp_path / "d.csv"))


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ("nothing.jsonl", "no such file"),
        ("/nowhere/at/all", "no such file"),
        ("d.dat", "unknown file type"),
        ("d.jsonl:train", "does not have subsets"),
        ("empty", "no data files"),
        ("none.jsonl", "no rows"),
        ("bad.json", r"bad.json:1:2: not JSON"),
        ("d.jsonl#0", "selects no rows"),
        ("silent.jsonl", "has label tokens"),
        ("d.josnl", "no such file or folder\n    try: did you mean d.jsonl?"),
        ("d.jsonl#5k", "the text after # is not a number of rows\n    try: d.jsonl#500"),
        (".:nome", "named nome in this folder\n    try: did you mean none?"),
        (".:train", "try: .:bad, d, none, silent"),
    ],
)
def test_wrong_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.dat").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "bad.json").write_text("[nope]")
    jsonl(tmp_path / "d.jsonl", ROWS)
    jsonl(tmp_path / "silent.jsonl", [{"messages": [ROWS[0]["messages"][0], ROWS[0]["messages"][1] | {"loss": False}]}])
    with pytest.raises(DataError, match=said):
        texts(tmp_path, dataset)


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="Hugging Face could not provide it"):
        texts(tmp_path, "nobody/nothing-of-this-name")


def test_a_hub_that_gives_a_data_set_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def load_dataset(name: str, subset: str | None = None) -> Any:
        asked.append((name, subset))
        rows = {"train": ROWS[:4] if subset else ROWS, "test": ROWS[:1]}
        return datasets.DatasetDict(
            {
                split: datasets.Dataset.from_list(some)
                for split, some in rows.items()
                if name != "some/tests" or split == "test"
            }
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts(tmp_path, "some/set") == expected(ROWS) and texts(tmp_path, "some/set#:5") == expected(ROWS[:5])
    assert texts(tmp_path, "some/set:part#:6") == expected((ROWS[:4] * 2)[:6])
    assert asked == [("some/set", None), ("some/set", "part")]
    with pytest.raises(DataError, match="has no split `train`; splits are test"):
        texts(tmp_path, "some/tests")


def stores(tmp_path: Path, path: str, **options: Any) -> Path:
    cfg = config(tmp_path, path, **options)
    return tokenize_datasets(cfg.data, tokenizer("qwen", options.pop("name", "qwen2_5")))[0][1].folder


def test_the_cache_is_found_again_by_content(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "d.jsonl", ROWS)
    first = stores(tmp_path, path)
    stamp = (first / "tokens.bin").stat().st_mtime_ns
    os.utime(path)  # touched, not changed
    assert (
        stores(tmp_path, path, max_length=7, packing=True) == first
        and (first / "tokens.bin").stat().st_mtime_ns == stamp
    )
    others = [
        stores(tmp_path, path, loss_scale="all"),
        stores(tmp_path, path, system="x"),
        stores(tmp_path, path, chat_template="{{ messages }}", loss_scale="all"),
    ]
    jsonl(tmp_path / "d.jsonl", [*ROWS[1:], ROWS[0]])  # same size, other content
    others.append(stores(tmp_path, path))
    assert len({first, *others}) == 5


def test_rows_are_tokenized_again_without_use_dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a launch: by another launch again. What was built for it alone is deleted at its end."""
    path = jsonl(tmp_path / "d.jsonl", ROWS)
    usual = stores(tmp_path, path)
    ends: list[Any] = []
    monkeypatch.setattr(shared_build.atexit, "register", ends.append)
    own = stores(tmp_path, path, use_dataset_cache=False)
    assert own != usual and (own / "tokens.bin").read_bytes() == (usual / "tokens.bin").read_bytes()
    assert stores(tmp_path, path, use_dataset_cache=False) == own
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    other = stores(tmp_path, path, use_dataset_cache=False)
    assert other not in (own, usual) and stores(tmp_path, path, use_dataset_cache=False) == other
    for end in ends:
        end()
    assert {p.name for p in usual.parent.iterdir() if p.is_dir()} == {usual.name}
    assert stores(tmp_path, path) == usual


@pytest.mark.process
def test_worker_processes_give_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaswift.data.tokenization.WORKER_BYTES", 1)
    path = jsonl(tmp_path / "d.jsonl", [chat(f"hello {i}", "answer " * (i % 50)) for i in range(3000)])
    one, two = stores(tmp_path / "1", path), stores(tmp_path / "2", path, dataset_num_proc=2)
    for name in ("tokens.bin", "mask.bin", "rows.npy", "lines.npy", "labels.npy"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    with open(path, "a") as f:
        f.write("{\n")
    with pytest.raises(DataError, match=r"d.jsonl:3001"):
        stores(tmp_path / "2", path, dataset_num_proc=2)


def test_an_interrupted_build_leaves_nothing_that_counts(tmp_path: Path) -> None:
    target = tmp_path / "key"
    (tmp_path / "key.build-1").mkdir()

    def broken(scratch: Path) -> None:
        (scratch / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared_build.build_once(target, broken)
    assert [p.name for p in tmp_path.iterdir()] == ["key.lock"]
    shared_build.build_once(target, lambda scratch: (scratch / "x").mkdir() or (scratch / "x").rename(target) and None)
    assert target.is_dir()


@pytest.mark.wide
def test_waiting_ends_with_the_build_its_failure_or_its_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "key"
    threading.Thread(target=lambda: (time.sleep(0.3), target.mkdir())).start()
    shared_build.wait_for_build(target)
    other = tmp_path / "bad"

    def fails(scratch: Path) -> None:
        raise DataError("row 7 is bad")

    with pytest.raises(DataError):
        shared_build.build_once(other, fails)
    with pytest.raises(DataError, match="row 7 is bad"):
        shared_build.wait_for_build(other)
    full = tmp_path / "full"

    def no_room(scratch: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="No space left"):
        shared_build.build_once(full, no_room)
    with pytest.raises(DataError, match="No space left"):
        shared_build.wait_for_build(full)
    monkeypatch.setattr(shared_build, "SILENCE_S", 0.3)
    os.utime(tmp_path / "full.failed", (1, 1))  # an earlier run's
    with pytest.raises(DataError, match="no heartbeat"):
        shared_build.wait_for_build(full)
    with pytest.raises(DataError, match="no heartbeat"):
        shared_build.wait_for_build(tmp_path / "never")


def building(rank: int, world: int, where: tuple[Path, str]) -> tuple[str, int]:
    """The store's folder, and how many parts this rank encoded (on the ranks)."""
    parts, plain = [], encode_rows.RowEncoder.encode_part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_rows.RowEncoder, "encode_part", lambda *a: (parts.append(1), plain(*a))[1])
        return stores(*where).name, len(parts)


@pytest.mark.process
def test_ranks_of_a_node_build_once(tmp_path: Path, pool: Pool) -> None:
    path = jsonl(tmp_path / "d.jsonl", ROWS)
    (built, parts), (waited, none) = pool.run("tests.data.test_tokenization:building", (tmp_path, path), 2)
    assert waited == built and none == 0 and parts > 0
