"""`megaswift sample`: completions, rewards and rows of a tiny model; a server; mistakes; a process that is killed.

Covers: megaswift/sample.py, megaswift/rejection/server.py, megaswift/rejection/options/checks.py,
megaswift/inference/openai_server.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megaswift.cli import main
from megaswift.errors import ConfigError
from megaswift.sample import COMMAND
from tests.evaluation.local_tasks import write_rows
from tests.inference.models import folder
from tests.loopback_http import serve_loopback
from tests.sources import ROOT

pytestmark = pytest.mark.wide
REWARDS = """\
import re

def digits(completions, solution):
    return [float(len(re.findall(r"\\d", one[-1]["content"]))) for one in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("sampled") / "tiny")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = [{"question": f"{i}+{i}=", "solution": str(2 * i)} for i in range(4)]
    named = [{"messages": [{"role": "user", "content": r["question"]}], "solution": r["solution"]} for r in rows]
    return write_rows(tmp_path / "p.jsonl", named)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words(model: Path, prompts: Path, *more: object) -> list[str]:
    rewards = prompts.parent / "mine.py"
    fixed = ("--model", model, "--dataset", prompts, "--reward_funcs", f"{rewards}:digits", "--max_new_tokens", 8)
    return ["sample", *map(str, (*fixed, "--keep_truncated", "true", *more))]


