"""Steps of PPO beside an implementation of its own: transformers' models and torch's AdamW on one process, loops over
tokens.

Both play the same completions (`played`). The other side shares nothing with the package but the seeds of the
completions and the order in which a generation's completions are cut into steps. Loss, gradient norms, divergence,
values and clip ratios of every step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.generation import completion_seeds
from tests.trainers import played
from tests.trainers.test_policy_trajectories import SLOW

STEPS, BATCH, SLICES, PASSES, SEED = 5, 8, 2, 2, 42
"""Four steps on the first generation of 16 completions, one on the second."""
BETA, GAMMA, LAM, EPSILON, VALUE_CLIP, VALUE_WEIGHT, ENTROPY, HEAT = 0.2, 0.97, 0.9, 0.02, 0.05, 0.5, 0.03, 0.8
RATES = {"model": (2e-3, 4e-3), "moe": (5e-4, 1e-3)}
"""Of policy and critic; tokens near a tie change their expert in larger steps."""
OPTIONS = (
    "--max_steps",
    STEPS,
    "--lr_scheduler_type",
    "constant",
    "--weight_decay",
    0,
    "--adam_epsilon",
    1e-6,
    "--seed",
    SEED,
    "--shuffle",
    "false",
    "--report_to",
    "none",
    "--export_hf",
    "false",
    "--max_completion_length",
    8,
    "--max_length",
    32,
    "--generation_batch_size",
    SLICES * BATCH,
    "--num_iterations",
    PASSES,
    "--beta",
    BETA,
    "--gamma",
    GAMMA,
    "--lam",
    LAM,
    "--epsilon",
    EPSILON,
    "--cliprange_value",
    VALUE_CLIP,
    "--vf_coef",
    VALUE_WEIGHT,
    "--entropy_coef",
    ENTROPY,
    "--temperature",
    HEAT,
    "--log_completions",
    "false",
)
SPREAD = ("--per_device_train_batch_size", BATCH // 2, "--global_batch_size", BATCH)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "one": (1, ()),
    "tp2": (2, ("--tp", 2)),
    "pp2": (2, ("--pp", 2)),
    "cp2": (2, ("--cp", 2)),
    "dp2": (2, SPREAD),
    "tp2 pp2": (4, ("--tp", 2, "--pp", 2)),
    "rows": (1, ("--packing", "false")),
    "ddp": (2, ("--engine", "ddp", *SPREAD)),
    "fsdp2": (2, ("--engine", "fsdp2", *SPREAD)),
    "zero3": (2, ("--engine", "zero3", *SPREAD)),
    "ep2": (2, ("--ep", 2, *SPREAD)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and moe/, a critic of other weights for each, prompts with a column, a file of rewards."""
    from transformers import AutoModelForSequenceClassification

    made = tmp_path_factory.mktemp("ppo")
    played.write_task(made, 2 * SLICES * BATCH)
    for kind in RATES:
        torch.manual_seed(8)
        AutoModelForSequenceClassification.from_pretrained(
            made / kind, num_labels=1, dtype=torch.float32
        ).save_pretrained(made / f"{kind}-critic")
    return made


@dataclass
class Told:
    """One completion, as the other side knows it; lists have a number for each of its tokens."""

    ids: list[int]
    begin: int
    old: list[float]
    values: list[float]
    gap: list[float]
    """log(policy / reference)."""
    score: float
    advantages: list[float]
    targets: list[float]


def logits_of(policy: Any, ids: list[int], begin: int) -> Tensor:
    """[tokens of the completion, v]: log-probabilities of what may follow."""
    return (policy(torch.tensor([ids])).logits[0, begin - 1 : -1] / HEAT).log_softmax(-1)


def written(logits: Tensor, ids: list[int], begin: int) -> Tensor:
    """Of what was written."""
    return logits.gather(1, torch.tensor(ids[begin:])[:, None])[:, 0]


def values_of(critic: Any, ids: list[int], begin: int) -> Tensor:
    """What the critic says before each token of the completion."""
    return critic.score(critic.model(torch.tensor([ids])).last_hidden_state)[0, begin - 1 : -1, 0]


def lambda_returns(one: Told) -> None:
    """Advantages and targets: by the recursion of lambda-returns."""
    following, value = 0.0, 0.0
    for i in reversed(range(len(one.old))):
        reward = -BETA * one.gap[i] + (one.score if i == len(one.old) - 1 else 0.0)
        following = reward + GAMMA * ((1 - LAM) * value + LAM * following)
        value = one.values[i]
        one.targets.insert(0, following)
        one.advantages.insert(0, following - value)


def generation(number: int, rows: Sequence[dict[str, Any]], models: tuple[Any, Any, Any], tokenizer: Any) -> list[Told]:
    """The completions of these rows, before the first step on them."""
    policy, reference, critic = models
    made = []
    for seed, row in zip(completion_seeds(SEED, number, len(rows)), rows, strict=True):
        said = [*played.played(seed).token_ids]
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        digits = [int(d) for d in tokenizer.decode(said, skip_special_tokens=True) if d.isdigit()]
        ids, begin = [*prompt, *said], len(prompt)
        with torch.no_grad():
            old, ref = (written(logits_of(m, ids, begin), ids, begin).tolist() for m in (policy, reference))
            one = Told(
                ids,
                begin,
                old,
                values_of(critic, ids, begin).tolist(),
                [a - b for a, b in zip(old, ref, strict=True)],
                row["weight"] * sum(digits) / (9 * len(digits)),
                [],
                [],
            )
        lambda_returns(one)
        made.append(one)
    every = np.concatenate([one.advantages for one in made])
    for one in made:
        one.advantages = [(a - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8) for a in one.advantages]
    return made


