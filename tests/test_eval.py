"""`megaswift eval`: its files and tables, a baseline, a server, and what it says about mistakes.

Covers: megaswift/eval.py, megaswift/evaluation/options/checks.py, megaswift/evaluation/results.py,
megaswift/run/report/scores.py.
"""

from __future__ import annotations

import json
import time
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from megaswift.cli import main
from megaswift.errors import ConfigError
from megaswift.eval import COMMAND
from megaswift.evaluation.results import read_result
from tests.evaluation.local_tasks import answers, choices, task_files, texts, write_rows
from tests.inference.models import folder
from tests.loopback_http import serve_loopback

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("evaluated") / "tiny")


def run(*words: object) -> int:
    return main(["eval", *map(str, words)])


def refused(*words: object) -> str:
    with pytest.raises(ConfigError) as caught:
        COMMAND.parse([str(word) for word in words])
    return str(caught.value)


def test_results(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables on the screen, numbers in results.json, a page, and the questions of each task."""
    out = tmp_path / "out"
    assert run("--model", model, "--tasks", choices(tmp_path), texts(tmp_path), "--output_dir", out) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["task", "metric", "score", "95%", "interval", "stderr", "questions"]
    assert f"wrote {out / 'results.json'}" in shown
    result = read_result(str(out))
    found = {score.name: score.value for score in result.scores}
    assert found.keys() >= {"choices/acc", "texts/byte_perplexity"} and result.settings["batch_size"] == 8
    samples = [json.loads(line) for line in (out / "samples_choices.jsonl").read_text().splitlines()]
    assert len(samples) == 20 and sum(s["acc"] for s in samples) / 20 == found["choices/acc"]
    page = (out / "results.html").read_text()
    assert "<script" not in page and "choices" in page and "0+1=" in page


def test_two_models(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = choices(tmp_path)
    other = folder(tmp_path / "other", hidden_size=16)
    assert run("--model", other, "--tasks", file, "--output_dir", tmp_path / "a") == 0
    words = ("--model", model, "--tasks", file, "--output_dir", tmp_path / "b", "--baseline", tmp_path / "a")
    assert run(*words) == 0
    first, second = (read_result(str(tmp_path / name)) for name in "ab")
    row = next(
        line.split() for line in capsys.readouterr().out.split("compared with")[1].splitlines() if "acc " in line
    )
    expected = second.scores[0].value - first.scores[0].value
    assert expected and float(row[2]) == pytest.approx(expected, abs=1e-3)
    assert f"{expected:+.4g}" in (tmp_path / "b" / "results.html").read_text()


def test_limit_and_generation(model: Path, tmp_path: Path) -> None:
    words = ["--model", model, "--tasks", answers(tmp_path), "--limit", 3, "--max_new_tokens", 2]
    assert run(*words, "--output_dir", tmp_path / "out", "--apply_chat_template", "false") == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples_answers.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and lines[0]["arguments"][0][0] == "0+0=\n"
    assert lines[0]["arguments"][0][1]["max_gen_toks"] == 2


def test_mistakes_before_a_model_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tasks: is missing" in refused("--model", "m")
    assert "--model: is missing" in refused("--tasks", "arc_easy")
    assert "--base_url http://127.0.0.1:8000/v1" in refused("--model", "m", "--tasks", "a", "--infer_backend", "server")
    assert "megaswift deploy --infer_backend vllm" in refused("--model", "m", "--tasks", "a", "--infer_backend", "vllm")
    served = ("--base_url", "http://h/v1", "--tasks", "a")
    assert "--torch_dtype bfloat16: would be ignored: the server" in refused(*served, "--torch_dtype", "bfloat16")
    assert "--device_map" in refused(*served, "--device_map", "cpu")
    assert "--think_end_token" in refused("--model", "m", "--tasks", "a", "--enable_thinking", "true")
    assert "--limit 1.5: is no number" in refused("--model", "m", "--tasks", "a", "--limit", "1.5")
    (tmp_path / "results.json").touch()
    assert "nothing is overwritten" in refused("--model", "m", "--tasks", "a", "--output_dir", tmp_path)
    assert run("--model", "m", "--tasks", "a", "--baseline", tmp_path, "--output_dir", tmp_path / "new") == 2
    assert "is not the result of megaswift eval" in capsys.readouterr().err


def test_files_that_are_no_tasks_and_wrong_rows(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every mistake in one message."""
    (tmp_path / "task.yaml").write_text("output_type: generate_until\n")
    words = ("--model", model, "--output_dir", tmp_path / "out", "--tasks")
    assert run(*words, tmp_path / "task.yaml", tmp_path / "none.yaml") == 2
    told = capsys.readouterr().err
    assert "task.yaml: is not a task file" in told and "none.yaml: no such file" in told
    file = write_rows(tmp_path / "q.jsonl", [{"question": "q", "answer": "a"}, {"question": "q"}])
    assert run(*words, file) == 2
    assert f"{file}:2: column answer: nothing; expected the reference answer" in capsys.readouterr().err


@pytest.mark.slow
def test_an_unknown_task(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slow because of the index of all names."""
    assert run("--model", model, "--output_dir", tmp_path / "out", "--tasks", "arc_eazy,gsm8k_") == 2
    told = capsys.readouterr().err
    assert "--tasks arc_eazy: is no task" in told and "near names: arc_easy" in told and "gsm8k" in told


def test_data_that_is_not_here(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = Path(task_files(tmp_path)[0])
    task.write_text(task.read_text().replace("choices.jsonl", "gone.jsonl"))
    assert run("--model", model, "--tasks", task, "--output_dir", tmp_path / "out") == 2
    assert "its data cannot be read: Unable to find" in capsys.readouterr().err


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a))
    assert run("--model", "m", "--tasks", "a") == 2
    assert "run pip install 'megaswift[eval]'" in capsys.readouterr().err


def test_names_of_ms_swift() -> None:
    words = "--model m --eval_dataset ARC_c gsm8k --eval_limit 5 --eval_backend Native --eval_num_proc 4"
    more = "--eval_output_dir out --infer_backend pt --verbose true"
    parsed = COMMAND.parse([*words.split(), *more.split()])
    task = parsed.sections["task"]
    assert task.tasks == ("arc_challenge", "gsm8k") and task.limit == 5
    assert parsed.sections["output"].output_dir == "out" and "eval_num_proc" in " ".join(parsed.notices)
    assert "evalscope" in refused("--model", "m", "--eval_dataset", "arc", "--eval_backend", "OpenCompass")


class Silent(BaseHTTPRequestHandler):
    """A server that knows no models."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_server_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tasks", answers(tmp_path), "--output_dir", tmp_path / "out", "--base_url")
    with serve_loopback(Silent) as address:
        assert run(*words, f"{address}/v1") == 2
        assert "answers 404 to GET /models" in capsys.readouterr().err
    assert run(*words, f"{address}/v1") == 2
    assert "is not reached" in capsys.readouterr().err


def wait_for(address: str, token: str) -> None:
    """Return when a server answers."""
    end = time.monotonic() + 60
    while True:
        request = urllib.request.Request(f"{address}/models", headers={"Authorization": f"Bearer {token}"})
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.process
def test_scores_of_our_server_are_those_of_this_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices and answers are equal; perplexity up to the rounding of log-probabilities in JSON and batches."""
    from tests.serve.test_app import TOKEN, serving

    tasks = task_files(tmp_path)
    words = ("--model", model, "--tasks", *tasks, answers(tmp_path), "--max_new_tokens", 6, "--output_dir")
    assert run(*words, tmp_path / "here") == 0
    monkeypatch.setenv("MEGASWIFT_API_KEY", TOKEN)
    with serving(tmp_path, "--model", str(model)) as address:
        wait_for(address, TOKEN)
        assert run(*words, tmp_path / "there", "--base_url", address) == 0
    here, there = ({s.name: s.value for s in read_result(str(tmp_path / name)).scores} for name in ("here", "there"))
    assert here.keys() == there.keys() and len(here) == 8
    for name, value in here.items():
        assert there[name] == (pytest.approx(value, rel=1e-5) if "text" in name else value), name
