"""Runs that are recorded, and runs that train on the record without a sampler.

Covers: megaswift/trainers/rl/record.py, megaswift/run/policy_task.py.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from megaswift.data.prompts.source import Prompt
from megaswift.errors import CheckpointError, ConfigError
from megaswift.rollout.sampler import Completion
from megaswift.run.model_files import sampled_weights_fingerprint
from megaswift.run.policy_task import rollout_files, start_fingerprint
from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl import record
from megaswift.trainers.rl.generation import completion_seeds
from megaswift.trainers.rl.multi_turn import MultiTurnCompletion
from megaswift.trainers.rl.record import Generation, RolloutReader, RolloutWriter, generation_of, recorded_files
from megaswift.trainers.rl.scorer import ScoredCompletion
from tests.parity.pool import RankError
from tests.trainers.inputs import write_model
from tests.trainers.rl.makers import source
from tests.trainers.runs import run

SLOW = pytest.mark.slow
STEPS, BYTES = 5, 40
USUAL: dict[str, object] = {
    "--lr": "1e-2",
    "--report_to": "none",
    "--num_generations": 4,
    "--max_completion_length": 6,
    "--max_length": 32,
    "--beta": 0.1,
    "--generation_batch_size": 16,
    "--global_batch_size": 8,
    "--torch_dtype": "float32",
    "--max_steps": STEPS,
}
REWARDS = """def digits(completions, **_):
    return [sum(c.isdigit() for c in str(text)) / (1 + len(text)) for text in completions]
"""
ENVIRONMENT = """class Again:
    def reset(self, prompt, **columns):
        self.turns = 0

    def step(self, answer):
        self.turns += 1
        return [{"role": "user", "content": "2?"}], 0.5 * len(answer), self.turns == 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("record")
    write_model(made / "model")
    rows = [{"prompt": f"{i % 10}+{(7 * i) % 10}=" + "?" * (i % 3), "number": i} for i in range(12)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    talks = [{"messages": [{"role": "user", "content": row["prompt"]}], "number": row["number"]} for row in rows]
    (made / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks), encoding="utf-8")
    (made / "rewards.py").write_text(REWARDS, encoding="utf-8")
    return made


