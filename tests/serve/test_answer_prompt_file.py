"""Files of prompts: order, columns, answers that rows bring, going on after an interruption, rows that cannot be
asked.

Covers: megaswift/infer.py, megaswift/serve/prompt_file_rows.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.errors import ConfigError, DataError
from megaswift.infer import COMMAND, main
from megaswift.inference import generator as generation
from tests.inference.models import plain

pytestmark = pytest.mark.wide

QUESTIONS = ["1+2?", "what is 3+4? say it", "x", "0123456789 abc", "z+z", "7+7", "ab"]
NEW = 8


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def infer(model: Path, data: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    assert (
        main(
            [
                "--model",
                str(model),
                "--dataset",
                str(data),
                "--result_path",
                str(out),
                "--max_new_tokens",
                str(NEW),
                "--batch_size",
                "3",
                *more,
            ]
        )
        == 0
    )
    return read(out)


def test_every_row_is_answered_in_order_as_transformers_answers_it_alone(model: Path, tmp_path: Path) -> None:
    rows = [{"id": i, "messages": [{"role": "user", "content": q}]} for i, q in enumerate(QUESTIONS)]
    rows[2]["messages"].append({"role": "assistant", "content": "an answer"})
    rows[3] = {"id": 3, "query": QUESTIONS[3]}
    rows[4] = {"id": 4, "instruction": QUESTIONS[4], "output": "known"}
    rows[5] = {"id": 5, "text": QUESTIONS[5]}
    found = infer(model, write(tmp_path / "d.jsonl", rows), tmp_path / "a.jsonl", "--logprobs")
    tokenizer, plain_model = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    prompts = [tokenizer(q if i == 5 else f"<u>{q}<e><a>")["input_ids"] for i, q in enumerate(QUESTIONS)]
    want = plain(plain_model, tokenizer, prompts, NEW, do_sample=False)
    assert [r["response"] for r in found] == want and [r["id"] for r in found] == list(range(7))
    assert [r.get("labels") for r in found] == [None, None, "an answer", None, "known", None, None]
    assert all({**r, **{k: f[k] for k in f if k not in r}} == f for r, f in zip(rows, found, strict=True))
    assert all(len(r["logprobs"]["content"]) >= NEW - 1 and r["logprobs"]["content"][0]["logprob"] < 0 for r in found)
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("how", [(), ("--temperature", "1.0")])
def test_a_run_that_was_stopped_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    data = write(tmp_path / "d.jsonl", [{"query": q} for q in QUESTIONS])
    whole = infer(model, data, tmp_path / "whole.jsonl", *how)
    real, calls = generation.Generator.generate, []

    def stops(self: Any, requests: Any, sampling: Any) -> Any:
        calls.append(len(requests))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, requests, sampling)

    monkeypatch.setattr(generation.Generator, "generate", stops)
    words = [
        "--model",
        str(model),
        "--dataset",
        str(data),
        "--result_path",
        str(tmp_path / "a.jsonl"),
        "--max_new_tokens",
        str(NEW),
        "--batch_size",
        "3",
        *how,
    ]
    assert main(words) == 130 and not (tmp_path / "a.jsonl").exists()
    partial = tmp_path / "a.jsonl.partial"
    assert len(read(partial)) == 7  # its owner and two batches
    with partial.open("a") as file:
        file.write('{"row": 5, "answ')  # killed while writing
    with pytest.raises(ConfigError, match="different generation"):
        main([*words, "--top_k", "5", *(() if how else ("--temperature", "1"))])
    assert main(words) == 0 and calls == [3, 3, 1, 1]
    assert read(tmp_path / "a.jsonl") == whole and not partial.exists()
    if how:
        assert whole != infer(model, data, tmp_path / "seed.jsonl", *how, "--seed", "7")


def test_rows_that_cannot_be_asked_are_told_with_their_lines_and_no_model_is_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaswift.inference.load_generation_model.load_model_and_prompt_device", None)
    data = write(
        tmp_path / "d.jsonl",
        [
            {"query": "1+1"},
            "{broken",
            {"nosuch": 1},
            {"messages": [{"role": "nobody", "content": "x"}]},
            {"query": "a" * 200},
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]},
            {"messages": [{"role": "assistant", "content": "x"}]},
            {"nosuch": 2},
        ],
    )
    with pytest.raises(DataError) as caught:
        infer(model, data, tmp_path / "a.jsonl")
    text = str(caught.value)
    for part in (
        "d.jsonl:2: character 2: not JSON",
        "d.jsonl:3 and 1 more like it: column nosuch",
        "d.jsonl:4: column messages[0].role",
        "d.jsonl:5: the prompt has 203 tokens; prompt and answer must fit the context length of 128",
        "d.jsonl:6: images are not supported: this model accepts only text",
        "d.jsonl:7: column messages",
    ):
        assert part in text, text
    assert "(6 problems)" in text


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        COMMAND.parse(words)
    return str(caught.value)


def test_all_mistakes_of_a_command_line_at_once(tmp_path: Path) -> None:
    text = refused(
        "--modle",
        "x",
        "--temperature",
        "-1",
        "--dataset",
        "nosuch.jsonl",
        "--quantization_bit",
        "5",
        "--top_logprobs",
        "3",
        "--max_memory",
        "gpu:1",
    )
    for part in (
        "did you mean model?",
        "--temperature -1: must be >= 0",
        "--model: is missing",
        "--dataset nosuch.jsonl: no such file",
        "--quantization_bit 5: must be 4 or 8",
        "--top_logprobs 3: needs --logprobs",
        "'gpu' is not a device",
    ):
        assert part in text, text
    assert "(7 problems)" in text
    (tmp_path / "adapter").mkdir()
    text = refused(
        "--model",
        "x",
        "--num_beams",
        "3",
        "--temperature",
        "0",
        "--top_p",
        "0.5",
        "--adapters",
        str(tmp_path / "adapter"),
        "--result_path",
        "a.jsonl",
        "--device_map",
        "cpu",
        "--offload_folder",
        "off",
    )
    for part in (
        "--num_beams 3: cannot be used in interactive chat",
        "--top_p 0.5: would be ignored",
        "has no adapter_config.json",
        "--result_path a.jsonl: applies only to a prompt file",
        "--offload_folder off: would be ignored",
    ):
        assert part in text, text


@pytest.mark.parametrize("width", [80, 120])
def test_help_is_grouped_and_fits(width: int) -> None:
    page = COMMAND.help(width)
    assert all(f"--{name} " in page.replace("\n", " ") for name in COMMAND.table.names)
    assert max(len(line) for line in page.splitlines()[6:]) <= width
    assert "Devices\n-------" in page and "--max_new_tokens 512 tokens" in page
