"""Whole runs of preference learning: each task, on either engine; what a reference is after a restart; the reward model
in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megaswift.options.tasks import PROMPTED
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import preference_inputs, write_preferences
from tests.trainers.runs import run

USUAL = {
    "--max_steps": 4,
    "--report_to": "none",
    "--shuffle": "false",
    "--lr": "1e-2",
    "--per_device_train_batch_size": 4,
}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("preference")
    write_preferences(made, rows=24)
    return made


def trained(folder: Path, out: Path, task: str, *options: object, ranks: int = 2) -> list[dict[str, Any]]:
    inputs = preference_inputs(folder, task, model="--model" not in options)
    usual = [word for name, value in USUAL.items() if name not in options for word in (name, value)]
    run(inputs, out, *usual, *options, ranks=ranks, task=task)
    return read_lines(out / "metrics.jsonl")


def figures(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must not depend on how a run is spread."""
    return [
        {k: v for k, v in line.items() if k in ("loss", "grad_norm", "kl", "entropy") or "/" in k} for line in lines
    ]


def assert_close(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert len(some) == len(others) == 4
    for a, b in zip(figures(some), figures(others), strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


@pytest.mark.process
@pytest.mark.parametrize(
    "task, options",
    [
        ("dpo", ()),
        ("kto", ()),
        *(
            pytest.param(task, options, marks=SLOW)
            for task, options in (
                ("kto", ("--loss_type", "bco")),
                ("orpo", ()),
                ("cpo", ()),
                ("simpo", ()),
                ("rm", ()),
                (
                    "dpo",
                    (
                        "--loss_type",
                        "sigmoid",
                        "ipo",
                        "--loss_weights",
                        "1",
                        "0.5",
                        "--rpo_alpha",
                        "0.1",
                        "--ld_alpha",
                        "0.5",
                    ),
                ),
            )
        ),
    ],
)
def test_one_curve_on_either_engine_packed_and_not(
    task: str, options: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    native = trained(folder, tmp_path / "native", task, "--tp", 2, *options)
    other = trained(folder, tmp_path / "torch", task, "--engine", "ddp", "--packing", "false", *options, ranks=1)
    assert_close(native, other)
    assert native[-1]["loss"] < native[0]["loss"]
    tokens = [sum(line["tokens"] for line in lines) for lines in (native, other)]
    assert tokens[0] < tokens[1] if task in PROMPTED else tokens[0] == tokens[1], "packed pairs have their prompt once"


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    "layout",
    [
        ("--pp", 2),
        ("--cp", 2),
        ("--engine", "zero3", "--per_device_train_batch_size", 2),
        ("--engine", "fsdp2", "--per_device_train_batch_size", 2),
    ],
)
def test_one_curve_on_every_layout(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    assert_close(
        trained(folder, tmp_path / "spread", "dpo", *layout), trained(folder, tmp_path / "one", "dpo", ranks=1)
    )


@pytest.mark.process
@SLOW
@pytest.mark.parametrize(
    ("task", "layout"),
    [
        ("dpo", ("--tp", 2)),
        ("rm", ("--engine", "ddp", "--per_device_train_batch_size", 2)),
        ("kto", ("--per_device_train_batch_size", 2)),
    ],
)
def test_a_streamed_run_is_that_of_stored_data_and_goes_on(
    task: str, layout: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    """Over the end of an epoch of 24 rows; a row without an answer among them is skipped and leaves no gap, on two
    ranks too."""
    name = "judged.jsonl" if task == "kto" else "pairs.jsonl"
    rows = (folder / name).read_text(encoding="utf-8").splitlines()
    bad = json.loads(rows[0])
    bad["messages"][1]["content"] = ""
    (tmp_path / name).write_text("\n".join([*rows[:5], json.dumps(bad), *rows[5:]]) + "\n", encoding="utf-8")
    inputs = [
        "--model",
        str(folder / "model"),
        "--dataset",
        str(tmp_path / name),
        "--strict",
        "false",
        "--eval_steps",
        "7",
        "--val_dataset",
        str(folder / name),
        "--dataset_cache_dir",
        str(tmp_path / "cache"),
    ]
    usual = USUAL | {"--max_steps": 7, "--save_steps": 4}
    words = [word for name, value in usual.items() if name not in layout for word in (name, value)]
    lines, streams = {}, ("--streaming", "true")
    resumed = (*streams, "--resume_from_checkpoint", tmp_path / "streamed/checkpoints/step-4")
    for run_name, options in (("stored", ()), ("streamed", streams), ("again", resumed)):
        run(inputs, tmp_path / run_name, *words, *layout, *options, task=task)
        lines[run_name] = figures(
            read_lines(tmp_path / run_name / "metrics.jsonl") + read_lines(tmp_path / run_name / "eval.jsonl")
        )
    assert lines["streamed"] == lines["stored"] and len(lines["stored"]) == 8
    assert lines["again"] == lines["streamed"][4:]


@pytest.mark.process
def test_the_reference_of_a_resumed_run_is_the_first_model(folder: Path, tmp_path: Path) -> None:
    whole = trained(folder, tmp_path / "whole", "dpo", "--tp", 2, "--save_steps", 2)
    resumed = trained(
        folder, tmp_path / "again", "dpo", "--tp", 2, "--resume_from_checkpoint", tmp_path / "whole/checkpoints/step-2"
    )
    assert figures(resumed) == figures(whole)[2:]
    assert whole[0]["loss"] == pytest.approx(0.6931472, abs=1e-6) and whole[0]["rewards/margins"] == 0


@pytest.mark.process
@SLOW
@pytest.mark.parametrize("engine", [("--tp", 2), ("--engine", "ddp", "--per_device_train_batch_size", 2)])
def test_a_reference_that_moves_goes_on_where_it_was(engine: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    """Sources in bfloat16 and training in float32: what has moved would not survive the source's dtype."""
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(half)
    engine = (*engine, "--model", half, "--torch_dtype", "float32")
    moves = (*engine, "--sync_ref_model", "true", "--ref_model_sync_steps", 1, "--ref_model_mixup_alpha", 0.5)
    whole = trained(folder, tmp_path / "whole", "dpo", *moves, "--save_steps", 2)
    still = trained(folder, tmp_path / "still", "dpo", *engine)
    again = trained(
        folder, tmp_path / "again", "dpo", *moves, "--resume_from_checkpoint", tmp_path / "whole/checkpoints/step-2"
    )
    assert figures(whole)[:1] == figures(still)[:1] and figures(whole)[1] != figures(still)[1]
    assert figures(again) == figures(whole)[2:]


@pytest.mark.process
@SLOW
def test_the_reference_of_new_adapters_is_the_model_without_them(folder: Path, tmp_path: Path) -> None:
    lora = ("--train_type", "lora", "--lora_rank", 4)
    native = trained(folder, tmp_path / "native", "dpo", "--tp", 2, *lora)
    assert_close(native, trained(folder, tmp_path / "one", "dpo", *lora, ranks=1))
    other = trained(folder, tmp_path / "ddp", "dpo", "--engine", "ddp", *lora, ranks=1)
    for lines in (native, other):
        assert (
            lines[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)
            and lines[0]["rewards/margins"] == 0 != lines[1]["rewards/margins"]
        )


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [
        ("--tp", 2),
        pytest.param(("--engine", "ddp", "--per_device_train_batch_size", 2), marks=SLOW),
        pytest.param(("--engine", "zero3", "--per_device_train_batch_size", 2), marks=SLOW),
    ],
)
def test_a_reward_model_judges_in_transformers(layout: tuple[object, ...], folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    lines = trained(folder, tmp_path / "out", "rm", *layout, "--max_steps", 12)
    assert lines[-1]["accuracy"] >= lines[0]["accuracy"] and lines[-1]["loss"] < lines[0]["loss"]
    exported = tmp_path / "out" / "hf"
    model = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    row = json.loads((folder / "pairs.jsonl").read_text().splitlines()[0])
    asked, chosen = row["messages"]
    texts = [
        tokenizer.apply_chat_template([asked, {**chosen, "content": text}], tokenize=False)
        for text in (chosen["content"], row["rejected_response"])
    ]
    inputs = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        good, bad = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].tolist()
    assert good > bad and model.config.num_labels == 1


@pytest.mark.process
@SLOW
def test_a_reference_of_its_own(folder: Path, tmp_path: Path) -> None:
    """--ref_model: other weights than the model starts from, so that the first loss is not log 2; gone on from a
    checkpoint too."""
    trained(folder, tmp_path / "cpo", "cpo", ranks=1)
    reference = ("--ref_model", tmp_path / "cpo" / "hf")
    native = trained(folder, tmp_path / "native", "dpo", "--tp", 2, *reference, "--save_steps", 2)
    assert_close(native, trained(folder, tmp_path / "ddp", "dpo", "--engine", "ddp", *reference, ranks=1))
    assert abs(native[0]["loss"] - 0.6931472) > 1e-3
    saved = tmp_path / "native/checkpoints/step-2"
    again = trained(folder, tmp_path / "again", "dpo", "--tp", 2, *reference, "--resume_from_checkpoint", saved)
    assert figures(again) == figures(native)[2:]


@pytest.mark.process
@SLOW
def test_the_reference_of_adapters_that_go_on_is_how_they_were(folder: Path, tmp_path: Path) -> None:
    trained(folder, tmp_path / "first", "cpo", "--train_type", "lora", "--lora_rank", 4, ranks=1)
    on = ("--train_type", "lora", "--adapters", tmp_path / "first" / "adapter")
    native = trained(folder, tmp_path / "native", "dpo", "--tp", 2, *on)
    assert_close(native, trained(folder, tmp_path / "ddp", "dpo", "--engine", "ddp", *on, ranks=1))
    assert (
        native[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)
        and native[0]["rewards/margins"] == 0 != native[1]["rewards/margins"]
    )
