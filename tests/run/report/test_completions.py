"""Completions of all steps, as far as a page can hold them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.run.report import completions
from megaswift.run.report.completions import completions_by_step
from tests.run.report.runs import completion, write_lines


def test_a_dozen_of_each_step_with_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    talk = [{"role": "assistant", "content": "hm"}, {"role": "tool", "content": "42"}]
    tokens = {"token_texts": ["4"], "token_logprobs": [-0.5]}
    first = [completion(1, completion=f"answer {i}", **{"rewards/exact": None}, **tokens) for i in range(14)]
    write_lines(file, [*first, completion(4, completion=talk)])
    found = completions_by_step(file)
    assert found["of"] == 2 and [step["step"] for step in found["steps"]] == [1, 4]
    rows = found["steps"][0]["rows"]
    assert [row["completion"] for row in rows] == [f"answer {i}" for i in range(12)]
    assert rows[0]["rewards"] == {"exact": None} and rows[0]["token_logprobs"] == [-0.5]
    assert found["steps"][1]["rows"][0]["completion"] == "assistant: hm\ntool: 42"


def test_too_many_steps_are_thinned_evenly_with_first_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "completions.jsonl"
    write_lines(file, [completion(i) for i in range(1, 102)])
    monkeypatch.setattr(completions, "MOST_BYTES", file.stat().st_size // 10)
    found = completions_by_step(file)
    steps = [step["step"] for step in found["steps"]]
    assert found["of"] == 101 and len(steps) == 10 and steps[0] == 1 and steps[-1] == 101
    assert {b - a for a, b in zip(steps, steps[1:], strict=False)} <= {11, 12}
    monkeypatch.setattr(completions, "MOST_BYTES", 1)
    assert [step["step"] for step in completions_by_step(file)["steps"]] == [101], "the newest where one is too much"


def test_long_texts_are_cut_and_cut_lines_left_out(tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    write_lines(file, [completion(1, completion="x" * 20_005)])
    with file.open("a", encoding="utf-8") as open_file:
        open_file.write(json.dumps(completion(2))[:40])  # as a crash leaves it
    found = completions_by_step(file)
    text = found["steps"][0]["rows"][0]["completion"]
    assert len(text) < 20_050 and text.endswith(" … (5 more characters)")
    assert found["steps"][1]["rows"] == []


def test_no_file_no_completions(tmp_path: Path) -> None:
    assert completions_by_step(tmp_path / "none.jsonl") == {"steps": [], "of": 0}
