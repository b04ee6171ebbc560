"""TRL's trainers, built once by their own constructors; tests put a `Bigram` in the model's place and set options
between cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.data import makers
from tests.losses.rollouts import Rollouts

SIZES: dict[str, Any] = {
    "vocab_size": 800,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ARGUMENTS: dict[str, Any] = {
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
PAIR = [{"prompt": "Question", "chosen": " a", "rejected": " b"}]


def language_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def paired(trainer: type, config: type, folder: Path, **more: Any) -> Any:
    """A trainer on pairs of plain text."""
    return trainer(
        model=language_model(),
        args=config(str(folder), **ARGUMENTS),
        train_dataset=Dataset.from_list(PAIR),
        processing_class=makers.tokenizer("qwen"),
        **more,
    )


def dpo(folder: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    return paired(DPOTrainer, DPOConfig, folder, ref_model=language_model())


def cpo(folder: Path) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return paired(CPOTrainer, CPOConfig, folder)


def orpo(folder: Path) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return paired(ORPOTrainer, ORPOConfig, folder)


def reward(folder: Path) -> Any:
    from trl import RewardConfig, RewardTrainer

    rows = [{"chosen": "Question a", "rejected": "Question b"}]
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))
    return RewardTrainer(
        model=model,
        args=RewardConfig(str(folder), **ARGUMENTS),
        train_dataset=Dataset.from_list(rows),
        processing_class=makers.tokenizer("qwen"),
    )


def kto(folder: Path) -> Any:
    from trl import KTOConfig, KTOTrainer

    rows = [{"prompt": "Question", "completion": f" {i}", "label": bool(i % 2)} for i in range(4)]
    return KTOTrainer(
        model=language_model(),
        ref_model=language_model(),
        args=KTOConfig(str(folder), **ARGUMENTS),
        train_dataset=Dataset.from_list(rows),
        processing_class=makers.tokenizer("qwen"),
    )


def online(trainer: type, config: type, folder: Path) -> Any:
    """A trainer that is never asked to generate."""
    arguments = {**ARGUMENTS, "per_device_train_batch_size": 4, "num_generations": 2, "beta": 0.0}
    return trainer(
        model=language_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config(str(folder), **arguments),
        train_dataset=Dataset.from_list([{"prompt": "Question"}] * 4),
        processing_class=makers.tokenizer("qwen"),
    )


def grpo(folder: Path) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    return online(GRPOTrainer, GRPOConfig, folder)


def rloo(folder: Path) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    return online(RLOOTrainer, RLOOConfig, folder)


def scored(
    trl: Any, models: tuple[Any, Any], data: Rollouts, rewards: torch.Tensor, **more: Any
) -> dict[str, torch.Tensor]:
    """What an online trainer makes of completions before its steps; `rewards`: [n, functions]. Generating and judging
    are skipped."""
    trl.model, trl.ref_model = models
    trl.reward_funcs = trl.reward_func_names = [f"f{i}" for i in range(rewards.shape[1])]
    for name, value in more.items():
        setattr(trl, name, value)
    prompts, answers, texts = (
        [d.ids[: d.begin] for d in data.docs],
        [d.ids[d.begin :] for d in data.docs],
        [""] * len(data.docs),
    )
    if type(trl).__name__ == "RLOOTrainer":
        made: tuple[Any, ...] = (prompts, answers, texts)
    else:
        sampled = [[None if x != x else x for x in v.tolist()] for v in data.known["sampled"]] if trl.use_vllm else None
        made = (prompts, answers, [m.long().tolist() for m in data.learnt], texts, sampled, {}, None, [])
    trl._generate, trl._calculate_rewards = lambda _: made, lambda *_: rewards.clone()
    return trl._generate_and_score_completions([{"prompt": "Question"}] * len(data.docs))


def differentiated(loss: torch.Tensor, weight: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(value, gradient)."""
    (gradient,) = torch.autograd.grad(loss, [weight])
    return loss.item(), gradient


def metrics(trainer: Any) -> dict[str, float]:
    """What a trainer that keeps lists has noted since the last call."""
    found = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
    trainer._metrics["train"].clear()
    return found
