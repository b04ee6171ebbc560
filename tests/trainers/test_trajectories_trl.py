"""Five steps of training beside TRL's own trainers: the same model, rows and optimizer, float32; loss and gradient norm
of every step.

TRL's trainers run as installed, on one process. Equal counts in every micro-batch, so that its means are ours.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.pool import shared
from tests.trainers.inputs import write_model
from tests.trainers.runs import run
from tests.trainers.trl_steps import ARGUMENTS, trained

STEPS, BATCH, RATE = 5, 4, 2e-3
ALIKE = (
    "--max_steps",
    STEPS,
    "--lr",
    RATE,
    "--lr_scheduler_type",
    "constant",
    "--weight_decay",
    0,
    "--adam_epsilon",
    1e-6,
    "--shuffle",
    "false",
    "--report_to",
    "none",
    "--export_hf",
    "false",
)
SLOW = pytest.mark.slow
SPREAD = ("--per_device_train_batch_size", BATCH // 2, "--global_batch_size", BATCH)
LAYOUTS: list[Any] = [
    ("--tp", 2),
    *(
        pytest.param(layout, marks=SLOW)
        for layout in (
            ("--pp", 2),
            ("--cp", 2),
            SPREAD,
            ("--tp", 2, "--packing", "false"),
            ("--tp", 2, "--pp", 2),
            ("--engine", "ddp", *SPREAD),
            ("--engine", "zero3", *SPREAD),
        )
    ),
]
LORA = ("--train_type", "lora", "--lora_rank", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and rows in the shapes of both toolkits; answers of one length each, chosen and rejected of different
    ones."""
    made = tmp_path_factory.mktemp("trl")
    write_model(made / "model")
    pairs, judged = [], []
    for i in range(STEPS * BATCH):
        ask = [{"role": "user", "content": f"{i % 10}+{(7 * i) % 10}="}]
        good, bad = f"{(i + 7 * i) % 90 + 10}", f"{i % 9 + 1}{i % 7}{i % 5}"
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (good, bad))
        pairs.append({"prompt": ask, "chosen": chosen, "rejected": rejected})
        judged.append({"prompt": ask, "completion": chosen, "label": i % 3 != 1})
    for name, rows in (("pairs", pairs), ("judged", judged)):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return made


def curve(trainer: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a TRL trainer, unrounded."""
    return [(loss, float(logged["grad_norm"])) for loss, logged in trained(trainer)]


def arguments(folder: Path) -> dict[str, Any]:
    return {
        **ARGUMENTS,
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "train_sampling_strategy": "sequential",
    }


def without_reference(task: str) -> tuple[Any, Any]:
    """TRL's trainer and options."""
    if task == "orpo":
        from trl.experimental import orpo

        return orpo.ORPOTrainer, orpo.ORPOConfig
    from trl.experimental import cpo

    return cpo.CPOTrainer, cpo.CPOConfig


def of_trl(
    folder: Path, task: str, base: str = "model", adapter: Path | None = None, **options: Any
) -> list[tuple[float, float]]:
    """TRL's curve of a task; with PEFT from `adapter` on, where it is given."""
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    model_folder, tokenizer = folder / base, AutoTokenizer.from_pretrained(folder / "model")
    rows = load_dataset(
        "json",
        data_files=str(folder / ("judged.jsonl" if task == "kto" else "pairs.jsonl")),
        split="train",
        cache_dir=str(folder / "trl-cache"),
    )
    if task == "rm":
        base = "scored" if base == "model" else base
        model: Any = AutoModelForSequenceClassification.from_pretrained(folder / base, num_labels=1)
        return curve(
            trl.RewardTrainer(
                model=model,
                args=trl.RewardConfig(**arguments(folder) | options),
                train_dataset=rows,
                processing_class=tokenizer,
            )
        )
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    if task in ("orpo", "cpo"):
        kind, config = without_reference(task)
        return curve(
            kind(
                model=model, args=config(**arguments(folder) | options), train_dataset=rows, processing_class=tokenizer
            )
        )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    kind, config = {"dpo": (trl.DPOTrainer, trl.DPOConfig), "kto": (trl.KTOTrainer, trl.KTOConfig)}[task]
    # PEFT's reference lies in the model
    reference = AutoModelForCausalLM.from_pretrained(model_folder) if adapter is None else None
    return curve(
        kind(
            model=model,
            ref_model=reference,
            args=config(**arguments(folder) | options),
            train_dataset=rows,
            processing_class=tokenizer,
        )
    )


def ours(folder: Path, out: Path, task: str, *options: object) -> list[tuple[float, float]]:
    usual = [] if "--per_device_train_batch_size" in options else ["--per_device_train_batch_size", str(BATCH)]
    base = [] if "--model" in options else ["--model", str(folder / ("scored" if task == "rm" else "model"))]
    inputs = [
        *base,
        "--dataset",
        str(folder / ("judged.jsonl" if task == "kto" else "pairs.jsonl")),
        "--dataset_cache_dir",
        str(folder / "cache"),
        *usual,
    ]
    alike = [
        word
        for name, value in zip(ALIKE[::2], ALIKE[1::2], strict=True)
        if name not in options
        for word in (name, value)
    ]
    cut = [int(str(options[options.index(name) + 1])) for name in ("--tp", "--pp", "--cp") if name in options]
    run(inputs, out, *alike, *options, task=task, ranks=math.prod(cut) * (2 if "--global_batch_size" in options else 1))
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out / "metrics.jsonl")]