def policy_loss(policy: Any, some: Sequence[Told]) -> tuple[Tensor, dict[str, float]]:
    """The clipped surrogate less the entropy's bonus, means over tokens."""
    surrogate, entropy, held, count = torch.zeros(()), torch.zeros(()), 0, sum(len(one.old) for one in some)
    for one in some:
        logits = logits_of(policy, one.ids, one.begin)
        entropy = entropy - (logits.exp() * logits).sum()
        for now, old, advantage in zip(written(logits, one.ids, one.begin), one.old, one.advantages, strict=True):
            ratio = torch.exp(now - old)
            if advantage > 0 and ratio > 1 + EPSILON or advantage < 0 and ratio < 1 - EPSILON:
                held += 1
                ratio = torch.tensor(1 + EPSILON if advantage > 0 else 1 - EPSILON)
            surrogate = surrogate - ratio * advantage
    told = {"entropy": float(entropy) / count, "clip_ratio/region_mean": held / count}
    return (surrogate - ENTROPY * entropy) / count, told


def value_loss(critic: Any, some: Sequence[Told]) -> tuple[Tensor, dict[str, float]]:
    """Half of the larger of two squares, a mean over tokens."""
    squares, held, values, errors, targets = torch.zeros(()), 0, list[float](), list[float](), list[float]()
    for one in some:
        for now, old, target in zip(values_of(critic, one.ids, one.begin), one.values, one.targets, strict=True):
            near = old + (now.detach() - old).clamp(-VALUE_CLIP, VALUE_CLIP)
            free, kept = (now - target) ** 2, (near - target) ** 2
            held += int(kept > free)
            squares = squares + (kept if kept > free else free)
            values.append(now.item())
            errors.append(target - now.item())
            targets.append(target)
    told = {
        "vf_loss": float(squares) / 2 / len(values),
        "vf_clip_ratio": held / len(values),
        "value/mean": float(np.mean(values)),
        "value/explained_variance": float(1 - np.var(errors) / np.var(targets)),
    }
    return VALUE_WEIGHT * squares / 2 / len(values), told


def stepped(optimizer: torch.optim.Optimizer, model: Any, loss: Tensor) -> float:
    """One step; the gradient's norm before it is cut to 1."""
    optimizer.zero_grad()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    return norm


def theirs(folder: Path, kind: str) -> list[dict[str, float]]:
    """Each step of the other side."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32).eval() for _ in range(2)
    )
    critic: Any = AutoModelForSequenceClassification.from_pretrained(
        folder / f"{kind}-critic", dtype=torch.float32
    ).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / kind)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
        for m, lr in zip((policy, critic), RATES[kind], strict=True)
    ]
    size, lines, made = SLICES * BATCH, list[dict[str, float]](), list[Told]()
    for step in range(STEPS):
        number, at = divmod(step, SLICES * PASSES)
        if at == 0:
            made = generation(number, rows[number * size : (number + 1) * size], (policy, reference, critic), tokenizer)
            gaps = [one.gap for one in made]
        order = np.random.default_rng([SEED, number + 1]).permutation(size)
        some = [made[i] for i in order[at % SLICES * BATCH :][:BATCH]]
        loss, told = value_loss(critic, some)
        told["value/grad_norm"] = stepped(optimizers[1], critic, loss)
        loss, more = policy_loss(policy, some)
        norm = stepped(optimizers[0], policy, loss)
        lines.append(
            {
                **told,
                **more,
                "loss": float(loss),
                "grad_norm": norm,
                "kl": float(np.mean(np.concatenate(gaps))),
                "objective/kl": float(np.mean([sum(gap) for gap in gaps])),
            }
        )
    return lines


KNOWN: dict[str, list[dict[str, float]]] = {}


@pytest.mark.process
@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(layout, marks=SLOW) for layout in LAYOUTS if layout != "tp2")]
)
def test_as_plain_torch(layout: str, folder: Path, tmp_path: Path) -> None:
    kind = "moe" if layout == "ep2" else "model"
    if kind not in KNOWN:
        KNOWN[kind] = theirs(folder, kind)
    ranks, words = LAYOUTS[layout]
    width = (
        () if "--global_batch_size" in words else ("--per_device_train_batch_size", BATCH, "--global_batch_size", BATCH)
    )
    rate, critic_rate = RATES[kind]
    inputs = [
        "--model",
        str(folder / kind),
        "--critic_model",
        str(folder / f"{kind}-critic"),
        "--dataset",
        str(folder / "rows.jsonl"),
        "--dataset_cache_dir",
        str(folder / "cache"),
        "--reward_funcs",
        f"{folder / 'rewards.py'}:worth",
        "--lr",
        str(rate),
        "--critic_learning_rate",
        str(critic_rate),
        *(("--moe_aux_loss_coeff", "0") if kind == "moe" else ()),
    ]
    played.run(inputs, tmp_path / "out", *OPTIONS, *width, *words, ranks=ranks, task="ppo")
    mine = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert len(mine) == STEPS and not (tmp_path / "out" / "completions.jsonl").exists()
    for line, wanted in zip(mine, KNOWN[kind], strict=True):
        assert {name: line[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=2e-6)
    clipped = [line[name] for line in KNOWN[kind] for name in ("clip_ratio/region_mean", "vf_clip_ratio")]
    assert sum(c > 0 for c in clipped) >= 4 and KNOWN[kind][-1]["objective/kl"] != 0, "clips that prove nothing"
