"""Environments of verifiers: one of its own examples, unmodified, leads the conversations of a run.

Covers: megaswift/trainers/rl/adapters/verifiers.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.errors import ConfigError
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.adapters import verifiers
from megaswift.trainers.rl.environment import load_environment_class
from tests.sources import ROOT
from tests.trainers.inputs import write_model
from tests.trainers.rl.adapters.glossary_call import check_call_and_answer

PYTHON = os.environ.get("MEGASWIFT_VERIFIERS_PYTHON", "")
CHECKOUT = os.environ.get("MEGASWIFT_VERIFIERS", "")


class Made:
    """An environment of verifiers, of two tasks: it records what it is run with."""

    def __init__(self, error: str = "") -> None:
        self.taskset = SimpleNamespace(bounded=True)
        self.taskset = type("Tasks", (), {"bounded": True, "__iter__": lambda _: iter(["a", "b"])})()
        self.served = 0
        self.ran: list[tuple[str, str]] = []
        self.error = error

    @asynccontextmanager
    async def serving(self) -> Any:
        self.served += 1
        await asyncio.sleep(0)
        yield

    def slots(self, task: str) -> Sequence[str]:
        return [task]

    async def run_slot(self, slot: str, context: Any) -> Any:
        self.ran.append((slot, context.client.base_url))
        errors = [SimpleNamespace(type="ProviderError", message=self.error)] if self.error else []
        traces = [SimpleNamespace(errors=errors, reward=0.5), SimpleNamespace(errors=[], reward=0.25)]
        return SimpleNamespace(errors=[], traces=traces)


def run(made: Made, monkeypatch: pytest.MonkeyPatch, *tasks: int) -> list[float]:
    """The rewards of tasks, all at a time."""
    modules = {
        "verifiers.v1.utils.loaders": SimpleNamespace(load_environment=lambda raw: made, resolve_env_config=dict),
        "verifiers.v1.clients": SimpleNamespace(EvalClientConfig=SimpleNamespace, ModelContext=SimpleNamespace),
        "verifiers.v1.types": SimpleNamespace(SamplingConfig=dict),
    }
    monkeypatch.setattr(verifiers.importlib, "import_module", modules.__getitem__)

    async def together() -> list[float]:
        served = verifiers.ServedEnvironment("glossary")
        agents = [verifiers.VerifiersAgent(served).run([], f"http://{task}", task) for task in tasks]
        return await asyncio.gather(*agents)

    return asyncio.run(together())


def test_episodes_share_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    assert run(made, monkeypatch, 1, 0, 1) == [0.75] * 3 and made.served == 1
    assert sorted(made.ran) == [("a", "http://0"), ("b", "http://1"), ("b", "http://1")]


def test_errors_of_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that has become too long keeps its reward."""
    assert run(Made("400: context_length_exceeded"), monkeypatch, 0) == [0.75]
    with pytest.raises(RuntimeError, match="ProviderError: no docker"):
        run(Made("no docker"), monkeypatch, 0)
    with pytest.raises(ValueError, match="the column task is 2; the taskset has 2 tasks"):
        run(Made(), monkeypatch, 2)


def test_what_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_environment_class(f"verifiers:{tmp_path}/env.toml")
    (tmp_path / "env.toml").write_text("[taskset\n")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        load_environment_class(f"verifiers:{tmp_path}/env.toml")
    monkeypatch.setattr(verifiers.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install verifiers"):
        load_environment_class("verifiers:glossary")
    monkeypatch.setattr(verifiers.util, "find_spec", lambda name: True)
    with pytest.raises(ConfigError, match="names no taskset"):
        load_environment_class("verifiers:")
    (tmp_path / "env.toml").write_text('[taskset]\nid = "glossary"\n')
    made = load_environment_class(f"verifiers:{tmp_path}/env.toml")()
    assert isinstance(made, verifiers.VerifiersAgent)
    assert made.served._settings() == {"taskset": {"id": "glossary"}}


def environ() -> dict[str, str]:
    """Of a process that has verifiers and its example. Not by PYTHONPATH: verifiers' programs would have it too."""
    return os.environ | {"PATH": f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}


def started(code: str) -> list[str]:
    """A command that runs code with the checkout's example and this repository in front of the modules."""
    places = [str(Path(CHECKOUT) / "environments" / "glossary"), str(ROOT)]
    return [PYTHON, "-c", f"import sys; sys.path[:0] = {places}\n{code}"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(
    not (PYTHON and CHECKOUT), reason="MEGASWIFT_VERIFIERS_PYTHON or MEGASWIFT_VERIFIERS is not set (CONTRIBUTING.md)"
)
class TestRealVerifiers:
    """The environment `glossary` of verifiers' repository, with its server of tools."""

    def test_a_call_and_an_answer(self, tmp_path: Path) -> None:
        """Tool and answer as they should be have the environment's reward."""
        name = check_call_and_answer.__name__
        code = f"from {check_call_and_answer.__module__} import {name}\n{name}()"
        done = subprocess.run(started(code), cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]

    def test_a_run(self, tmp_path: Path) -> None:
        write_model(tmp_path / "model")
        rows = [{"prompt": [{"role": "user", "content": f"task {i}"}], "task": i % 4} for i in range(8)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        words = ["grpo", "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl")]
        words += ["--output_dir", str(tmp_path / "out"), "--environment", "verifiers:glossary", "--max_turns", "3"]
        words += ["--num_generations", "2", "--max_completion_length", "30", "--max_length", "4000"]
        words += ["--per_device_train_batch_size", "2", "--global_batch_size", "4", "--torch_dtype", "float32"]
        words += ["--max_steps", "2", "--report_to", "none"]
        code = f"from megaswift.commands.training import main\nsys.exit(main({words[0]!r}, {words[1:]!r}))"
        done = subprocess.run(started(code), cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        lines = read_lines(tmp_path / "out" / "completions.jsonl")
        assert len(lines) == 8 and all("facts_lookup" in json.dumps(line["prompt"]) for line in lines)
        metrics = read_lines(tmp_path / "out" / "metrics.jsonl")
        assert metrics[0]["sampling/sampling_logp_difference/max"] < 1e-5 and metrics[0]["agent/segments"] == 1
