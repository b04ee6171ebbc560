"""Steps of GRPO beside TRL's own GRPOTrainer: the same model, completions, rewards and micro-batches, float32.

TRL's trainer runs as installed, on one process; both get their completions from `played`. Loss, gradient norm, KL, and
whatever else TRL's trainer logs of every step, under its names.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaswift.trainers.hooks.metrics import read_lines
from megaswift.trainers.rl.generation import completion_seeds
from tests.parity.lora import ATTENTION, MLP, draw_lora_a, make_adapter
from tests.trainers import played
from tests.trainers.trl_steps import ARGUMENTS, trained

OTHERWISE = {"loss", "learning_rate", "epoch", "num_tokens", "step_time", "policy_loss", "entropy_coef"}
"""What TRL logs rounded, counts since the start, has by the clock, or knows by another name (`loss/policy`)."""
STEPS, BATCH, GROUP, LONGEST, SEED = 3, 8, 4, 8, 42
RATES = {"model": 2e-2, "moe": 2e-3}
ALIKE = (
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
    "--num_generations",
    GROUP,
    "--max_completion_length",
    LONGEST,
    "--max_length",
    32,
)


@dataclass(frozen=True)
class Case:
    """Options in both toolkits' names, which are mostly one."""

    options: dict[str, Any] = field(default_factory=dict)
    slices: int = 1
    """Optimizer steps of a pass over a generation."""
    length: int | None = None
    """Of every completion; None: of different ones."""
    adapters: str = ""
    """LoRA trains: `new`, or from the `folder` that PEFT wrote; empty: all weights do."""


