"""Steps of GRPO on prompts with images beside TRL's own GRPOTrainer: the same vision-language model, completions,
rewards and micro-batches, float32.

TRL's trainer runs as installed, on one process; both get their completions from `played`. Loss, gradient norm, KL,
rewards, and whatever else TRL's trainer logs of every step, under its names.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.generation import completion_seeds
from tests.parity import vision
from tests.trainers import played
from tests.trainers.test_policy_trajectories import (
    ALIKE,
    BATCH,
    GROUP,
    LONGEST,
    OTHERWISE,
    SEED,
    STEPS,
    Case,
    Curve,
    assert_same,
)
from tests.trainers.trl_steps import ARGUMENTS, trained
from tests.trainers.vision_rows import inner_processor, trl_rows, write_pairs

pytestmark = [pytest.mark.process, pytest.mark.slow]
RATE = 5e-3
SPREAD = ("--per_device_train_batch_size", BATCH // 2, "--global_batch_size", BATCH)
CASES = {
    "dapo": Case({"loss_type": "dapo", "temperature": 0.7}),
    "grpo": Case({"loss_type": "grpo", "beta": 0.3}),
    "old": Case(
        {"loss_type": "grpo", "beta": 0.3, "num_iterations": 2, "epsilon": 0.02, "epsilon_high": 0.03}, slices=2
    ),
}
REWARD = '''"""Rewards that differ."""


def worth(completions, weight, images, **_):
    """The mean of the letters' numbers, by the row's weight and images."""
    letters = [[ord(c) - ord("q") for c in one[0]["content"] if c in "qrstuvwxyz"] for one in completions]
    rows = zip(letters, weight, images)
    return [(w + len(pictures)) * sum(some) / (9 * len(some)) for some, w, pictures in rows]
'''


@pytest.fixture(scope="module", params=["qwen2_vl", "llava"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, prompts with no, one or two images in rows with a column, and a file of rewards."""
    made = tmp_path_factory.mktemp("policy")
    vision.write_model(request.param, made / "model")
    write_pairs(made, STEPS * 2 * BATCH // GROUP)
    rows = [json.loads(line) for line in (made / "trl.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = [{"prompt": row["prompt"], "images": row["images"], "weight": 1 + i % 3} for i, row in enumerate(rows)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    (made / "rewards.py").write_text(REWARD, encoding="utf-8")
    return made


def of_trl(folder: Path, case: Case) -> Curve:
    """The loss of each step of TRL's trainer, unrounded, and what it logs."""
    from transformers import AutoModelForImageTextToText
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    spec = importlib.util.spec_from_file_location("rewards", folder / "rewards.py")
    assert spec is not None and spec.loader is not None
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    processor = inner_processor(folder / "model")
    processor.tokenizer.padding_side = "left"  # as TRL, which loads a processor so, expects of one that it is given
    generations: list[int] = []

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = [played.played(seed) for seed in completion_seeds(SEED, len(generations), len(prompts))]
        generations.append(len(prompts))
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
        return {
            "prompt_ids": [processor.apply_chat_template(p, **how)["input_ids"][0] for p in prompts],
            "completion_ids": [[*c.token_ids] for c in made],
            "logprobs": [[*c.logprobs] for c in made],
        }

    def in_our_order(batch: dict[str, Any]) -> dict[str, Any]:
        order = np.random.default_rng([SEED, len(generations)]).permutation(generations[-1])
        picked = {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.dim():
                picked[name] = value[torch.from_numpy(order)]
            else:
                picked[name] = [value[i] for i in order] if isinstance(value, list) else value
        return picked

    arguments = {
        **ARGUMENTS,
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": BATCH,
        "generation_batch_size": BATCH * case.slices,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "shuffle_dataset": False,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "seed": SEED,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "shuffle_sequence_dict", in_our_order)
        trainer: Any = GRPOTrainer(
            model=AutoModelForImageTextToText.from_pretrained(folder / "model"),
            reward_funcs=rewards.worth,
            rollout_func=rollout,
            args=GRPOConfig(**{**arguments, **case.options}),
            train_dataset=trl_rows(folder / "rows.jsonl"),
            processing_class=processor,
        )
        steps = trained(trainer)
    return [{"loss": loss, **{n: float(v) for n, v in line.items() if n not in OTHERWISE}} for loss, line in steps]


def ours(folder: Path, out: Path, case: Case, *layout: object, ranks: int) -> Curve:
    """The same of ours; encoder and aligner train too."""
    usual = () if ranks > 1 else ("--per_device_train_batch_size", BATCH)
    options = [word for name, value in case.options.items() for word in (f"--{name}", str(value).lower())]
    inputs = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--lr", str(RATE)]
    inputs += ["--dataset_cache_dir", str(folder / "cache"), "--reward_funcs", f"{folder / 'rewards.py'}:worth"]
    inputs += ["--generation_batch_size", str(BATCH * case.slices), *options]
    inputs += ["--freeze_vit", "false", "--freeze_aligner", "false"]
    words = [*ALIKE[:-1], 64]  # --max_length
    played.run(inputs, out, *words, *usual, *layout, ranks=ranks)
    return read_lines(out / "metrics.jsonl")


KNOWN: dict[tuple[Path, str], Curve] = {}


@pytest.mark.parametrize(
    ("case", "layout", "ranks"),
    [
        ("old", ("--engine", "ddp", *SPREAD), 2),
        *(
            (case, layout, ranks)
            for case in CASES
            for layout, ranks in (
                (("--engine", "ddp"), 1),
                (("--engine", "fsdp2", *SPREAD), 2),
                (("--engine", "zero3", *SPREAD), 2),
            )
        ),
    ],
)
def test_as_trl(case: str, layout: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path) -> None:
    if (folder, case) not in KNOWN:
        KNOWN[folder, case] = of_trl(folder, CASES[case])
    assert_same(ours(folder, tmp_path / "out", CASES[case], *layout, ranks=ranks), KNOWN[folder, case])
