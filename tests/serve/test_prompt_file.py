"""Files of prompts: order, columns, answers that rows bring, going on after an interruption, rows that cannot be
asked.

Covers: megaswift/infer.py, megaswift/serve/prompt_rows.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift import distributed
from megaswift.config import load_config
from megaswift.data.build import load_document_splits
from megaswift.errors import ConfigError, DataError
from megaswift.infer import COMMAND, main
from megaswift.inference import generator as generation
from megaswift.launchers.torchrun_launcher import free_port
from megaswift.options.files import CONFIG_HEADER
from tests.inference.models import adapters, plain
from tests.sources import ROOT

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
    monkeypatch.setattr("megaswift.inference.model.load_model_and_prompt_device", None)
    data = write(
        tmp_path / "d.jsonl",
        [
            {"query": "1+1"},
            "{broken",
            {"nosuch": 1},
            {"messages": [{"role": 5, "content": "x"}]},
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


def test_prompts_are_at_most_max_length(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [{"text": "0" * 9}, {"text": "0" * 8}])
    with pytest.raises(DataError, match=r"d.jsonl:1: the prompt has 9 tokens; --max_length is 8"):
        infer(model, data, tmp_path / "a.jsonl", "--max_length", "8")


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
        "--top_logprobs 3: would be ignored: needs --logprobs",
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
        "--result_path a.jsonl: would be ignored: applies only to a prompt file",
        "--offload_folder off: would be ignored",
    ):
        assert part in text, text


@pytest.mark.parametrize("width", [80, 120])
def test_help_is_grouped_and_fits(width: int) -> None:
    page = COMMAND.help("all", width)
    assert all(f"--{name} " in page.replace("\n", " ") for name in COMMAND.table.names)
    assert max(len(line) for line in page.splitlines()[7:]) <= width
    assert "Devices\n-------" in page and "--max_new_tokens 512 tokens" in page


def test_several_data_sets_and_a_file_of_its_own_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "xy":
        write(Path(f"{name}.jsonl"), [{"query": f"{name}{i}"} for i in range(5)])
    assert main(["--model", str(model), "--val_dataset", "x.jsonl#2", "y.jsonl", "--max_new_tokens", "2"]) == 0
    (result,) = Path("infer_result").glob("*/x-and-1.jsonl")
    found = read(result)
    assert [r["query"] for r in found] == ["x0", "x1", "y0", "y1", "y2", "y3", "y4"]


def test_a_run_s_held_out_rows(model: Path, tmp_path: Path) -> None:
    """Those that are in none of its training documents."""
    data = write(tmp_path / "d.jsonl", [{"query": f"{i}+1?", "response": "x"} for i in range(12)])
    run = adapters(tmp_path / "run" / "adapter", model).parent
    cfg = load_config("sft", ["--model", str(model), "--dataset", str(data), "--split_dataset_ratio", "0.25"])
    (run / "config.yaml").write_text(f"{CONFIG_HEADER}\n{cfg.to_yaml()}")
    out = tmp_path / "a.jsonl"
    words = ["--adapters", str(run), "--load_data_args", "true", "--result_path", str(out), "--max_new_tokens", "2"]
    assert main(words) == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    training, _ = load_document_splits(cfg.data, cfg.train, tokenizer, "sft")
    learned = " ".join(tokenizer.decode(training.read(i)[0]) for i in range(len(training)))
    found = [r["query"] for r in read(out)]
    assert len(found) == 3 and not [q for q in found if f"<u> {' '.join(q)}" in learned or f"<u>{q}" in learned]
    assert [r["labels"] for r in read(out)] == ["x"] * 3


def test_what_two_processes_left_one_goes_on_with(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two answers its batches, and is stopped while it waits for rank 0."""

    def stopped() -> None:
        raise KeyboardInterrupt

    data = write(tmp_path / "d.jsonl", [{"query": q} for q in QUESTIONS])
    whole = infer(model, data, tmp_path / "whole.jsonl", "--temperature", "1")
    with monkeypatch.context() as second:
        for name, value in (("global_rank", 1), ("global_world_size", 2)):
            second.setattr(distributed, name, lambda value=value: value)
        second.setattr(distributed, "barrier", stopped)
        words = ["--model", str(model), "--dataset", str(data), "--result_path", str(tmp_path / "a.jsonl")]
        words += ["--max_new_tokens", str(NEW), "--batch_size", "3", "--temperature", "1"]
        assert main(words) == 130 and not (tmp_path / "a.jsonl").exists()
    assert [line["row"] for line in read(tmp_path / "a.jsonl.partial-1")[1:]] and len(list(tmp_path.glob("*l*"))) == 3
    calls: list[int] = []
    real = generation.Generator.generate
    monkeypatch.setattr(generation.Generator, "generate", lambda self, r, s: calls.append(len(r)) or real(self, r, s))
    assert infer(model, data, tmp_path / "a.jsonl", "--temperature", "1") == whole
    assert calls == [3, 1] and not list(tmp_path.glob("*.partial*"))