def assert_same(mine: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    assert len(mine) == len(theirs) == STEPS
    for (loss, norm), (wanted, wanted_norm) in zip(mine, theirs, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5) and norm == pytest.approx(wanted_norm, rel=1e-5)


@pytest.fixture(scope="module")
def dpo(folder: Path) -> list[tuple[float, float]]:
    return of_trl(folder, "dpo", beta=0.5)


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo(layout: tuple[object, ...], folder: Path, dpo: list[tuple[float, float]], tmp_path: Path) -> None:
    assert_same(ours(folder, tmp_path / "out", "dpo", "--beta", 0.5, *layout), dpo)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--engine", "ddp", *SPREAD)])
def test_dpo_with_a_reference_that_moves(
    layout: tuple[object, ...], folder: Path, dpo: list[tuple[float, float]], tmp_path: Path
) -> None:
    """TR-DPO, every second step."""
    moves = (
        "--sync_ref_model",
        "true",
        "--ref_model_sync_steps",
        2,
        "--ref_model_mixup_alpha",
        0.3,
        "--offload_reference",
        "true",
    )
    mine = ours(folder, tmp_path / "out", "dpo", "--beta", 0.5, *moves, *layout)
    theirs = of_trl(folder, "dpo", beta=0.5, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.3)
    assert theirs[1][0] == pytest.approx(dpo[1][0], rel=1e-5) and abs(theirs[-1][0] - dpo[-1][0]) > 1e-3
    assert_same(mine, theirs)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    ("task", "layout"),
    [
        ("dpo", ("--ep", 2, *SPREAD)),
        ("dpo", ("--tp", 2)),
        ("dpo", ("--engine", "ddp", *SPREAD)),
        ("kto", ("--tp", 2, "--ep", 2, "--etp", 1)),
        ("rm", ("--ep", 2, *SPREAD)),
    ],
)
def test_experts(task: str, layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """A mixture, its routers without a loss of their own on either side; small steps and wide routers, since tokens
    near a tie change their expert."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification

    plain = json.loads((folder / "model/config.json").read_text())
    kept = {
        name: plain[name]
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "pad_token_id",
            "eos_token_id",
        )
    }
    torch.manual_seed(6)
    config = Qwen3MoeConfig(
        **kept,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        num_labels=1,
    )
    kind = Qwen3MoeForSequenceClassification if task == "rm" else Qwen3MoeForCausalLM
    model = kind(config)
    for name, weight in model.named_parameters():
        weight.data *= 16 if name.endswith("mlp.gate.weight") else 1
    model.save_pretrained(folder / "experts")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "experts")
    alone = ("--model", folder / "experts", "--moe_aux_loss_coeff", 0, "--lr", RATE / 4)
    mine = ours(folder, tmp_path / "out", task, *(() if task == "rm" else ("--beta", 0.5)), *alone, *layout)
    options = {} if task == "rm" else {"beta": 0.5, "router_aux_loss_coef": 0.0}
    assert_same(mine, of_trl(folder, task, base="experts", learning_rate=RATE / 4, **options))


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    ("task", "layout"),
    [
        *(
            ("dpo", layout)
            for layout in (
                ("--tp", 2),
                ("--pp", 2),
                ("--cp", 2),
                SPREAD,
                ("--tp", 2, "--pp", 2),
                ("--engine", "ddp", *SPREAD),
                ("--engine", "zero3", *SPREAD),
            )
        ),
        ("kto", ("--tp", 2)),
        ("kto", ("--engine", "ddp")),
    ],
)
def test_adapters(task: str, layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """Adapters that start at random numbers on both sides; their reference is how they start."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapter = tmp_path / "adapter"
    lora = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), lora).save_pretrained(adapter)
    mine = ours(folder, tmp_path / "out", task, "--beta", 0.5, "--train_type", "lora", "--adapters", adapter, *layout)
    assert_same(mine, of_trl(folder, task, adapter=adapter, beta=0.5))


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--engine", "ddp", *SPREAD)])
def test_dpo_of_new_adapters(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """Our own first adapters, taken from a step of next to nothing, go on in PEFT; the reference is the model without
    them."""
    ours(folder, tmp_path / "first", "dpo", *LORA, *layout, "--max_steps", 1, "--lr", 1e-30)
    mine = ours(folder, tmp_path / "out", "dpo", "--beta", 0.5, *LORA, *layout)
    theirs = of_trl(folder, "dpo", adapter=tmp_path / "first" / "adapter", beta=0.5)
    assert theirs[0][0] == pytest.approx(0.6931472, abs=1e-6)
    assert_same(mine, theirs)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--cp", 2), ("--engine", "ddp", *SPREAD)])
def test_orpo(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    assert_same(ours(folder, tmp_path / "out", "orpo", "--beta", 0.5, *layout), of_trl(folder, "orpo", beta=0.5))


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--pp", 2), ("--engine", "ddp", *SPREAD)])
def test_cpo(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    mine = ours(folder, tmp_path / "out", "cpo", "--beta", 0.5, *layout)
    assert_same(mine, of_trl(folder, "cpo", beta=0.5, cpo_alpha=1.0))


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--tp", 2, "--packing", "false")])
def test_simpo(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    mine = ours(folder, tmp_path / "out", "simpo", *layout)
    assert_same(mine, of_trl(folder, "cpo", loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0))


@pytest.fixture(scope="module")
def kto(folder: Path) -> list[tuple[float, float]]:
    return of_trl(folder, "kto", beta=0.5)


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    "layout",
    [
        ("--tp", 2),
        ("--pp", 2),
        ("--cp", 2),
        ("--tp", 2, "--packing", "false"),
        ("--tp", 2, "--pp", 2),
        ("--engine", "ddp"),
    ],
)
def test_kto(layout: tuple[object, ...], folder: Path, kto: list[tuple[float, float]], tmp_path: Path) -> None:
    """On one data-parallel rank: which answers are paired with which prompts depends on the micro-batch."""
    assert_same(ours(folder, tmp_path / "out", "kto", "--beta", 0.5, *layout), kto)


def on_a_rank(rank: int, world: int, folder: Path) -> list[tuple[float, float]]:
    """KTO by TRL on several processes: its gradient norm is the whole run's, its loss this rank's."""
    return of_trl(folder, "kto", beta=0.5, per_device_train_batch_size=BATCH // world)


@pytest.fixture(scope="module")
def spread_kto(folder: Path) -> list[tuple[float, float]]:
    """By two processes of TRL; equal numbers of examples on each, so that the loss is the mean of theirs."""
    one, other = shared().run("tests.trainers.test_trajectories_trl:on_a_rank", folder, 2, timeout=240.0)
    assert [norm for _, norm in one] == [norm for _, norm in other]
    return [((a + b) / 2, norm) for (a, norm), (b, _) in zip(one, other, strict=True)]


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    "layout", [SPREAD, ("--engine", "ddp", *SPREAD), ("--engine", "zero3", *SPREAD), ("--engine", "fsdp2", *SPREAD)]
)
def test_kto_on_data_parallel_ranks(
    layout: tuple[object, ...], folder: Path, spread_kto: list[tuple[float, float]], tmp_path: Path
) -> None:
    """Its point is one number for all ranks."""
    assert_same(ours(folder, tmp_path / "out", "kto", "--beta", 0.5, *layout), spread_kto)