def refused(*given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        COMMAND.parse([str(word) for word in given])
    return str(caught.value)


def test_the_best_of_eight(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert main(words(model, prompts, "--result_path", out, "--num_best", 2, "--pass_threshold", 3)) == 0
    rows, samples = lines(out), lines(tmp_path / "out.samples.jsonl")
    assert len(samples) == 32 and 4 < len(rows) <= 8
    for row in rows:
        assert row["reward"] == sum(c.isdigit() for c in row["messages"][-1]["content"]) and "solution" in row
    best = sorted((one["reward"] for one in samples if one["row"].endswith(":1")), reverse=True)
    assert [row["reward"] for row in rows][:2] == best[:2]
    passed = [sum(o["reward"] >= 3 for o in samples if o["row"].endswith(f":{i}")) / 8 for i in range(1, 5)]
    summary = json.loads((tmp_path / "out.summary.json").read_text())
    assert summary["pass@k"]["1"]["value"] == pytest.approx(sum(passed) / 4)
    assert "pass@8" in capsys.readouterr().out and not (tmp_path / "out.jsonl.partial").exists()
    assert main(words(model, prompts, "--result_path", out)) == 2
    assert "already exists" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_rows(model: Path, prompts: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert main(words(model, prompts, "--result_path", tmp_path / f"{name}.jsonl", "--seed", seed)) == 0
    first, second, third = ((tmp_path / f"{name}.samples.jsonl").read_bytes() for name in "abc")
    assert first == second != third


def test_a_reward_model_chooses_pairs(model: Path, prompts: Path, tmp_path: Path) -> None:
    """The scores are those of transformers on whole conversations."""
    torch.manual_seed(3)
    judge: Any = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    judge.score.weight.data.normal_()
    judge.save_pretrained(tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(tmp_path / "judge")
    given = ["--model", model, "--dataset", prompts, "--reward_model", tmp_path / "judge", "--max_new_tokens", 6]
    more = ["--output_format", "preference", "--keep_truncated", "true", "--result_path", tmp_path / "pairs.jsonl"]
    assert main(["sample", *map(str, [*given, *more])]) == 0
    rows = lines(tmp_path / "pairs.jsonl")
    assert len(rows) == 4
    for row in rows:
        for text, reward in ((None, row["chosen_reward"]), (row["rejected_response"], row["rejected_reward"])):
            messages = [*row["messages"][:-1], {"role": "assistant", "content": text or row["messages"][-1]["content"]}]
            ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                assert judge(ids).logits.item() == pytest.approx(reward, abs=1e-5)
        assert row["chosen_reward"] > row["rejected_reward"]


class Chat(BaseHTTPRequestHandler):
    """A server that answers with the seed of the request, and refuses one of them once."""

    broken: set[int] = set()

    def do_GET(self) -> None:
        self._send({"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["seed"] in self.broken:
            self.broken.discard(body["seed"])
            self.send_error(500)
            return
        assert self.path == "/v1/chat/completions" and body["model"] == "served" and body["max_tokens"] == 8
        message = {"content": f"{body['seed']} {body['messages'][-1]['content']}"}
        self._send({"choices": [{"message": message, "finish_reason": "stop"}]})

    def _send(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_server(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A failed request ends the command; the same command goes on, and every completion has a seed of its own."""
    Chat.broken = {42 + 20}
    with serve_loopback(Chat) as address:
        given = words(
            model, prompts, "--result_path", tmp_path / "out.jsonl", "--base_url", f"{address}/v1", "--batch_size", 4
        )
        assert main(given) != 0
        assert "answers 500 to POST /chat/completions" in capsys.readouterr().err
        assert (tmp_path / "out.jsonl.partial").exists() and main(given) == 0
    texts = [one["completion"] for one in lines(tmp_path / "out.samples.jsonl")]
    assert {int(text.split()[0]) for text in texts} == {*range(42, 42 + 32)}
    assert all(
        text.endswith(one["prompt"][-1]["content"])
        for text, one in zip(texts, lines(tmp_path / "out.samples.jsonl"), strict=True)
    )


def test_mistakes(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--model", model, "--dataset", prompts)
    assert "--dataset: is missing" in refused("--model", "m")
    assert "--output_format preference: needs rewards" in refused(*given, "--output_format", "preference")
    assert "makes all completions of a prompt the same" in refused(*given, "--temperature", 0)
    assert "is more than the 8 completions" in refused(*given, "--reward_funcs", "format", "--num_best", 9)
    assert "--reward_threshold 1: would be ignored: completions have no rewards" in refused(
        *given, "--reward_threshold", 1
    )
    assert "--reward_weights: are 2 numbers for 1 rewards" in refused(
        *given, "--reward_funcs", "format", "--reward_weights", 1, 2
    )
    assert "is no JSONL file" in refused(*given, "--result_path", "x.csv")
    assert "no such file" in refused("--model", "m", "--dataset", "none.jsonl")
    assert "--torch_dtype float32: would be ignored" in refused(
        *given, "--base_url", "http://h/v1", "--torch_dtype", "float32"
    )
    out = ("--result_path", tmp_path / "o.jsonl")
    assert main(["sample", *map(str, (*given, *out, "--reward_funcs", "acuracy"))]) == 2
    assert "did you mean accuracy?" in capsys.readouterr().err
    bare = write_rows(tmp_path / "bare.jsonl", [{"messages": [{"role": "user", "content": "1"}]}])
    assert (
        main(["sample", "--model", str(model), "--dataset", str(bare), *map(str, out), "--reward_funcs", "accuracy"])
        == 2
    )
    assert "requires the column solution" in capsys.readouterr().err


def test_names_of_ms_swift() -> None:
    given = "--model m --dataset d --orm_model math --prm_model RM --prm_threshold 0.5 --n_best_to_keep 3"
    more = "--sampler_type sample --sampler_engine vllm --num_sampling_batch_size 4 --output_file o.jsonl --resume true"
    parsed = COMMAND.parse([*given.split(), *more.split()])
    assert parsed.sections["rewards"].reward_funcs == ("accuracy",)
    assert parsed.sections["rewards"].reward_model == ("RM",)
    assert parsed.sections["selection"].num_best == 3 and parsed.sections["selection"].reward_threshold == 0.5
    assert parsed.sections["backend"].infer_backend == "vllm" and parsed.sections["completions"].batch_size == 4
    assert "--base_url URL" in refused("--model", "m", "--dataset", "d", "--sampler_engine", "client")
    assert "no trees" in refused("--model", "m", "--dataset", "d", "--sampler_type", "mcts")


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_process_goes_on(model: Path, prompts: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle: the same command ends with the files of a run that was left alone."""
    more = ("--num_return_sequences", 64, "--batch_size", 4, "--result_path")
    assert main(words(model, prompts, *more, tmp_path / "whole.jsonl")) == 0
    given = words(model, prompts, *more, tmp_path / "out.jsonl")
    partial = tmp_path / "out.jsonl.partial"
    command = [sys.executable, "-m", "megaswift", *given]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not partial.exists() or partial.read_bytes().count(b"\n") < 5:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert partial.exists() and not (tmp_path / "out.jsonl").exists()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "going on" in done.stderr
    for kind in (".jsonl", ".samples.jsonl", ".summary.json"):
        assert (tmp_path / f"out{kind}").read_bytes() == (tmp_path / f"whole{kind}").read_bytes()
