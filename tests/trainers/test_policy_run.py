"""Whole runs of policies beyond the plain one: draws ahead, PPO's critic, environments, evaluation."""

from __future__ import annotations

import json
import math
import shutil
import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.record import RolloutReader
from tests.parity.pool import RankError
from tests.rollout.sampling_server import Vllm, serving
from tests.trainers.inputs import write_model
from tests.trainers.runs import run
from tests.trainers.test_grpo_run import BATCH, REWARDS, SLOW, SPREAD, USUAL, completions, figures

pytestmark = pytest.mark.process
BY_TOKEN = '''

def even(completion_ids, completion_mask, **_):
    """Tokens of even numbers are good, where they stand."""
    pairs = zip(completion_ids, completion_mask)
    return [[0.25 * (token % 2 == 0) for token, own in zip(*one) if own] for one in pairs]
'''
WORLD = '''
import asyncio


class Count:
    """Rewards digits, and asks twice."""

    def reset(self, prompt, number, **columns):
        self.turn = 0

    def step(self, answer):
        self.turn += 1
        return [{"role": "user", "content": "go on"}], sum(c.isdigit() for c in answer) / 10, self.turn == 2


class Fails(Count):
    """The same, for one pass over the prompts, each with four completions."""

    seen = {}

    def reset(self, prompt, number, **columns):
        super().reset(prompt, number)
        self.seen[number] = self.seen.get(number, 0) + 1
        assert self.seen[number] <= 4, "the second pass"


class Waits(Count):
    """The same; every third row takes its time."""

    async def reset(self, prompt, number, **columns):
        super().reset(prompt, number)
        self.seconds = 0.4 * (number % 3 == 0)

    async def step(self, answer):
        await asyncio.sleep(self.seconds)
        return super().step(answer)


class Agent:
    """Asks three times; rows of odd numbers begin anew for the third."""

    async def run(self, prompt, base_url, number, **columns):
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0)
        messages, reward = list(prompt), 0.0
        for turn in range(3):
            if turn == 2 and number % 2:
                messages = [{"role": "user", "content": "2"}]
            given = {"model": "policy", "messages": messages, "max_tokens": 5}
            said = (await client.chat.completions.create(**given)).choices[0].message.content
            reward += sum(c.isdigit() for c in said) / 10
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "3"}]
        return reward
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, prompts, held-out ones, rewards, an environment."""
    made = tmp_path_factory.mktemp("policy")
    write_model(made / "model")
    rows = [{"prompt": [{"role": "user", "content": f"{i % 10}+{(7 * i) % 10}"}], "number": i} for i in range(16)]
    for name, some in (("rows", rows[:12]), ("held", rows[12:])):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    by_text = REWARDS.replace("for text in completions", "for text in (c[0]['content'] for c in completions)")
    (made / "rewards.py").write_text(by_text + BY_TOKEN)
    (made / "world.py").write_text(WORLD)
    return made


def trained(
    folder: Path,
    out: Path,
    *options: object,
    ranks: int = 1,
    task: str = "grpo",
    judge: str = "digits",
    world: str = "Count",
) -> Path:
    """A run's folder."""
    width = () if "--per_device_train_batch_size" in options else ("--per_device_train_batch_size", BATCH)
    inputs = [
        "--model",
        str(folder / "model"),
        "--dataset",
        str(folder / "rows.jsonl"),
        "--dataset_cache_dir",
        str(folder / "cache"),
    ]
    inputs += (
        ["--reward_funcs", f"{folder / 'rewards.py'}:{judge}"]
        if judge
        else ["--environment", f"{folder / 'world.py'}:{world}"]
    )
    usual = [
        w
        for i, w in enumerate(USUAL)
        if not {"--num_generations", "--max_completion_length", "--max_length"} & {w, *USUAL[i - 1 : i]}
    ]
    group = () if task == "ppo" else ("--num_generations", 4)
    lengths = ("--max_completion_length", 24 if not judge else 6, "--max_length", 96)
    run(inputs, out, *usual, *group, *lengths, *width, *options, ranks=ranks, task=task)
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Of the export: the model, or adapters."""
    adapters = out / "adapter" / "adapter_model.safetensors"
    return load_file(adapters if adapters.exists() else out / "hf" / "model.safetensors")


def assert_same_end(a: Path, b: Path) -> None:
    """Completions and weights, bit by bit."""
    assert completions(a)[-BATCH:] == completions(b)[-BATCH:]
    theirs = weights(b)
    assert [name for name, tensor in weights(a).items() if not torch.equal(tensor, theirs[name])] == []


def test_draws_ahead_go_on_where_they_were(folder: Path, tmp_path: Path) -> None:
    """One generation late, and after a restart the same completions, those that were under way included."""
    plain = trained(folder, tmp_path / "plain", "--max_steps", 2)
    ahead = ("--async_generation", "true", "--save_steps", 2)
    whole = trained(folder, tmp_path / "whole", "--max_steps", 4, *ahead)
    assert completions(whole)[:BATCH] == [*completions(plain)[:BATCH]]
    second = [line["completion"] for line in completions(whole)[BATCH : 2 * BATCH]]
    assert second != [line["completion"] for line in completions(plain)[BATCH:]], (
        "the second generation was drawn by the first weights"
    )
    out = tmp_path / "parts"
    trained(folder, out, "--max_steps", 4, *ahead)
    lines = read_lines(whole / "metrics.jsonl")
    assert lines[0]["sampling/sampling_logp_difference/max"] < 1e-5 < lines[1]["sampling/sampling_logp_difference/max"]
    assert lines[0]["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-5)
    assert lines[1]["sampling/importance_sampling_ratio/max"] > 1.0001, "stale samples are weighed"
    again = trained(
        folder, out, "--max_steps", 4, *ahead, "--resume_from_checkpoint", str(out / "checkpoints" / "step-2")
    )
    assert_same_end(again, whole)


def test_the_bound_of_one_generation_is_asynchronous_generation(folder: Path, tmp_path: Path) -> None:
    """Bit by bit, with two steps on a generation; a bound of 0 is the synchronous run."""
    steps = ("--max_steps", 6, "--num_iterations", 2)
    bounded = trained(folder, tmp_path / "bounded", *steps, "--max_staleness", 2)
    assert_same_end(bounded, trained(folder, tmp_path / "ahead", *steps, "--async_generation", "true"))
    assert_same_end(
        trained(folder, tmp_path / "none", *steps, "--max_staleness", 0), trained(folder, tmp_path / "plain", *steps)
    )
    lines = read_lines(bounded / "metrics.jsonl")
    assert [line["sampling/staleness_max"] for line in lines] == [0, 0, 2, 2, 2, 2]
    assert [line["sampling/queue"] for line in lines] == [1, 1, 1, 1, 0, 0], "nothing begins that no step uses"


WHOLE = ("--partial_rollouts", "false")
QUEUES: list[Any] = [
    pytest.param(WHOLE, 1, "grpo", id="whole"),
    *(
        pytest.param(options, ranks, task, id=name, marks=SLOW)
        for name, options, ranks, task in (
            ("whole dp2", (*WHOLE, *SPREAD), 2, "grpo"),
            ("whole tp2", (*WHOLE, "--tp", 2), 2, "grpo"),
            ("whole ppo", (*WHOLE, "--num_generations", 4), 1, "ppo"),
            ("partial", ("--max_completion_length", 90), 1, "grpo"),
            ("partial dp2", ("--max_completion_length", 90, *SPREAD), 2, "grpo"),
            ("partial tp2", ("--tp", 2), 2, "grpo"),
            ("lora", ("--train_type", "lora", "--lora_rank", 4), 1, "grpo"),
            ("greedy", ("--advantage_estimator", "remax"), 1, "grpo"),
            ("ppo", ("--num_generations", 4), 1, "ppo"),
            ("environment", ("--environment", "world.py:Count"), 1, "grpo"),
        )
    ),
]


@pytest.mark.parametrize(("more", "ranks", "task"), QUEUES)
def test_a_long_queue_keeps_the_bound(
    more: tuple[object, ...], ranks: int, task: str, folder: Path, tmp_path: Path
) -> None:
    """Draws by several versions of the weights, on ranks that finish at other times; a restart loses none."""
    more = tuple(f"{folder}/{word}" if str(word).startswith("world.py") else word for word in more)
    options = ("--max_steps", 8, "--max_staleness", 3, "--save_steps", 3, *more)
    saved = ("--save_rollouts", tmp_path / "saved")
    out = trained(folder, tmp_path / "out", *options, *saved, ranks=ranks, task=task)
    step = out / "checkpoints" / "step-3"
    trained(folder, out, *options, *saved, "--resume_from_checkpoint", str(step), ranks=ranks, task=task)
    lines = read_lines(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert all(line["sampling/staleness_max"] <= 3 and line["sampling/queue"] <= 3 for line in lines)
    assert lines[-1]["sampling/staleness_max"] > 0
    generations = [RolloutReader(tmp_path / "saved").read(number) for number in range(8)]
    for number, generation in enumerate(generations):
        assert max(generation["versions"]) <= number <= min(generation["versions"]) + 3
    asked = [row for generation in generations for row in generation["rows"][::4]]
    assert all(sorted(asked[i : i + 12]) == [*range(12)] for i in range(0, len(asked) - 11, 12))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=SLOW)])
def test_completions_go_on_with_new_weights(ranks: int, folder: Path, tmp_path: Path) -> None:
    """Tokens of one completion by several versions, each with the log-probability of the version that wrote it; the
    run's own record trains to the same bits."""
    long = ("--max_completion_length", 300, "--max_length", 400, "--max_steps", 6, "--max_staleness", 4)
    options = (*long, *(SPREAD if ranks > 1 else ()))
    out = trained(folder, tmp_path / "out", *options, "--save_rollouts", tmp_path / "saved", ranks=ranks)
    lines = read_lines(out / "metrics.jsonl")
    assert max(line["sampling/mixed_versions"] for line in lines) > 0
    assert all(line["sampling/staleness_max"] <= 4 for line in lines)
    mixed = 0
    for number in range(6):
        generation = RolloutReader(tmp_path / "saved").read(number)
        ends = [*accumulate(generation["lengths"], initial=0)]
        for start, end in pairwise(ends):
            versions = generation["versions"][start:end]
            assert versions == sorted(versions) and number - 4 <= versions[0] and versions[-1] <= number
            mixed += len({*versions}) > 1
    assert mixed >= 4, "the completions of a prompt at least"
    again = trained(folder, tmp_path / "again", *options, "--replay_rollouts", tmp_path / "saved", ranks=ranks)
    assert_same_end(again, out)


@SLOW
@pytest.mark.parametrize("ranks", [1, 2])
def test_completions_of_a_server_go_on_with_new_weights(ranks: int, folder: Path, tmp_path: Path) -> None:
    """In requests of 64 tokens; ranks share the server, which gets no weights while any of them waits for an answer."""
    backend = Vllm(folder / "model")
    backend.told["/v1/models"] = {"data": [{"id": "served", "max_model_len": 400}]}
    long = ("--max_completion_length", 150, "--max_length", 200, "--max_steps", 7, "--max_staleness", 3)
    options = (*long, *(SPREAD if ranks > 1 else ()))
    with serving(backend) as url:
        how = ("--rollout_backend", "vllm_server", "--rollout_server_url", url, "--rollout_batch_size", 4)
        out = trained(folder, tmp_path / "out", *options, *how, ranks=ranks)
    lines = read_lines(out / "metrics.jsonl")
    assert max(line["sampling/mixed_versions"] for line in lines) > 0
    assert all(line["sampling/staleness_max"] <= 3 for line in lines)
    assert lines[0]["sampling/sampling_logp_difference/max"] < 1e-4, "on policy, the server's weights are the trainer's"
    asked = [body for path, body in backend.calls if path == "/v1/completions"]
    assert {body["max_tokens"] for body in asked} == {64, 150 - 128}


@SLOW
@pytest.mark.parametrize("ranks", [1, 2])
def test_draws_of_a_server_overtake_slow_ones(ranks: int, folder: Path, tmp_path: Path) -> None:
    """No prompt is lost or trained on twice in a pass over the data, before and after a restart, and the record
    trains to the same bits."""

    class Late(Vllm):
        def answer(self, path: str, body: Any) -> Any:
            if path == "/v1/completions":
                time.sleep(0.8 * (body["prompt"][1] % 5 == 2))
            return super().answer(path, body)

    backend = Late(folder / "model")
    backend.told["/v1/models"] = {"data": [{"id": "served", "max_model_len": 400}]}
    long = ("--max_completion_length", 150, "--max_length", 200, "--max_steps", 10, "--max_staleness", 3)
    options = (*long, "--staleness_strategy", "drop", "--save_steps", 4)
    options += SPREAD if ranks > 1 else ()
    saved = tmp_path / "saved"
    out = tmp_path / "out"
    with serving(backend) as url:
        how = ("--rollout_backend", "vllm_server", "--rollout_server_url", url, "--rollout_batch_size", 16)
        trained(folder, out, *options, *how, "--save_rollouts", saved, ranks=ranks)
        lines = read_lines(out / "metrics.jsonl")
        again = trained(folder, tmp_path / "again", *options, *how, "--replay_rollouts", saved, ranks=ranks)
        assert_same_end(again, out)
        step = out / "checkpoints" / "step-4"
        resume = ("--resume_from_checkpoint", str(step))
        trained(folder, out, *options, *how, "--save_rollouts", saved, *resume, ranks=ranks)
    assert all(line["sampling/staleness_max"] <= 3 and line["sampling/dropped"] >= 0 for line in lines)
    drawn = [place for number in range(10) for place in RolloutReader(saved).read(number)["drawn"]]
    assert len({*drawn}) == len(drawn) and drawn != sorted(drawn), "draws have overtaken others"


@SLOW
def test_partial_rollouts_need_a_queue(folder: Path, tmp_path: Path) -> None:
    """Refused before the model is loaded, where no completion can be under way at a sync."""
    options = ("--num_iterations", 2, "--max_steps", 2, "--max_staleness", 2, "--partial_rollouts", "true")
    with pytest.raises(RankError) as error:
        trained(folder, tmp_path / "out", *options, *SPREAD, ranks=2)
    assert "a generation takes 2 steps" in str(error.value) and "exit status 2" in str(error.value)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


SOME = """def long(completions, **_):
    return [None if i % 3 == 0 else len(text) / 8 for i, text in enumerate(completions)]


def even(completions, **_):
    return [i % 2 == 0 if i % 6 else None for i, _ in enumerate(completions)]
"""


@pytest.mark.parametrize("task", ["grpo", pytest.param("ppo", marks=SLOW)])
def test_a_run_with_nothing_but_model_data_and_rewards(folder: Path, tmp_path: Path, task: str) -> None:
    """No batch option; rewards that are truth values, or None where a function does not apply. PPO's step has one
    completion then, whose rewards are None, and a run that never had a reward is an error: it gets four of a prompt."""
    (tmp_path / "some.py").write_text(SOME)
    names = [f"{tmp_path}/some.py:{name}" for name in ("long", "even")]
    given = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--reward_funcs", *names]
    short = ("--max_completion_length", 6, "--max_length", 32, "--max_steps", 2, "--report_to", "none")
    several = ("--num_generations", 4, "--gradient_accumulation_steps", 4) if task == "ppo" else ()
    run(given, tmp_path / "out", *short, *several, ranks=1, task=task)
    lines = completions(tmp_path / "out")
    assert len(lines) == 2 * {"grpo": 8, "ppo": 4}[task]
    assert lines[0]["rewards/even"] is None and lines[0]["reward"] is None and lines[0]["advantage"] == 0
    if task == "grpo":
        assert {line["rewards/even"] for line in lines} == {None, 0.0, 1.0}
        assert [line["rewards/long"] is None for line in lines] == [i % 8 % 3 == 0 for i in range(16)]
    assert all(math.isfinite(line["loss"]) for line in read_lines(tmp_path / "out" / "metrics.jsonl"))


COVARIANCE = (
    ("--loss_type", "clip_cov", "--clip_cov_ratio", 0.3, "--clip_cov_lb", -9, "--advantage_estimator", "opo"),
    ("--loss_type", "kl_cov", "--kl_cov_ratio", 0.3, "--advantage_estimator", "pass_at_k", "--pass_at_k", 2),
)


@pytest.mark.parametrize("options", COVARIANCE, ids=lambda o: o[1])
def test_runs_with_selected_tokens(options: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """Two iterations on the sampler's log-probabilities, under another normalizer."""
    (tmp_path / "some.py").write_text(SOME)
    given = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl")]
    given += ["--reward_funcs", f"{tmp_path}/some.py:even", "--loss_agg_mode", "seq-mean-token-sum"]
    given += ["--num_iterations", "2", "--use_rollout_logprobs", *map(str, options)]
    short = ("--max_completion_length", 6, "--max_length", 32, "--max_steps", 2, "--report_to", "none")
    run(given, tmp_path / "out", *short, ranks=1, task="grpo")
    lines = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert len(lines) == 2 and all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)


PPO = ("--num_iterations", 2, "--max_steps", 4, "--save_steps", 2, "--critic_learning_rate", "2e-2")


LORA = ("--train_type", "lora", "--lora_rank", 4)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ((), 1),
        *(
            pytest.param(options, ranks, marks=SLOW)
            for options, ranks in (
                (LORA, 1),
                ((*LORA, "--tp", 2), 2),
                ((*LORA, "--engine", "ddp", *SPREAD), 2),
                ((*LORA, "--engine", "fsdp2", *SPREAD), 2),
                ((*LORA, "--engine", "zero2", *SPREAD), 2),
                (("--train_type", "qlora", "--engine", "ddp"), 1),
                (("--train_type", "adalora", "--init_r", 4, "--target_r", 2, "--tfinal", 1, "--engine", "ddp"), 1),
            )
        ),
    ],
)
def test_ppo_goes_on_with_its_critic(options: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path) -> None:
    """Rewards are of tokens here. With adapters the critic has its own, and its head trains."""
    how: Any = {"ranks": ranks, "task": "ppo", "judge": "even"}
    whole = trained(folder, tmp_path / "whole", *PPO, *options, **how)
    again = trained(folder, tmp_path / "again", *PPO, *options, **how)
    trained(folder, again, *PPO, *options, "--resume_from_checkpoint", str(again / "checkpoints" / "step-2"), **how)
    for line in completions(whole):
        assert (
            len(line["token_rewards"]) == line["tokens"]
            and sum(line["token_rewards"]) == line["reward"] == line["rewards/even"]
        )
    assert_same_end(again, whole)
    assert figures(read_lines(again / "metrics.jsonl")) == figures(read_lines(whole / "metrics.jsonl"))
    assert read_lines(whole / "metrics.jsonl")[-1]["vf_loss"] > 0


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (("--tp", 2, "--pp", 2), 4),
        *(
            pytest.param(layout, ranks, marks=SLOW)
            for layout, ranks in (
                (SPREAD, 2),
                (("--cp", 2), 2),
                (("--engine", "ddp", *SPREAD), 2),
                (("--engine", "fsdp2", *SPREAD), 2),
            )
        ),
    ],
)
def test_ppo_on_other_layouts(layout: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path) -> None:
    """One process has prompts that several rows have once, the others have them with each completion."""
    steps = ("--max_steps", 3, "--num_iterations", 2)
    alone = trained(folder, tmp_path / "alone", *steps, task="ppo")
    separate = (*layout, "--prefix_sharing", "false")
    out = trained(folder, tmp_path / "out", *steps, *separate, ranks=ranks, task="ppo")
    tokens = [sum(line["tokens"] for line in read_lines(run / "metrics.jsonl")) for run in (alone, out)]
    assert tokens[0] < tokens[1]
    assert [c["completion"] for c in completions(out)] == [c["completion"] for c in completions(alone)]
    for got, want in zip(read_lines(out / "metrics.jsonl"), read_lines(alone / "metrics.jsonl"), strict=True):
        for name in ("grad_norm", "vf_loss", "objective/kl", "value/grad_norm", "value/mean"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
    assert_flops(out, ranks, folder / "model")


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=SLOW)])
def test_prompts_are_shared_on_torch_engines(engine: str, folder: Path, tmp_path: Path) -> None:
    """By policy, reference and critic: fewer tokens, the same steps."""
    steps = ("--engine", engine, "--max_steps", 3, "--num_iterations", 2)
    once = trained(folder, tmp_path / "once", *steps, task="ppo")
    each = trained(folder, tmp_path / "each", *steps, "--prefix_sharing", "false", task="ppo")
    tokens = [sum(line["tokens"] for line in read_lines(run / "metrics.jsonl")) for run in (once, each)]
    assert tokens[0] < tokens[1]
    assert [c["completion"] for c in completions(once)] == [c["completion"] for c in completions(each)]
    for got, want in zip(*(read_lines(out / "metrics.jsonl") for out in (once, each)), strict=True):
        for name in ("grad_norm", "vf_loss", "objective/kl", "value/grad_norm", "value/mean"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name


def assert_flops(out: Path, ranks: int, model: Path) -> None:
    """By hand, of steps in twos on a generation: 6 for the policy's step and half of 2 for its old numbers and for the
    reference's each, 6 for the critic's step and half of 2 for its values; of either model's parameters but the
    embedding, and of attention.
    """
    shapes = {name: tensor.shape for name, tensor in load_file(model / "model.safetensors").items()}
    body = sum(shape.numel() for name, shape in shapes.items() if "embed" not in name and "lm_head" not in name)
    per_token = (6 + 1 + 1) * (body + shapes["lm_head.weight"].numel()) + (6 + 1) * (body + 32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for line in read_lines(out / "metrics.jsonl"):
        lengths = [
            len(tokenizer.apply_chat_template(c["prompt"], add_generation_prompt=True)["input_ids"]) + c["tokens"]
            for c in completions(out)
            if c["step"] == (line["step"] - 1) // 2 * 2 + 1
        ]
        assert line["tokens"] == sum(lengths)
        by_hand = per_token * sum(lengths) + (8 + 7) * 2 * 32 * sum(n * n for n in lengths)
        assert line["tflops_per_device"] * 1e12 * ranks * line["step_time"] == pytest.approx(by_hand)


@SLOW
@pytest.mark.parametrize(
    "layouts",
    [
        ((), ("--tp", 2), ("--pp", 2), ("--cp", 2), SPREAD),
        (
            ("--engine", "ddp"),
            ("--engine", "ddp", *SPREAD),
            ("--engine", "fsdp2", *SPREAD),
            ("--engine", "zero3", *SPREAD),
        ),
    ],
)
def test_ppo_with_adapters_on_other_layouts(
    layouts: tuple[tuple[object, ...], ...], folder: Path, tmp_path: Path
) -> None:
    """New ones are drawn alike on all layouts of an engine."""
    # Adam divides by the size of a gradient: with an epsilon of 1e-8, rounding of gradients near 0 changes whole steps
    # (value/mean 3e-4 apart after two); with 1e-3 all numbers agree to 7e-7.
    common = (
        "--max_steps",
        3,
        "--num_iterations",
        2,
        "--critic_learning_rate",
        "2e-2",
        "--adam_epsilon",
        "1e-3",
        *LORA,
    )
    outs = [
        trained(folder, tmp_path / str(i), *common, *layout, ranks=2 if i else 1, task="ppo")
        for i, layout in enumerate(layouts)
    ]
    alone = read_lines(outs[0] / "metrics.jsonl")
    assert alone[0]["value/mean"] != alone[2]["value/mean"] and alone[2]["objective/kl"] != 0
    for out in outs[1:]:
        assert [c["completion"] for c in completions(out)] == [c["completion"] for c in completions(outs[0])]
        for got, want in zip(read_lines(out / "metrics.jsonl"), alone, strict=True):
            for name in ("grad_norm", "vf_loss", "objective/kl", "value/grad_norm", "value/mean"):
                assert got[name] == pytest.approx(want[name], rel=2e-5, abs=1e-6), name


@SLOW
def test_the_critic_of_adapters_goes_on_over_its_own_base(folder: Path, tmp_path: Path) -> None:
    out = trained(folder, tmp_path / "out", "--max_steps", 1, *LORA, task="ppo")
    other = tmp_path / "other"
    shutil.copytree(folder / "model", other)
    shifted = {name: tensor + 1e-3 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(shifted, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(RankError, match="model's critic_weights"):
        trained(
            folder,
            out,
            "--max_steps",
            2,
            *LORA,
            *SPREAD,
            "--critic_model",
            str(other),
            "--resume_from_checkpoint",
            "latest",
            ranks=2,
            task="ppo",
        )


@pytest.mark.parametrize("options", [(), pytest.param(("--advantage_estimator", "remax"), marks=SLOW)])
def test_an_environment_on_two_ranks(options: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """The same conversations, the loss on the model's own tokens, and log-probabilities that agree there. remax leads
    greedy ones beside the others."""
    alone = trained(folder, tmp_path / "alone", "--max_steps", 2, *options, judge="")
    two = trained(folder, tmp_path / "two", "--max_steps", 2, *options, *SPREAD, ranks=2, judge="")
    advantages = [[line.pop("advantage") for line in completions(out)] for out in (two, alone)]
    assert advantages[0] == pytest.approx(advantages[1], abs=1e-6)
    texts = [[{**line, "advantage": 0} for line in completions(out)] for out in (two, alone)]
    assert texts[0] == texts[1]
    assert any(len(line["completion"]) == 3 for line in completions(alone)), "nobody had a second turn"
    assert all(sum(line["turn_rewards"]) == line["reward"] for line in completions(alone))
    lines = read_lines(alone / "metrics.jsonl")
    assert lines[0]["sampling/sampling_logp_difference/max"] < 1e-5
    assert lines[0]["rewards/environment/mean"] == lines[0]["reward"]


@pytest.mark.parametrize("options", [(), ("--async_generation", "true")], ids=str)
def test_a_run_that_an_environment_ends_has_a_checkpoint(
    options: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    """It goes on with another environment, and a synchronous run ends as it would have without the error."""
    steps = ("--max_steps", 12, *options)
    whole = trained(folder, tmp_path / "whole", *steps, judge="")
    out = tmp_path / "out"
    with pytest.raises(RankError, match="SystemExit: 2"):
        trained(folder, out, *steps, judge="", world="Fails")
    (saved,) = (out / "checkpoints").glob("step-*")
    assert 0 < int(saved.name.removeprefix("step-")) < 12
    trained(folder, out, *steps, "--resume_from_checkpoint", "latest", judge="")
    assert [line["step"] for line in read_lines(out / "metrics.jsonl")] == [*range(1, 13)]
    if not options:  # else the draw that failed begins again with later weights
        assert_same_end(out, whole)


def test_environments_that_are_awaited(folder: Path, tmp_path: Path) -> None:
    """The conversations of `Count` on one rank and on two, and a replay of those that were slow."""
    plain = trained(folder, tmp_path / "plain", "--max_steps", 2, judge="")
    saved = tmp_path / "saved"
    alone = trained(folder, tmp_path / "alone", "--max_steps", 2, "--save_rollouts", saved, judge="", world="Waits")
    two = trained(folder, tmp_path / "two", "--max_steps", 2, *SPREAD, ranks=2, judge="", world="Waits")
    texts = [[line["completion"] for line in completions(out)] for out in (plain, alone, two)]
    assert texts[0] == texts[1] == texts[2] and max(len(text) for text in texts[0]) == 3
    replay = ("--replay_rollouts", saved)
    again = trained(folder, tmp_path / "again", "--max_steps", 2, *replay, judge="", world="Waits")
    assert_same_end(again, alone)


def test_an_agent_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    """The same sessions on one rank and on two, by tokens that the trainer scores as the sampler did; and a replay."""
    saved = tmp_path / "saved"
    world = {"judge": "", "world": "Agent"}
    limits = ("--max_steps", 2, "--max_completion_length", 40)
    alone = trained(folder, tmp_path / "alone", *limits, "--save_rollouts", saved, **world)  # type: ignore[arg-type]
    two = trained(folder, tmp_path / "two", *limits, *SPREAD, ranks=2, **world)  # type: ignore[arg-type]
    assert completions(two) == completions(alone) and all(line["completion"] for line in completions(alone))
    lines = read_lines(alone / "metrics.jsonl")
    assert lines[0]["sampling/sampling_logp_difference/max"] < 1e-5
    assert lines[0]["agent/segments_edited"] > 0 and 1 < lines[0]["agent/segments"] < 2
    record = RolloutReader(saved).read(0)
    assert sum(map(len, record["further"])) == (lines[0]["agent/segments"] - 1) * len(record["further"])
    assert len(record["logprobs"]) == lines[0]["completions/mean_length"] * len(record["lengths"])
    again = trained(folder, tmp_path / "again", *limits, "--replay_rollouts", saved, **world)  # type: ignore[arg-type]
    assert_same_end(again, alone)


def test_evaluation_by_rewards(folder: Path, tmp_path: Path) -> None:
    """Of held-out prompts; it changes nothing."""
    plain = trained(folder, tmp_path / "plain", "--max_steps", 3)
    out = trained(folder, tmp_path / "out", "--max_steps", 3, "--val_dataset", folder / "held.jsonl", "--eval_steps", 2)
    assert_same_end(out, plain)
    lines = read_lines(out / "eval.jsonl")
    assert [line["step"] for line in lines] == [2, 3] and all(
        line["prompts"] == 4 and 0 <= line["reward"] <= 1 for line in lines
    )