CASES = {
    "grpo": Case({"loss_type": "grpo", "beta": 0.3}),
    "dapo": Case({"loss_type": "dapo", "temperature": 0.7}),
    "dr_grpo": Case({"loss_type": "dr_grpo", "beta": 0.1, "scale_rewards": "none", "num_iterations": 3}),
    "old": Case(
        {"loss_type": "grpo", "beta": 0.3, "num_iterations": 2, "epsilon": 0.02, "epsilon_high": 0.03}, slices=2
    ),
    "old dapo": Case(
        {"loss_type": "dapo", "num_iterations": 2, "epsilon": 0.02, "scale_rewards": "batch"}, slices=2, length=6
    ),
    "gspo": Case(
        {"loss_type": "grpo", "num_iterations": 2, "importance_sampling_level": "sequence", "epsilon": 0.02}
    ),  # with 3, TRL's own float32 is 5.8e-5 from its float64, ours 3.4e-5
    "masked": Case({"loss_type": "grpo", "beta": 0.1, "mask_truncated_completions": True, "num_iterations": 3}),
    "cispo": Case({"loss_type": "cispo", "num_iterations": 3, "epsilon_high": 1.05}),
    "uncertain": Case({"loss_type": "grpo", "beta": 0.1, "top_entropy_quantile": 0.5, "num_iterations": 3}),
    "moving": Case(
        {
            "loss_type": "grpo",
            "beta": 0.3,
            "sync_ref_model": True,
            "ref_model_sync_steps": 2,
            "ref_model_mixup_alpha": 0.4,
        }
    ),
    "bounded": Case(
        {
            "loss_type": "bnpo",
            "beta": 0.1,
            "use_bias_correction_kl": False,
            "delta": 1.05,
            "epsilon": 0.02,
            "entropy_coef": 0.1,
            "off_policy_mask_threshold": 2.3,
            "num_iterations": 3,
        }
    ),
    "sapo": Case({"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.9, "num_iterations": 3}),
    "vespo": Case(
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.1,
            "vespo_lambda_pos": 0.7,
            "vespo_k_neg": 0.6,
            "vespo_lambda_neg": 1.4,
            "num_iterations": 2,
        }
    ),  # with 3, TRL's own float32 is 3.8e-5 from its float64
    "lora": Case(
        {"loss_type": "grpo", "beta": 0.3, "num_iterations": 2, "epsilon": 0.02, "adam_epsilon": 1e-4}, adapters="new"
    ),  # from B of zeros Adam makes whole steps of gradients of 1e-6, which float32 rounds
    "lora on": Case({"loss_type": "grpo", "beta": 0.3, "num_iterations": 2, "epsilon": 0.02}, adapters="folder"),
}
SLOW = pytest.mark.slow
SPREAD = ("--per_device_train_batch_size", BATCH // 2, "--global_batch_size", BATCH)
LAYOUTS: dict[str, tuple[int, tuple[object, ...]]] = {
    "one": (1, ()),
    "tp2": (2, ("--tp", 2)),
    "pp2": (2, ("--pp", 2)),
    "cp2": (2, ("--cp", 2)),
    "dp2": (2, SPREAD),
    "tp2 pp2": (4, ("--tp", 2, "--pp", 2)),
    "ddp": (2, ("--engine", "ddp", *SPREAD)),
    "fsdp2": (2, ("--engine", "fsdp2", *SPREAD)),
    "rows": (1, ("--packing", "false")),
    "micro": (1, ("--per_device_train_batch_size", 2, "--global_batch_size", BATCH)),
    "zero2": (2, ("--engine", "zero2", *SPREAD)),
    "zero3": (2, ("--engine", "zero3", *SPREAD)),
    "ep2": (2, ("--ep", 2, *SPREAD)),
    "ep2 ddp": (2, ("--engine", "ddp", *SPREAD)),
}
EXPERTS = ("ep2", "ep2 ddp")
QUICK = [("dapo", "one"), ("old", "tp2"), ("dr_grpo", "pp2"), ("masked", "dp2"), ("old", "ddp"), ("grpo", "ep2")]
WIDE = [
    *(("lora", layout) for layout in ("ddp", "fsdp2", "zero2", "zero3")),
    *(("lora on", layout) for layout in ("tp2 pp2", "ddp", "fsdp2", "zero2", "zero3")),
    *(("old", layout) for layout in LAYOUTS),
    *(("masked", layout) for layout in LAYOUTS if layout not in EXPERTS),
    *((case, layout) for case in CASES if case != "lora" for layout in ("one", "cp2", "dp2")),
]
"""Every layout with and without a policy that counts as the old one, every case on some; new adapters are not drawn
alike."""
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, tuple[object, ...]] = {
    "": (),
    "new": ("--train_type", "lora", "--lora_rank", 4, "--lora_alpha", 16),
    "folder": ("--train_type", "lora", "--rollout_lora", "false", "--adapters"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and moe/, prompts of different lengths in rows with a column, and a file of rewards."""
    made = tmp_path_factory.mktemp("policy")
    played.write_task(made, STEPS * 2 * BATCH // GROUP)
    make_adapter(made / "model", made / "adapter", (*ATTENTION, *MLP))
    return made


def drawn(model: Any, config: Any, **_: Any) -> Any:
    """PEFT's adapters from the run's seed."""
    from peft import get_peft_model

    made = get_peft_model(model, config)
    draw_lora_a(made, SEED)
    return made


Curve = list[dict[str, float]]


def of_trl(folder: Path, case: Case, model: str = "model") -> Curve:
    """The loss of each step of TRL's trainer, unrounded, and what it logs."""
    from datasets import load_dataset
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    spec = importlib.util.spec_from_file_location("rewards", folder / "rewards.py")
    assert spec is not None and spec.loader is not None
    rewards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rewards)
    tokenizer = AutoTokenizer.from_pretrained(folder / model)
    generations: list[int] = []

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = [played.played(seed, case.length) for seed in completion_seeds(SEED, len(generations), len(prompts))]
        generations.append(len(prompts))
        return {
            "prompt_ids": [
                tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts
            ],
            "completion_ids": [[*c.token_ids] for c in made],
            "logprobs": [[*c.logprobs] for c in made],
        }

    def ours(batch: dict[str, Any]) -> dict[str, Any]:
        """Our order in place of a shuffled one."""
        order = torch.from_numpy(np.random.default_rng([SEED, len(generations)]).permutation(generations[-1]))
        return {name: v[order] if isinstance(v, torch.Tensor) and v.dim() else v for name, v in batch.items()}

    arguments = {
        **ARGUMENTS,
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": BATCH,
        "generation_batch_size": BATCH * case.slices,
        "max_steps": STEPS,
        "learning_rate": RATES[model],
        "shuffle_dataset": False,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "seed": SEED,
        "router_aux_loss_coef": 0.0,
    }
    rows = load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "trl-cache")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "shuffle_sequence_dict", ours)
        patch.setattr(grpo_trainer, "get_peft_model", drawn)
        policy: Any = AutoModelForCausalLM.from_pretrained(folder / model)
        if case.adapters == "folder":
            policy = PeftModel.from_pretrained(policy, folder / "adapter", is_trainable=True)
        trainer: Any = GRPOTrainer(
            model=policy,
            peft_config=LoraConfig(**LORA) if case.adapters == "new" else None,
            reward_funcs=rewards.worth,
            rollout_func=rollout,
            args=GRPOConfig(**{**arguments, **case.options}),
            train_dataset=rows,
            processing_class=tokenizer,
        )
        steps = trained(trainer)
    return [{"loss": loss, **{n: float(v) for n, v in line.items() if n not in OTHERWISE}} for loss, line in steps]


