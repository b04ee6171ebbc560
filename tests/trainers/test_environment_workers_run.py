"""Whole runs whose environments are in Ray actors without a GPU, with engines on Ray and without."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from megaswift.trainers.rl.record import RolloutReader
from tests.trainers.inputs import write_model
from tests.trainers.test_policy_run import WORLD
from tests.trainers.test_ray_engines_run import begin, end, ray_folder  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.process, pytest.mark.slow]
WORKER = "ray::EnvironmentWorker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, prompts, an environment that rewards digits."""
    made = tmp_path_factory.mktemp("worlds")
    write_model(made / "model")
    rows = [{"prompt": [{"role": "user", "content": f"{i % 10}+{(7 * i) % 10}"}], "number": i} for i in range(12)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (made / "world.py").write_text(WORLD)
    return made


def found(out: Path) -> list[object]:
    """Tokens, rewards and conversations of every generation, and the weights."""
    reader = RolloutReader(out / "rollouts")
    parts = ("rows", "tokens", "own", "total", "seeds", "conversations")
    records = [[reader.read(number)[part] for part in parts] for number in reader.files]
    return [*records, (out / "hf" / "model.safetensors").read_bytes()]


def words(folder: Path) -> tuple[object, ...]:
    return ("--environment", f"{folder / 'world.py'}:Waits", "--max_turns", 3)


def test_conversations_are_those_of_the_trainer_s_processes(
    folder: Path,
    tmp_path: Path,
    ray_folder: dict[str, str],  # noqa: F811
) -> None:
    """Two workers, with the sampler in the process and with two engines."""
    plain = tmp_path / "plain"
    end(begin(folder, plain, *words(folder), "--max_steps", 3, reward=None), plain)
    on_ray = ("--environment_placement", "cpu", "--environment_workers", 2)
    for name, more in (("apart", ()), ("engines", ("--sampler_engines", 2))):
        out = tmp_path / name
        end(begin(folder, out, *words(folder), "--max_steps", 3, *on_ray, *more, reward=None, **ray_folder), out)
        assert found(out) == found(plain), name


def test_the_end_of_a_worker_ends_the_run(folder: Path, tmp_path: Path, ray_folder: dict[str, str]) -> None:  # noqa: F811
    """With one message and exit code 2, and with all of Ray's processes."""
    out = tmp_path / "out"
    on_ray = ("--environment_placement", "cpu", "--max_steps", 1000)
    process = begin(folder, out, *words(folder), *on_ray, reward=None, **ray_folder)
    try:
        until = time.monotonic() + 200
        while not (out / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        for member in family:
            if member.is_running() and (member.cmdline() or [""])[0].startswith(WORKER):
                member.kill()
        process.wait(60)
        assert not psutil.wait_procs(family, 30)[1]
    finally:
        if process.poll() is None:
            process.kill()
    text = out.with_suffix(".log").read_text()
    assert process.returncode == 2 and text.count("megaswift: the rewards cannot be used") == 1, text[-3000:]
    assert "a worker of environments has ended" in text
    assert "Traceback" not in text
