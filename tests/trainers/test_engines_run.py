"""The same run on every engine, as users start it: one curve, one export, and going on from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run
from tests.trainers.test_pt_run import write_texts

STEPS = (
    "--max_steps",
    4,
    "--save_steps",
    2,
    "--report_to",
    "none",
    "--adam_epsilon",
    "1e-6",
    "--split_dataset_ratio",
    0.1,
    "--global_batch_size",
    8,
)
LORA = ("--train_type", "lora", "--target_modules", "q_proj", "down_proj")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"), "1e-3")


def curve(out: Path) -> list[dict[str, Any]]:
    """What every engine has to say alike."""
    return [{k: line[k] for k in ("loss", "grad_norm", "token_accuracy")} for line in read_lines(out / "metrics.jsonl")]


def assert_close(out: Path, other: Path) -> None:
    """Fails where two runs differ by more than rounding."""
    mine, theirs = curve(out), curve(other)
    assert len(mine) == len(theirs) == 4
    for a, b in zip(mine, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    held, others = ([line["loss"] for line in read_lines(folder / "eval.jsonl")] for folder in (out, other))
    assert held == pytest.approx(others, rel=1e-5)


def near(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, in units of each tensor's largest value."""
    assert mine.keys() == theirs.keys()
    return max(float((mine[n] - t).abs().max() / t.abs().max().clamp(min=1e-9)) for n, t in theirs.items())


@pytest.mark.process
@pytest.mark.slow
def test_one_curve_and_one_export(inputs: list[str], tmp_path: Path) -> None:
    """FSDP2 on 2 ranks, which goes on from a checkpoint as DDP, against Megatron TP2."""
    native, fsdp = tmp_path / "native", tmp_path / "fsdp2"
    run(inputs, native, *STEPS, "--tp", 2)
    text = run(inputs, fsdp, *STEPS, "--engine", "fsdp2")
    assert "transformers, per-document attention, float32" in text
    assert "DP2 on 2 processes" in text and "Warning" not in text
    assert_close(fsdp, native)
    exported = [load_file(out / "hf" / "model.safetensors") for out in (fsdp, native)]
    assert near(*exported) < 1e-4
    for part in (".", "hf"):
        assert {p.name for p in (fsdp / part).iterdir()} == {p.name for p in (native / part).iterdir()}
    for name in ("metrics.jsonl", "eval.jsonl"):
        mine, theirs = (read_lines(folder / name)[-1] for folder in (fsdp, native))
        assert mine.keys() == theirs.keys() and all(
            mine[k] == theirs[k] for k in ("step", "epoch", "tokens", "label_tokens") if k in mine
        )
    rest = tmp_path / "rest"
    run(inputs, rest, *STEPS, "--engine", "ddp", "--resume_from_checkpoint", fsdp / "checkpoints" / "step-2")
    assert near(load_file(rest / "hf" / "model.safetensors"), exported[0]) < 1e-5


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
def test_pretraining_is_the_same_run(engine: str, inputs: list[str], tmp_path: Path) -> None:
    """Plain text in packed rows, evaluated, against Megatron TP2."""
    write_texts(tmp_path / "train.jsonl", 60, 1)
    write_texts(tmp_path / "val.jsonl", 7, 2)
    words = [
        "--model",
        inputs[1],
        "--dataset",
        str(tmp_path / "train.jsonl"),
        "--val_dataset",
        str(tmp_path / "val.jsonl"),
        "--packing",
        "true",
        "--truncation_strategy",
        "split",
        "--max_length",
        "32",
        "--lr",
        "1e-3",
        "--max_steps",
        "4",
        "--report_to",
        "none",
        "--adam_epsilon",
        "1e-6",
        "--global_batch_size",
        "4",
        "--dataset_cache_dir",
        str(tmp_path / "cache"),
    ]
    run(words, tmp_path / "native", "--tp", 2, task="pt")
    run(words, tmp_path / "torch", "--engine", engine, task="pt")
    assert_close(tmp_path / "torch", tmp_path / "native")
    assert near(*(load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("torch", "native"))) < 1e-4


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("fresh", [True, False])
def test_lora_is_the_same_run(fresh: bool, engine: str, inputs: list[str], tmp_path: Path) -> None:
    """From new adapters, the same on each engine, or one adapter folder, on Megatron PP2 and on the torch engine; both
    write folders that PEFT loads."""
    import peft
    from transformers import AutoModelForCausalLM

    start: tuple[object, ...] = (*LORA, "--merge_lora", "true")
    if not fresh:
        first = tmp_path / "first"
        run(inputs, first, *LORA, "--max_steps", 1, "--report_to", "none", ranks=1)
        start = ("--train_type", "lora", "--adapters", first / "adapter", "--merge_lora", "true")
    native, out = tmp_path / "native", tmp_path / engine
    run(inputs, native, *STEPS, *start, "--pp", 2)
    run(inputs, out, *STEPS, *start, "--engine", engine)
    assert_close(out, native)
    adapters = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (out, native)]
    assert near(*adapters) < 1e-4
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(inputs[1]), out / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(out / "hf").eval()
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        assert float((model(ids).logits - merged(ids).logits).abs().max()) < 1e-5


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--fsdp", "shard_grad_op"),
        ("--fsdp", "offload"),
        ("--packing", "true", "--max_length", "16", "--recompute_granularity", "full"),
    ],
)
def test_ways_to_shard(options: tuple[str, ...], inputs: list[str], tmp_path: Path) -> None:
    run(inputs, tmp_path / "ddp", *STEPS, "--engine", "ddp", *(o for o in options if "--fsdp" not in options))
    run(inputs, tmp_path / "fsdp", *STEPS, "--engine", "fsdp2", *options)
    assert_close(tmp_path / "fsdp", tmp_path / "ddp")