def trained(folder: Path, out: Path, *options: object, ranks: int = 1, task: str = "grpo") -> list[dict[str, Any]]:
    """A run's metrics."""
    inputs = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl")]
    inputs += ["--dataset_cache_dir", str(folder / "cache"), "--reward_funcs", f"{folder / 'rewards.py'}:digits"]
    usual = {**USUAL, "--per_device_train_batch_size": 8 if ranks == 1 else 4}
    inputs += [str(word) for pair in usual.items() if pair[0] not in options for word in pair]
    run(inputs, out, *options, ranks=ranks, task=task)
    return read_lines(out / "metrics.jsonl")


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The exported tensors."""
    (file,) = [*(out / "hf").glob("*.safetensors")] or [*(out / "adapter").glob("*.safetensors")]
    return load_file(file)


LORA = ("--train_type", "lora", "--lora_rank", 4)
KINDS: list[Any] = [
    pytest.param("grpo", (), 1, id="grpo"),
    *(
        pytest.param(task, options, ranks, id=name, marks=SLOW)
        for name, task, options, ranks in (
            ("ppo", "ppo", (), 1),
            ("lora", "grpo", LORA, 1),
            ("asynchronous", "grpo", ("--async_generation", "true"), 1),
            ("queue", "grpo", ("--max_staleness", 5, "--num_iterations", 1), 1),
            ("again", "grpo", ("--dynamic_sample", "true", "--max_resample_times", 2), 1),
            (
                "environment",
                "grpo",
                ("--environment", "ENVIRONMENT", "--dataset", "talks.jsonl", "--max_length", 64),
                2,
            ),
            ("greedy", "grpo", ("--advantage_estimator", "remax"), 1),
            ("tp2", "grpo", ("--tp", 2, "--per_device_train_batch_size", 8), 2),
            ("dp2", "grpo", (), 2),
            ("zero3", "grpo", ("--engine", "zero3"), 2),
        )
    ),
]


@pytest.mark.process
@pytest.mark.parametrize(("task", "options", "ranks"), KINDS)
def test_a_replayed_run_has_the_same_weights(
    task: str, options: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path
) -> None:
    """Bit by bit after five steps; nothing is sampled, and no reward is computed."""
    (folder / "talk.py").write_text(ENVIRONMENT, encoding="utf-8")
    files = {"ENVIRONMENT": f"{folder / 'talk.py'}:Again", "talks.jsonl": str(folder / "talks.jsonl")}
    options = tuple(files.get(str(word), word) for word in options)
    saved = tmp_path / "saved"
    recorded = trained(folder, tmp_path / "whole", *options, "--save_rollouts", saved, ranks=ranks, task=task)
    again = (*options, "--replay_rollouts", saved, "--reward_funcs", "format")
    replayed = trained(folder, tmp_path / "again", *again, ranks=ranks, task=task)
    for key in ("loss", "grad_norm", "reward"):
        assert [line[key] for line in recorded] == [line[key] for line in replayed]
    assert len({line["loss"] for line in recorded}) == STEPS
    assert all("time/generation" not in line for line in replayed)
    mine, theirs = weights(tmp_path / "again"), weights(tmp_path / "whole")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in theirs)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    ("task", "options", "layout"),
    [
        pytest.param("grpo", (), ("--tp", 2), id="tp2"),
        pytest.param("grpo", (), ("--pp", 2), id="pp2"),
        pytest.param("grpo", (), ("--cp", 2), id="cp2"),
        pytest.param("grpo", (), (), id="dp2"),
        pytest.param("grpo", (), ("--engine", "fsdp2"), id="fsdp2"),
        pytest.param("grpo", LORA, ("--tp", 2), id="lora-tp2"),
        pytest.param("ppo", (), (), id="ppo-dp2"),
    ],
)
def test_another_layout_trains_on_the_same_record(
    task: str, options: tuple[object, ...], layout: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    trained(folder, tmp_path / "whole", *options, "--save_rollouts", tmp_path / "saved", task=task)
    width = ("--per_device_train_batch_size", 4 if layout in ((), ("--engine", "fsdp2")) else 8)
    replay = (*options, "--replay_rollouts", tmp_path / "saved", *layout, *width)
    trained(folder, tmp_path / "other", *replay, ranks=2, task=task)
    mine, theirs = weights(tmp_path / "other"), weights(tmp_path / "whole")
    assert mine.keys() == theirs.keys()
    assert max(float((mine[n] - theirs[n]).abs().max()) for n in theirs) <= 1e-5


@pytest.mark.process
@SLOW
def test_a_replay_goes_on_from_a_checkpoint_of_its_own(folder: Path, tmp_path: Path) -> None:
    """In the middle of a generation; a recorded run that is resumed writes the generations that follow, without a
    fingerprint of the weights that it began with."""
    save = ("--save_rollouts", tmp_path / "saved", "--save_steps", 3)
    whole = trained(folder, tmp_path / "whole", *save)
    step = ("--resume_from_checkpoint", tmp_path / "whole/checkpoints/step-3")
    files = recorded_files(tmp_path / "saved")
    reader = RolloutReader(tmp_path / "saved")
    content = [reader.read(number) for number in files]
    assert content[-1]["weights"]
    content[-1]["weights"] = None
    files[max(files)].unlink()
    trained(folder, tmp_path / "resumed", *save, *step)
    assert [reader.read(number) for number in files] == content
    replay = ("--replay_rollouts", tmp_path / "saved", "--save_steps", 3)
    trained(folder, tmp_path / "again", *replay)
    step = ("--resume_from_checkpoint", tmp_path / "again/checkpoints/step-3")
    rest = trained(folder, tmp_path / "rest", *replay, *step)
    assert [line["loss"] for line in rest] == [line["loss"] for line in whole[3:]]


@pytest.mark.process
@SLOW
def test_mistakes_are_told_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    trained(folder, tmp_path / "whole", "--save_rollouts", saved)
    for name, options, said in (
        ("twice", ("--save_rollouts", saved), "has the rollouts of another run"),
        ("nowhere", ("--replay_rollouts", tmp_path / "nowhere"), "is not a folder with rollouts"),
        ("long", ("--replay_rollouts", saved, "--max_steps", 9), "has 3 generations, and the run takes 5"),
        ("size", ("--replay_rollouts", saved, "--generation_batch_size", 8), "16 completions a generation"),
        ("seed", ("--replay_rollouts", saved, "--seed", 5), "answers row"),
        ("temperature", ("--replay_rollouts", saved, "--temperature", 0.5), "--temperature 1.0"),
        ("held-out", ("--replay_rollouts", saved, "--split_dataset_ratio", 0.2), "held-out prompts"),
    ):
        with pytest.raises(RankError) as error:
            trained(folder, tmp_path / name, *options, ranks=2)
        assert said in str(error.value) and "exit status 2" in str(error.value), (name, str(error.value)[-3000:])
        metrics = tmp_path / name / "metrics.jsonl"
        assert not metrics.exists() or not metrics.read_text()


def rollouts(length: int = 100) -> Generation:
    """A generation of two prompts, conversations and token rewards among them."""
    prompts = [Prompt(number, (5, 6, number), "text", {}) for number in (3, 8) for _ in range(2)]
    tokens = tuple(range(length))
    versions = ((6, 40), (7, length - 40))
    plain = Completion(tokens, tuple(-0.1 * (i % 7) for i in tokens), True, versions=versions)
    own = tuple(i % 3 > 0 for i in tokens)
    message = {"role": "user", "content": "ja \U0001f600"}
    talk = MultiTurnCompletion(
        tokens,
        (-0.5,) * sum(own),
        False,
        versions=((6, length),),
        own=own,
        messages=(message,),
        rewards=(0.25,),
        ends=(3,),
        turns=2,
        segments=("first", "edited", "rewound"),
        further=((40, (7, 8, 9)), (70, (4,))),
    )
    answers = [plain, talk, plain, plain]
    found = [
        ScoredCompletion(
            p,
            c,
            "text",
            {"a": 0.1 * i, "b": math.nan},
            0.1 * i if i < 3 else math.nan,
            {1: (), 2: (0.5, 0.1, 1 / 3)}.get(i),
            0.75 if i == 3 else math.nan,
        )
        for i, (p, c) in enumerate(zip(prompts, answers, strict=True))
    ]
    places, asked = (0, 1, 6, 7), tuple(p.token_ids for p in prompts)
    return Generation(4, 2, places, (1, 2, 3, 2**62), asked, tuple(found), (8, 9, 3, 11), 0.7)


def test_a_generation_comes_back(tmp_path: Path) -> None:
    """Values and types; not a number stays so."""
    given = rollouts()
    RolloutWriter(tmp_path, resumed=False).write(given)
    other = Prompt(1, (9,), "other", {})
    taken = [r.prompt for r in given.rollouts[:2]] + [other] * 4 + [r.prompt for r in given.rollouts[2:]]
    found = generation_of(RolloutReader(tmp_path).read(4), taken, lambda _: "text")
    for mine, theirs in zip(found.rollouts, given.rollouts, strict=True):
        said, wanted = (np.float32(r.completion.logprobs).tolist() for r in (mine, theirs))
        assert said == wanted and mine.completion.token_ids == theirs.completion.token_ids
        assert type(mine.completion) is type(theirs.completion)
        assert mine.completion.versions == theirs.completion.versions
        assert math.isnan(mine.rewards["b"]) and mine.rewards["a"] == theirs.rewards["a"]
        assert [str(mine.baseline), str(mine.total)] == [str(theirs.baseline), str(theirs.total)]
        assert (mine.prompt, mine.tokens, mine.text) == (theirs.prompt, theirs.tokens, "text")
    talk, wanted_talk = (r.rollouts[1].completion for r in (found, given))
    assert isinstance(talk, MultiTurnCompletion) and isinstance(wanted_talk, MultiTurnCompletion)
    assert replace(talk, logprobs=()) == replace(wanted_talk, logprobs=())
    assert (found.number, found.draws, found.places, found.seeds) == (4, 2, given.places, given.seeds)
    assert found.drawn == given.drawn
    with pytest.raises(ConfigError, match="completion 2 of generation 4 answers row 8; the run draws row 1"):
        generation_of(RolloutReader(tmp_path).read(4), [*taken[:6], other, other], lambda _: "")
    with pytest.raises(ConfigError, match="has no generation 9"):
        RolloutReader(tmp_path).read(9)


def test_a_record_of_another_model_or_of_other_prompts(tmp_path: Path) -> None:
    """Found before a model is built; a run from random weights, and an earlier record, have no fingerprint."""
    given = replace(rollouts(), number=0)
    RolloutWriter(tmp_path, resumed=False, weights="a1").write(given)
    other = Prompt(1, (9,), "other", {})
    taken = [r.prompt for r in given.rollouts[:2]] + [other] * 4 + [r.prompt for r in given.rollouts[2:]]
    places: list[Any] = []

    def prompts_at(asked: Any) -> list[Prompt]:
        places.append([*asked])
        return taken

    for fingerprint in ("a1", None):
        RolloutReader(tmp_path, fingerprint).check(1, 4, 0.7, prompts_at)
    assert places == [[8, 9, 3, 11]] * 2
    with pytest.raises(ConfigError, match=r"of a run that started from another model\n.*--model of the recorded run"):
        RolloutReader(tmp_path, "b2").check(1, 4, 0.7, prompts_at)
    taken[7] = replace(taken[7], token_ids=(5, 6))
    with pytest.raises(ConfigError, match="completion 3 of generation 0 answers row 8; the run draws row 8, which has"):
        RolloutReader(tmp_path, "a1").check(1, 4, 0.7, prompts_at)
    (tmp_path / "old").mkdir()
    RolloutWriter(tmp_path / "old", resumed=False).write(given)
    taken[7] = taken[6]
    RolloutReader(tmp_path / "old", "b2").check(1, 4, 0.7, prompts_at)


def test_a_run_goes_on_where_its_record_ends(tmp_path: Path) -> None:
    """From a checkpoint of the replay: the same draws, with the same seeds, as without a record."""
    whole, replayed, rest = (source() for _ in range(3))
    whole.parts = replace(whole.parts, record=RolloutWriter(tmp_path, resumed=False))
    whole.next()
    replayed.parts = replace(replayed.parts, replay=RolloutReader(tmp_path))
    replayed.next()
    rest.load_state_dict(json.loads(json.dumps(replayed.state_dict())))
    whole.next()
    rest.next()
    samples: Any = rest.parts.scheduler.generation
    assert samples.asked == [1]
    assert [r for r, _ in rest.fresh] == [r for r, _ in whole.fresh]


def test_a_record_has_the_seeds_and_prompts_of_its_completions(tmp_path: Path) -> None:
    """Of a generation that took two draws, the sixth and the seventh of its run."""
    made = source(lambda s: 1.0 if s.prompt in {"Q1", "Q2"} else float(len(s.token_ids)), dynamic_sample=True)
    made.parts = replace(made.parts, record=RolloutWriter(tmp_path, resumed=False))
    made.parts.scheduler.queue.trained = 4
    made.next()
    state = RolloutReader(tmp_path).read(0)
    seeds = [seed for number in (5, 6) for seed in completion_seeds(made.settings.seed, number, 8)]
    assert state["places"] == [0, 1, 6, 7, 8, 9, 10, 11] and state["drawn"] == [*range(8)]
    assert state["seeds"] == [seeds[place] for place in state["places"]]
    asked = record._cut(state["prompt_tokens"], state["prompt_lengths"])
    assert [asked[k] for k in state["prompt"]] == [[row + 3] for row in state["rows"]]
    assert state["rows"] == [0, 0, 3, 3, 4, 4, 5, 5]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(record, "save_file", full)
    with pytest.raises(OSError, match="No space left on device: .*generation-000004"):
        RolloutWriter(tmp_path, resumed=False).write(rollouts())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--save_rollouts .*/file: cannot be made a folder: File exists"):
        RolloutWriter(tmp_path / "file", resumed=False)


def test_a_run_that_begins_its_data_anew_continues_no_record(tmp_path: Path) -> None:
    """Its generations would have the numbers of those in the folder."""
    RolloutWriter(tmp_path, resumed=False).write(rollouts())
    rollout = SimpleNamespace(save_rollouts=str(tmp_path), replay_rollouts=None)

    def plan(ignore: bool) -> Any:
        model = SimpleNamespace(random_init=True)
        cfg = SimpleNamespace(rollout=rollout, model=model, checkpoint=SimpleNamespace(ignore_data_skip=ignore))
        return SimpleNamespace(resumed=tmp_path, cfg=cfg)

    assert isinstance(rollout_files(plan(False))[0], RolloutWriter)
    with pytest.raises(ConfigError, match="has the rollouts of another run"):
        rollout_files(plan(True))


def test_a_run_has_the_fingerprint_of_the_model_that_it_starts_from(folder: Path) -> None:
    """Random weights and those of a checkpoint have none."""

    def plan(random_init: bool, resumed: Path | None) -> Any:
        cfg = SimpleNamespace(model=SimpleNamespace(random_init=random_init))
        return SimpleNamespace(resumed=resumed, cfg=cfg, folder=folder / "model")

    assert start_fingerprint(plan(False, None)) == sampled_weights_fingerprint(folder / "model")
    assert start_fingerprint(plan(True, None)) is None
    assert start_fingerprint(plan(False, folder)) is None


def test_generations_that_do_not_follow_each_other(tmp_path: Path) -> None:
    """One that is missing, one under another's name, and a file of a later version."""
    writer = RolloutWriter(tmp_path, resumed=False)
    for number in (0, 2, 4):
        writer.write(replace(rollouts(), number=number))
    RolloutReader(tmp_path).check(3, 4, 0.7)
    files = recorded_files(tmp_path)
    files[4].rename(tmp_path / "generation-000005.safetensors")
    with pytest.raises(CheckpointError, match="generation-000005.*it is generation 4"):
        RolloutReader(tmp_path).check(3, 4, 0.7)
    (tmp_path / "generation-000005.safetensors").unlink()
    for number in (6, 8):
        writer.write(replace(rollouts(), number=number))
    RolloutReader(tmp_path).check(2, 4, 0.7)
    with pytest.raises(ConfigError, match="lacks generation 4"):
        RolloutReader(tmp_path).check(3, 4, 0.7)
    save_file({}, files[0], {"format": "megaswift rollouts 9"})
    with pytest.raises(CheckpointError, match="generation-000000.*'megaswift rollouts 9'"):
        RolloutReader(tmp_path).check(2, 4, 0.7)


