"""`megaswift data show`: the mask in brackets and in colour, histograms, the model's tokenizer, errors."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from megaswift.data import show
from megaswift.errors import DataError
from tests.data.makers import chat, jsonl, tokenizer


def test_masks_in_brackets_and_in_colour() -> None:
    texts, mask = ["user", "⏎", "Par", "is", "<|im_end|>", "⏎"], [0, 0, 1, 1, 1, 0]
    assert show.sample_text(texts, mask, colour=False) == "user|⏎\n [Par|is|<|im_end|>] ⏎\n"
    assert f"{show.GREEN}Par|is|<|im_end|>{show.OFF}" in show.sample_text(texts, mask, colour=True)


def test_colour_only_on_a_terminal_and_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert show.coloured(Terminal()) and not show.coloured(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not show.coloured(Terminal())


def test_histogram_counts_everything_once() -> None:
    values = np.array([1, 1, 2, 30, 60])
    lines = show.histogram(values, "lengths")
    assert lines[0] == "lengths: 5 in all, 1 to 60, mean 18.8, median 2"
    assert [int(line.split()[-1]) for line in lines[1:]] == [3, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer("qwen", "qwen2_5").save_pretrained(tmp_path / "model")
    data = jsonl(tmp_path / "d.jsonl", [chat(f"hello {i}", "Paris 🙂") for i in range(8)])
    code = show.main([data, "--model", str(tmp_path / "model"), "--samples", "2", "--first=1", "--max_length", "128",
                      "--dataset_cache_dir", str(tmp_path / "c")])
    out = capsys.readouterr().out
    assert code == 0
    assert "--- sample 1 (row 1)" in out and "--- sample 2" in out and "sample 3 " not in out and "sample 0 " not in out
    assert out.partition("[")[2].partition("]")[0].replace("|", "").startswith("Paris")
    assert "|<|im_end|>] " in out
    assert "8 rows," in out and "packed into" in out and "\033" not in out


def test_help_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main(["--help"]) == 0
    assert "data show DATASET" in capsys.readouterr().out
    with pytest.raises(DataError, match="--model DIR"):
        show.main([jsonl(tmp_path / "d.jsonl", [chat("a", "b")])])
    with pytest.raises(DataError, match="whole number"):
        tokenizer("qwen", "qwen3").save_pretrained(tmp_path / "m")
        show.main([str(tmp_path / "d.jsonl"), "--model", str(tmp_path / "m"), "--samples", "x", "--dataset_cache_dir", str(tmp_path / "c")])