@pytest.mark.process
@pytest.mark.slow
def test_two_processes_write_the_file_of_one(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [{"query": q} for q in QUESTIONS])
    infer(model, data, tmp_path / "one.jsonl", "--temperature", "1", "--logprobs")
    words = ["--model", str(model), "--dataset", str(data), "--result_path", str(tmp_path / "two.jsonl"), "--logprobs"]
    words += ["--max_new_tokens", str(NEW), "--batch_size", "3", "--temperature", "1"]
    environ = {**os.environ, "NPROC_PER_NODE": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megaswift", "infer", *words]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr.count("device map") == 1, done.stderr
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"d.jsonl", "one.jsonl", "two.jsonl"}


STOPS = """
import os, sys
from importlib.abc import MetaPathFinder

class WhenAnswersBegin(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "megaswift.serve.prompt_file":
            sys.meta_path.remove(self)
            from megaswift.inference.generator import Generator
            Generator.generate = lambda *_: os.kill(os.getpid(), 19)

if os.environ.get("RANK") == os.environ["STOPS"]:
    sys.meta_path.insert(0, WhenAnswersBegin())
"""
"""SIGSTOP of one process in its first batch."""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_stops_is_named(rank: int, model: Path, tmp_path: Path) -> None:
    """Other processes wait as long as it makes progress."""
    data = write(tmp_path / "d.jsonl", [{"query": q} for q in QUESTIONS])
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    words = ["--model", str(model), "--dataset", str(data), "--result_path", str(tmp_path / "a.jsonl")]
    words += ["--max_new_tokens", str(NEW), "--batch_size", "1", "--nproc_per_node", "2", "--ddp_timeout", "20"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "STOPS": str(rank)}
    command = [sys.executable, "-m", "megaswift", "infer", *words]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and not (tmp_path / "a.jsonl").exists(), done.stderr
    assert f"- process {rank} on " in done.stderr, done.stderr
    assert "has neither computed nor written anything for 20 s (--ddp_timeout)" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.process
def test_two_nodes_write_the_file_of_one(model: Path, tmp_path: Path) -> None:
    """Node 0 writes it; nodes need no common folder for results."""
    data = write(tmp_path / "d.jsonl", [{"query": q} for q in QUESTIONS])
    infer(model, data, tmp_path / "one.jsonl")
    words = [sys.executable, "-m", "megaswift", "infer", "--model", str(model), "--dataset", str(data)]
    words += ["--max_new_tokens", str(NEW), "--batch_size", "3", "--nnodes", "2", "--master_addr", "127.0.0.1"]
    words += ["--master_port", str(free_port())]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    nodes = []
    for rank in (0, 1):
        (tmp_path / f"node{rank}").mkdir()
        own = ["--node_rank", str(rank), "--result_path", str(tmp_path / f"node{rank}/a.jsonl")]
        nodes.append(subprocess.Popen([*words, *own], env=environ, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    said = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert (tmp_path / "node0/a.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert [p.name for p in tmp_path.glob("node*/*")] == ["a.jsonl"]