def test_another_temperature_is_refused(tmp_path: Path) -> None:
    """Log-probabilities would be those of another distribution; records without a temperature are taken as they are."""
    writer = RolloutWriter(tmp_path, resumed=False)
    writer.write(replace(rollouts(), number=0))
    with pytest.raises(ConfigError, match="was sampled at temperature 0.7, and the run has 1.0\n.*--temperature 0.7"):
        RolloutReader(tmp_path).check(1, 4, 1.0)
    writer.write(replace(rollouts(), number=0, temperature=None))
    RolloutReader(tmp_path).check(1, 4, 1.0)


def rewritten(folder: Path, version: int, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Write a folder's one generation again, in another version of the format: values and tensors, changed."""
    (path,) = recorded_files(folder).values()
    with safe_open(path, "np") as file:
        state = json.loads(file.metadata()["record"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(state, tensors)
    text = json.dumps(state)
    header = {"format": f"megaswift rollouts {version}", "record": text, "sha256": record._checksum(tensors, text)}
    save_file(tensors, path, header)


@pytest.mark.parametrize("version", [1, 2])
def test_records_of_earlier_formats_are_read(version: int, tmp_path: Path) -> None:
    """Seeds, totals and rewards of tokens are JSON; in the first a session has the one segment that was trained on."""
    given = rollouts()

    def earlier(state: dict[str, Any], tensors: dict[str, Any]) -> None:
        del tensors["token_rewards"], state["rewarded"]
        state["token_rewards"] = [None if r.tokens is None else [*r.tokens] for r in given.rollouts]
        state["seeds"] = tensors.pop("seeds").tolist()
        state["total"] = [None if math.isnan(n) else n for n in tensors.pop("total").tolist()]
        if version == 1:
            del state["further"], state["drawn"], state["temperature"], tensors["further_tokens"]
            state["conversations"][1]["untrained"] = 5

    RolloutWriter(tmp_path, resumed=False).write(given)
    rewritten(tmp_path, version, earlier)
    taken = [given.rollouts[0].prompt] * 6 + [given.rollouts[2].prompt] * 2
    found = generation_of(RolloutReader(tmp_path).read(4), taken, lambda _: "text")
    wanted = given.rollouts[1].completion
    assert isinstance(wanted, MultiTurnCompletion)
    assert found.rollouts[1].completion == (replace(wanted, further=()) if version == 1 else wanted)
    assert [r.tokens for r in found.rollouts] == [r.tokens for r in given.rollouts]
    assert str([r.total for r in found.rollouts]) == str([r.total for r in given.rollouts])
    assert found.seeds == given.seeds


def test_a_record_has_room_for_more(tmp_path: Path) -> None:
    """A tensor that the reader does not use, as of the experts of each token, changes nothing."""
    given = rollouts()
    RolloutWriter(tmp_path, resumed=False).write(given)
    taken = [given.rollouts[0].prompt] * 6 + [given.rollouts[2].prompt] * 2
    plain = generation_of(RolloutReader(tmp_path).read(4), taken, lambda _: "text")
    rewritten(tmp_path, 3, lambda _, tensors: tensors.update(routes=np.ones((400, 4, 2), dtype=np.uint8)))
    assert str(generation_of(RolloutReader(tmp_path).read(4), taken, lambda _: "text")) == str(plain)


def test_each_token_has_the_version_of_its_weights(tmp_path: Path) -> None:
    RolloutWriter(tmp_path, resumed=False).write(rollouts())
    (path,) = recorded_files(tmp_path).values()
    with safe_open(path, "np") as file:
        mixed = [6] * 40 + [7] * 60
        assert file.get_tensor("versions").tolist() == [*mixed, *[6] * 100, *mixed, *mixed]


@pytest.mark.parametrize(
    ("length", "count", "rewarded", "most"),
    [
        (1000, 1, False, 12.5),
        (1000, 1, True, 20.5),
        (100, 1, True, 22),
        (10, 1, False, 30),
        (10, 1, True, BYTES),
        (6, 8, False, 28),
        (6, 1, True, 49),
        (1, 8, False, 108),
        (1, 1, True, 191),
    ],
)
def test_bytes_of_a_token(length: int, count: int, rewarded: bool, most: float, tmp_path: Path) -> None:
    """Of 64 completions, `count` of a prompt of 20 tokens, with rewards that have all digits: the figures of
    docs/rl.md. At most 40 for a token of the file, and from 10 tokens on for one of a completion."""
    chance = random.Random(0)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(chance.randrange(150_000) for _ in range(number))

    def scored(prompt: Prompt) -> ScoredCompletion:
        logprobs = tuple(-chance.random() for _ in range(length))
        completion = Completion(ids(length), logprobs, True, versions=((1200, length),))
        rewards = tuple(chance.random() for _ in range(length)) if rewarded else None
        total = chance.random()
        return ScoredCompletion(prompt, completion, "", {"accuracy": total}, total, rewards)

    prompts = [Prompt(chance.randrange(10_000), ids(20), "", {}) for _ in range(64 // count)]
    found = tuple(scored(prompt) for prompt in prompts for _ in range(count))
    asked = tuple(one.prompt.token_ids for one in found)
    drawn = tuple(range(9000, 9000 + len(prompts)))
    given = Generation(1200, 1, tuple(range(64)), tuple(completion_seeds(0, 0, 64)), asked, found, drawn, 1.0)
    RolloutWriter(tmp_path, resumed=False, weights="a1" * 32).write(given)
    (path,) = recorded_files(tmp_path).values()
    assert path.stat().st_size <= most * 64 * length
    assert path.stat().st_size <= BYTES * (64 * length + 20 * len(prompts))


@pytest.mark.parametrize("at", [0.01, 0.2, 0.5, 0.9, 0.999])
def test_damage_is_named(at: float, tmp_path: Path) -> None:
    """A byte changed anywhere; a file that ends early."""
    RolloutWriter(tmp_path, resumed=False).write(rollouts())
    (path,) = recorded_files(tmp_path).values()
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="generation-000004"):
        RolloutReader(tmp_path).check(1, 4, 0.7)
    path.write_bytes(content[: int(at * len(content))])
    with pytest.raises(CheckpointError, match="generation-000004"):
        RolloutReader(tmp_path).check(1, 4, 0.7)