def ours(folder: Path, out: Path, case: Case, layout: str, model: str = "model") -> Curve:
    """The same of ours."""
    ranks, words = LAYOUTS[layout]
    usual = () if "--per_device_train_batch_size" in words else ("--per_device_train_batch_size", BATCH)
    options = [word for name, value in case.options.items() for word in (f"--{name}", str(value).lower())]
    options += [*map(str, ADAPTERS[case.adapters]), *([str(folder / "adapter")] if case.adapters == "folder" else ())]
    options += ["--lr", str(RATES[model]), *(("--moe_aux_loss_coeff", "0") if model == "moe" else ())]
    inputs = [
        "--model",
        str(folder / model),
        "--dataset",
        str(folder / "rows.jsonl"),
        "--dataset_cache_dir",
        str(folder / "cache"),
        "--reward_funcs",
        f"{folder / 'rewards.py'}:worth",
        "--generation_batch_size",
        str(BATCH * case.slices),
        *options,
    ]
    alike = [
        word
        for pair in zip(ALIKE[::2], ALIKE[1::2], strict=True)
        if str(pair[0])[2:] not in case.options
        for word in pair
    ]
    played.run(inputs, out, *alike, *usual, *words, ranks=ranks, length=case.length)
    return read_lines(out / "metrics.jsonl")


def assert_same(mine: Curve, theirs: Curve) -> None:
    """To 1e-5 of each number."""
    assert len(mine) == len(theirs) == STEPS
    for line, wanted in zip(mine, theirs, strict=True):
        assert {n: line[n] for n in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)


KNOWN: dict[tuple[str, str], Curve] = {}


def known(folder: Path, case: str, model: str = "model") -> Curve:
    """TRL's curve, once."""
    if (case, model) not in KNOWN:
        KNOWN[case, model] = of_trl(folder, CASES[case], model)
    return KNOWN[case, model]


@pytest.mark.process
@pytest.mark.parametrize(
    "case, layout", [*QUICK, *(pytest.param(*pair, marks=SLOW) for pair in dict.fromkeys(WIDE) if pair not in QUICK)]
)
def test_as_trl(case: str, layout: str, folder: Path, tmp_path: Path) -> None:
    model = "moe" if layout in EXPERTS else "model"
    assert_same(ours(folder, tmp_path / "out", CASES[case], layout, model), known(folder, case, model))
