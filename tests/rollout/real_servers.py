"""What tests of real sampling servers share: how one starts and ends, what it has to answer, and a run that it samples
for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megaswift.rollout.backends.transformers_sampler import build
from megaswift.rollout.sampler import SamplerOptions, SamplingParams
from megaswift.rollout.server_client import SamplingServer, ServerError
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.record import RolloutReader
from tests.rollout.test_transformers import weights
from tests.sources import ROOT
from tests.trainers.inputs import write_conversations, write_model
from tests.trainers.runs import finish, start
from tests.trainers.test_grpo_run import REWARDS

GAP = 1e-4
"""How far log-probabilities in float32 may be apart, which two other kernels add up."""
NEW = 8
"""Tokens of the longest answer."""
PROMPTS = [[3, 9, 12, 2], [3, 30, 31, 32, 33, 2], [3, 8, 2]]
GREEDY, DRAWN = SamplingParams(NEW, temperature=0), SamplingParams(NEW, stop_token_ids=(1,))


def write_wide_model(path: Path, ends: bool = True) -> None:
    """Heads as wide as the servers' kernels take them, and weights by which answers differ; `ends`: or else few of them
    end."""
    from safetensors.torch import save_file

    write_model(path, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    tensors = load_file(path / "model.safetensors")
    if not ends:
        tensors["lm_head.weight"][1] = 0
    save_file(
        {n: t * 4 if t.dim() > 1 else t for n, t in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(words: Sequence[str], port: int, log: Path, **environ: str) -> Iterator[str]:
    """The address of a server process, once it is well; nothing of it lives on."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *words, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 600
    try:
        while not well(url):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
            time.sleep(1)
        yield url
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(60)
        for member in family:
            if member.is_running():
                member.kill()


def well(url: str) -> bool:
    try:
        SamplingServer(url, 10, "test", "").get("/health")
    except ServerError:
        return False
    return True


def assert_same(made: Any, alone: Any, gap: float) -> None:
    """Greedy tokens and their log-probabilities; drawn tokens have those that the model gives them."""
    theirs, ours = (s.generate(PROMPTS, GREEDY, range(3)) for s in (made, alone))
    assert [c.token_ids for c in theirs] == [c.token_ids for c in ours] and len({c.token_ids for c in ours}) == 3
    for left, right in zip(theirs, ours, strict=True):
        assert left.logprobs == pytest.approx(right.logprobs, abs=gap)
    drawn, again = (made.generate(PROMPTS, DRAWN, range(7, 10)) for _ in range(2))
    assert [c.token_ids for c in drawn] == [c.token_ids for c in again]
    with torch.no_grad():
        for prompt, found in zip(PROMPTS, drawn, strict=True):
            told = torch.log_softmax(alone.model(torch.tensor([[*prompt, *found.token_ids]])).logits[0].float(), -1)
            wanted = [float(told[len(prompt) - 1 + i, t]) for i, t in enumerate(found.token_ids)]
            assert found.logprobs == pytest.approx(wanted, abs=gap) and found.finished == (found.token_ids[-1] == 1)


def assert_takes_weights(made: Any, model: Path, gap: float) -> None:
    """Other weights, then the folder's own: it answers by those that it was given last."""
    for factor in (1.1, 1.0):
        changed = [(n, t * factor) for n, t in weights(model)]
        alone = build(model, SamplerOptions())
        alone.update_weights(changed)
        made.update_weights(changed)
        assert_same(made, alone, gap)


USUAL: dict[str, object] = {
    "--lr": "1e-3",
    "--max_completion_length": 6,
    "--global_batch_size": 8,
    "--per_device_train_batch_size": 4,
    "--torch_dtype": "float32",
    "--report_to": "none",
    "--max_steps": 3,
}
QUEUE: dict[str, object] = {
    "--max_steps": 6,
    "--max_staleness": 2,
    "--lr_scheduler_type": "constant",
    "--warmup_ratio": 0,
}
"""Of a run whose completions go on with new weights; fewer steps of it have the same weights."""


def trained(task: str, model: Path, rows: Path, *options: object, ranks: int) -> list[dict[str, Any]]:
    """Metrics of three steps by torchrun, in a folder beside the rows."""
    inputs = [str(w) for pair in {"--model": model, "--dataset": rows, **USUAL}.items() for w in pair]
    process = start(inputs, rows.parent / "out", *options, ranks=ranks, script=f"megaswift/{task}.py")
    text = finish(process)
    assert process.returncode == 0, text[-5000:]
    return read_lines(rows.parent / "out" / "metrics.jsonl")


def grpo(model: Path, folder: Path, *options: object, ranks: int = 1) -> list[dict[str, Any]]:
    prompts = [{"prompt": f"{i % 10}+{(7 * i) % 10}=", "number": i} for i in range(12)]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    rewards = ("--reward_funcs", f"{folder / 'rewards.py'}:digits", "--num_generations", 4, "--max_length", 32)
    return trained("grpo", model, rows, *rewards, *options, ranks=ranks)


def gkd(model: Path, folder: Path, *options: object, ranks: int = 1) -> list[dict[str, Any]]:
    """All steps on the likeliest completions of the student; the teacher is another tiny model."""
    folder.mkdir()
    write_model(folder / "teacher", layers=3)
    write_conversations(folder / "rows.jsonl")
    own = ("--teacher_model", folder / "teacher", "--lmbda", 1, "--top_k", 1, "--max_length", 64)
    return trained("gkd", model, folder / "rows.jsonl", *own, *options, ranks=ranks)


