"""Rows that are drawn (`path#500`), and system messages from files.

Covers: megaswift/data/sources/files.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megaswift.data.build import load_document_splits
from megaswift.data.sources.files import resolve_dataset_files, split_into_parts
from megaswift.errors import DataError
from tests.data.makers import config, tokenizer
from tests.data.test_tokenization import ROWS, expected, texts, write


def test_rows_are_drawn_by_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", ROWS)
    drawn = texts(tmp_path, f"{path}#5", data_seed=1)
    assert drawn != expected(ROWS[:5]) and drawn == [t for t in expected(ROWS) if t in drawn] and len(drawn) == 5
    assert drawn == texts(tmp_path, f"{path}#5", seed=1) != texts(tmp_path, f"{path}#5", seed=2)
    more = texts(tmp_path, f"{path}#30")
    assert more[:24] == expected(ROWS * 2) and len(set(more[24:])) == 6 and set(more[24:]) != set(expected(ROWS[:6]))


def test_rows_are_drawn_from_all_files_of_a_folder_alike(tmp_path: Path) -> None:
    """A draw of 2,000 from two files of 900 and 2,700 rows: a quarter is from the first, within 5 standard
    deviations of the hypergeometric distribution, and from its whole length."""
    folder = tmp_path / "some"
    folder.mkdir()
    for name, count in (("a.txt", 900), ("b.txt", 2700)):
        (folder / name).write_text("".join(f"{name[0]} {i}\n" for i in range(count)))
    source = replace(resolve_dataset_files(f"{folder}#2000", lambda *_: ()), draw=(7, 0))
    rows = [located.row["text"] for part in split_into_parts(source, 1) for located in part.rows()]
    assert len(rows) == len(set(rows)) == 2000
    first = [int(text.split()[1]) for text in rows if text.startswith("a")]
    deviation = (2000 * 0.25 * 0.75 * 1600 / 3599) ** 0.5
    assert abs(len(first) - 500) < 5 * deviation and first == sorted(first) and first[0] < 50 and first[-1] > 850


def test_two_entries_are_drawn_apart_and_validation_data_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", ROWS)
    both = texts(tmp_path, [f"{path}#6", f"{path}#6"])
    assert len(both) == 12 and both[:6] != both[6:]
    cfg = config(tmp_path, path, val_dataset=[f"{path}#3"])
    held = load_document_splits(cfg.data, cfg.train, tokenizer("qwen", "qwen2_5"))[1]
    assert held is not None and held.sample.tolist() == [0, 1, 2] and len(held) == 3
    assert [held.read(i)[0].tolist() for i in range(3)] == [
        tokenizer("qwen", "qwen2_5")(text)["input_ids"] for text in expected(ROWS[:3])
    ]


def test_a_system_message_may_be_a_file(tmp_path: Path) -> None:
    path, file = write(tmp_path / "d.jsonl", ROWS[:1]), tmp_path / "prompt.txt"
    file.write_text("Be brief.\nBe kind.\n")
    assert texts(tmp_path, path, system=str(file)) == texts(tmp_path, path, system="Be brief.\nBe kind.")
    assert "Be kind." in texts(tmp_path, path, system=str(file))[0]
    assert "short answers" in texts(tmp_path, path, system="short answers")[0]
    file.write_bytes(b"\xff")
    for system, part in ((str(file), "is not UTF-8"), (str(tmp_path / "promt.txt"), "no such file")):
        with pytest.raises(DataError, match=part):
            texts(tmp_path, path, system=system)
