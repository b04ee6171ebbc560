"""Adapters on a reward model: beside TRL's trainer with PEFT, what their folder and its merge score, and going on bit
for bit.

Covers: megaswift/run/checks/model_spec.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.bridge.new_head import new_head_weight
from megaswift.config import SwiftConfig
from megaswift.errors import WeightsError
from megaswift.families import load_spec
from megaswift.inference.model import load_config_tokenizer_and_processor
from megaswift.inference.options.commands import ModelLoadingOptions
from megaswift.rewards.reward_input import RewardInput
from megaswift.rewards.reward_model import load_reward_models
from megaswift.trainers.hooks.metrics import read_lines
from tests.run.checks.test_preflight import problems
from tests.trainers.inputs import write_model
from tests.trainers.test_trajectories_trl import LORA, SLOW, SPREAD, STEPS, arguments, assert_same, curve, folder, ours

__all__ = ["folder"]
ADAPTER = "adapter_model.safetensors"
LAYOUTS: list[Any] = [
    ("--tp", 2),
    *(
        pytest.param(layout, marks=SLOW)
        for layout in (
            (),
            ("--pp", 2),
            SPREAD,
            ("--cp", 2),
            ("--tp", 2, "--packing", "false"),
            ("--tp", 2, "--pp", 2),
            ("--engine", "ddp", *SPREAD),
            ("--engine", "zero3", *SPREAD),
            ("--engine", "fsdp2", *SPREAD),
        )
    ),
]
ENGINES: list[Any] = [
    ("--tp", 2),
    ("--pp", 2),
    *(("--engine", engine, *SPREAD) for engine in ("ddp", "zero3", "fsdp2")),
]


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tuple[Path, list[tuple[float, float]]]:
    """The adapters that TRL's trainer begins with, on a language model that has no head yet, and its curve."""
    import trl
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(7)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="SEQ_CLS")
    rows = load_dataset(
        "json", data_files=str(folder / "pairs.jsonl"), split="train", cache_dir=str(folder / "trl-cache")
    )
    options = trl.RewardConfig(**arguments(folder), center_rewards_coefficient=0.01)
    trainer = trl.RewardTrainer(
        model=model,
        args=options,
        train_dataset=rows,
        peft_config=lora,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.model.save_pretrained(folder / "started")
    return folder / "started", curve(trainer)


def texts(folder: Path) -> list[str]:
    """Prompt and answer of each side of each pair."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    sides = [row["prompt"] + row[side] for row in rows for side in ("chosen", "rejected")]
    return [str(tokenizer.apply_chat_template(side, tokenize=False)) for side in sides]


def scores(model: Any, folder: Path, written: Sequence[str]) -> torch.Tensor:
    """What transformers' classifier says of each text by itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with torch.no_grad():
        return torch.cat(
            [
                model.eval()(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[:, 0]
                for text in written
            ]
        )


def with_peft(folder: Path, out: Path) -> Any:
    """The base with the adapters and the head of a run, as anybody loads them."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    return PeftModel.from_pretrained(base, out / "adapter")


def assert_scored_alike(folder: Path, out: Path) -> None:
    """PEFT's model has the loss that the run's evaluation found, and the merged folder its scores, in transformers and
    as a reward."""
    from transformers import AutoModelForSequenceClassification

    written = texts(folder)
    adapted = scores(with_peft(folder, out), folder, written)
    found = read_lines(out / "eval.jsonl")[-1]
    pairs = adapted.view(-1, 2)
    assert -torch.nn.functional.logsigmoid(pairs[:, 0] - pairs[:, 1]).mean().item() == pytest.approx(
        found["loss/preference"], rel=1e-5
    )
    merged, told = AutoModelForSequenceClassification.from_pretrained(out / "hf", output_loading_info=True)
    assert (
        not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        and merged.config.num_labels == 1
    )
    assert torch.allclose(scores(merged, folder, written), adapted, atol=1e-5) and adapted.std() > 1e-2
    judge = load_reward_models([str(out / "hf")], ModelLoadingOptions(model="", torch_dtype="float32"))[0]
    judged = judge([RewardInput(prompt="", completion=text, token_ids=(), finished=True) for text in written[:6]])
    assert judged == pytest.approx(adapted[:6].tolist(), abs=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_trl(
    layout: tuple[object, ...], folder: Path, theirs: tuple[Path, list[tuple[float, float]]], tmp_path: Path
) -> None:
    """Every step's loss and gradient norm; then what the run leaves behind."""
    adapter, wanted = theirs
    leaves = (
        "--export_hf",
        "true",
        "--merge_lora",
        "true",
        "--val_dataset",
        folder / "pairs.jsonl",
        "--eval_steps",
        STEPS,
    )
    mine = ours(
        folder,
        tmp_path / "out",
        "rm",
        "--model",
        folder / "model",
        "--train_type",
        "lora",
        "--adapters",
        adapter,
        "--center_rewards_coefficient",
        0.01,
        *leaves,
        *layout,
    )
    assert_same(mine, wanted)
    assert_scored_alike(folder, tmp_path / "out")


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", ENGINES)
def test_new_adapters_go_on_bit_for_bit(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    base = ("--model", folder / "model", *LORA, *layout, "--save_steps", 2)
    whole = ours(folder, tmp_path / "whole", "rm", *base)
    again = ours(
        folder, tmp_path / "again", "rm", *base, "--resume_from_checkpoint", tmp_path / "whole/checkpoints/step-2"
    )
    assert again == whole[2:] and whole[-1] != whole[0]
    mine, wanted = (load_file(tmp_path / name / "adapter" / ADAPTER) for name in ("again", "whole"))
    assert mine.keys() == wanted.keys() and all(torch.equal(t, wanted[n]) for n, t in mine.items())
    assert "base_model.model.score.weight" in mine


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("layout", [("--tp", 2), ("--engine", "ddp", *SPREAD)])
def test_over_four_bits(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """The head is no weight of four bits: it trains, and stands in the folder in float32."""
    model = write_model(tmp_path / "wide", hidden_size=128, intermediate_size=256, head_dim=32)
    lines = ours(folder, tmp_path / "out", "rm", "--model", model, "--train_type", "qlora", *layout)
    assert lines[-1][0] < lines[0][0]
    head = load_file(tmp_path / "out" / "adapter" / ADAPTER)["base_model.model.score.weight"]
    assert (
        head.shape == (1, 128)
        and head.dtype == torch.float32
        and 0 < float((head - new_head_weight(load_spec(model), 42)).abs().max()) < 0.1
    )


def test_adapters_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    """A language model's adapters have no head, a reward model's write nothing; told before anything is loaded."""
    model = write_model(tmp_path / "model")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / ADAPTER).touch()
    for kind, task, said in (
        ("CAUSAL_LM", "rm", "it has no scalar head"),
        ("SEQ_CLS", "dpo", "needs a language model"),
    ):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": kind}))
        for engine in ("megatron", "ddp"):
            found = problems(
                SwiftConfig(
                    task=task,
                    model=str(model),
                    dataset="d",
                    output_dir=str(tmp_path / "out"),
                    engine=engine,
                    train_type="lora",
                    adapters=str(tmp_path / "adapter"),
                ),
                2,
            )
            assert len(found) == 1 and said in found[0]
    with pytest.raises(WeightsError, match="is of a reward model, which does not generate text"):
        load_config_tokenizer_and_processor(
            ModelLoadingOptions(model=str(model), adapters=(str(tmp_path / "adapter"),)), None
        )