WORLDS = '''
import asyncio
import json
import os
import random
import time
from pathlib import Path


def note(line):
    """A line in the file beside this one."""
    with Path(__file__).with_name("noted.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")


class Chance:
    """Answers by chance, after a time by chance."""

    def reset(self, prompt, number, **columns):
        self.chance = random.Random(os.urandom(8))
        self.turns = 0
        note([number, os.getpid()])

    def step(self, answer):
        time.sleep(self.chance.random() / 10)
        self.turns += 1
        reward = sum(c.isdigit() for c in answer) / 10
        return [{"role": "user", "content": str(self.chance.randrange(10))}], reward, self.chance.random() < 0.3


class Agent:
    """Asks three times; rows of odd numbers begin anew for the third."""

    async def run(self, prompt, base_url, number, **columns):
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0)
        messages, said = list(prompt), []
        for turn in range(3):
            if turn == 2 and number % 2:
                messages = [{"role": "user", "content": "2"}]
            given = {"model": "policy", "messages": messages, "max_tokens": 5}
            said.append((await client.chat.completions.create(**given)).choices[0].message.content)
            await asyncio.sleep(random.Random(os.urandom(8)).random() / 10)
            messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "3"}]
        note([number, os.getpid(), said])
        return sum(c.isdigit() for text in said for c in text) / 10
'''


def talk(model: Path, folder: Path, world: str, *options: object, ranks: int = 1) -> list[list[Any]]:
    """Three steps on conversations, on policy; what `WORLDS` have noted of them."""
    asked = [[{"role": "user", "content": f"{i % 10}+{(7 * i) % 10}"}] for i in range(12)]
    lines = [json.dumps({"prompt": prompt, "number": i}) + "\n" for i, prompt in enumerate(asked)]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "worlds.py").write_text(WORLDS, encoding="utf-8")
    own = ("--environment", f"{folder / 'worlds.py'}:{world}", "--num_generations", 4, "--max_length", 90)
    own += ("--max_completion_length", 60, "--max_turns", 4, "--save_rollouts", folder / "saved")
    metrics = trained("grpo", model, folder / "rows.jsonl", *own, *options, ranks=ranks)
    assert_on_policy(metrics, GAP)
    return [json.loads(line) for line in (folder / "noted.jsonl").read_text().splitlines()]


def assert_agents_got_what_is_trained(folder: Path, noted: list[list[Any]]) -> None:
    """The recorded conversations are the sessions as their agents have noted them; some sessions have two segments."""
    found = []
    kinds = set()
    for step in range(3):
        generation = RolloutReader(folder / "saved").read(step)
        for row, conversation in zip(generation["rows"], generation["conversations"], strict=True):
            found.append([row, [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]])
            kinds.add(tuple(conversation["segments"]))
    assert sorted(found) == sorted([number, said] for number, _, said in noted)
    assert kinds == {("first",), ("first", "edited")}


def assert_distilled(lines: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """The same completions at every step, each by the weights of that step."""
    for mine, theirs in zip(lines, wanted, strict=True):
        assert mine["label_tokens"] == theirs["label_tokens"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert len({line["loss"] for line in wanted}) == 3


def assert_on_policy(lines: list[dict[str, Any]], gap: float) -> None:
    """Sampler and trainer have the same weights at every step."""
    assert len(lines) == 3 and len({line["grad_norm"] for line in lines}) == 3
    assert all(line["sampling/sampling_logp_difference/max"] < gap for line in lines)


def assert_continued(model: Path, folder: Path, gap: float, room: int, *options: object) -> None:
    """A run over a queue, of prompts and completions of up to `room` tokens, which take two requests.

    The log-probability of each token is that of the weights of its version, which are those of a run that trains on so
    many recorded generations; all of them lead to the same bits.
    """
    saved = folder / "saved"
    usual = [word for pair in QUEUE.items() for word in pair]
    usual += ["--max_length", room, "--max_completion_length", room - 10]
    (folder / "run").mkdir()
    lines = grpo(model, folder / "run", *usual, *options, "--save_rollouts", saved)
    assert all(line["sampling/staleness_max"] <= 2 for line in lines)
    assert max(line["sampling/mixed_versions"] for line in lines) > 0
    assert lines[0]["sampling/sampling_logp_difference/max"] < gap
    steps = len(lines)
    models = {0: model}
    for step in range(1, steps + 1):
        again = folder / f"{step}"
        again.mkdir()
        grpo(model, again, *usual, "--replay_rollouts", saved, "--max_steps", step)
        models[step] = again / "out" / "hf"
    mine, theirs = (load_file(out / "model.safetensors") for out in (models[steps], folder / "run" / "out" / "hf"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in theirs)
    scorers = {step: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for step, path in models.items()}
    for number in range(steps):
        generation = RolloutReader(saved).read(number)
        prompts = [*accumulate(generation["prompt_lengths"], initial=0)]
        for i, (first, last) in enumerate(pairwise(accumulate(generation["lengths"], initial=0))):
            at = generation["prompt"][i]
            prompt = generation["prompt_tokens"][prompts[at] : prompts[at + 1]]
            ids = [*prompt, *generation["tokens"][first:last]]
            versions = generation["versions"][first:last]
            assert versions == sorted(versions) and number - 2 <= versions[0] and versions[-1] <= number
            for version in {*versions}:
                with torch.no_grad():
                    told = torch.log_softmax(scorers[version](torch.tensor([ids])).logits[0], -1)
                for k in (k for k, one in enumerate(versions) if one == version):
                    wanted = float(told[len(prompt) + k - 1, ids[len(prompt) + k]])
                    assert generation["logprobs"][first + k] == pytest.approx(wanted, abs=gap)
