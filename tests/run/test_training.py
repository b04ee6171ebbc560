"""Whole runs on the native engine, as users start them: two processes, killed, resumed, refused, exported.

Covers: megaswift/run/engines.py, megaswift/run/course.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.trainers.checkpoints import CheckpointStore
from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_conversations, write_inputs
from tests.trainers.runs import by_torchrun, finish, killed, run, start

CLOCK = {
    "step_time",
    "data_wait",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "memory_gib",
    "rank_step_time_median",
    "rank_step_time_max",
    "rank_step_time_slowest",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*write_inputs(tmp_path_factory.mktemp("inputs"), "1e-3"), "--tp", "2"]


def values(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in read_lines(out / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, by_torchrun(
        inputs, out, "--max_steps", 8, "--save_steps", 4, "--split_dataset_ratio", 0.1, "--eval_steps", 4
    )


@pytest.mark.process
def test_a_run_leaves_the_whole_output_directory(whole: tuple[Path, str]) -> None:
    out, text = whole
    assert {p.name for p in out.iterdir()} == {
        "run.lock",
        "run_id",
        "stacks",
        "config.yaml",
        "metrics.jsonl",
        "eval.jsonl",
        "checkpoints",
        "hf",
        "loss.png",
        "report.html",
        "runs",
        "train.log",
    }
    lines_of_log = (out / "train.log").read_text()
    for told in (
        "supervised fine-tuning",
        "step 8/8  loss ",
        "step 8: evaluation loss ",
        "finished at step 8; report",
        "next:\n",
    ):
        assert lines_of_log.count(told) == 1 and told in text
    lines = values(out)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["step"] for line in read_lines(out / "eval.jsonl")] == [4, 8]
    assert CheckpointStore(out / "checkpoints").latest() == out / "checkpoints" / "step-8"
    # one screen, not one a rank
    assert "TP2 SP DP1 on 2 processes" in text and text.count("megaswift: supervised fine-tuning: ") == 1
    assert "UserWarning" not in text and "FutureWarning" not in text


@pytest.mark.process
def test_the_export_answers_in_transformers_with_the_loss_that_was_measured(
    whole: tuple[Path, str], inputs: list[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, _ = whole
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out / "hf"), AutoTokenizer.from_pretrained(out / "hf")
    total = count = 0.0
    held = held_out(inputs, out)
    for messages in held:
        ids = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = torch.tensor([ids["input_ids"]]), torch.tensor(ids["assistant_masks"])
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        picked = -logprobs[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
        total, count = total + float(picked[mask[1:] == 1].sum()), count + int(mask[1:].sum())
    last = read_lines(out / "eval.jsonl")[-1]
    assert count == last["label_tokens"]
    assert total / count == pytest.approx(last["loss"], rel=1e-5)


def held_out(inputs: list[str], out: Path) -> list[list[dict[str, str]]]:
    """The conversations that the run held out: asked of the data layer, whose own tests cover the split."""
    from transformers import AutoTokenizer

    from megaswift.config import load_config
    from megaswift.data.build import load_document_splits

    cfg = load_config("sft", [str(out / "config.yaml")])
    tokenizer = AutoTokenizer.from_pretrained(inputs[1])
    _, held = load_document_splits(cfg.data, cfg.train, tokenizer)
    assert held is not None
    rows = [json.loads(line)["messages"] for line in Path(inputs[3]).read_text().splitlines()]
    return [rows[int(i)] for i in held.sample]


@pytest.mark.process
@pytest.mark.slow
def test_every_layout_is_evaluated_on_the_same_rows(inputs: list[str], tmp_path: Path) -> None:
    """11 rows, of which two global batches of 4 are asked for: one rank takes 2 x 4, two ranks 2 x (2 x 2)."""
    alone = inputs[: inputs.index("--per_device_train_batch_size")]
    write_conversations(tmp_path / "val.jsonl", rows=11, seed=1)
    options = (
        "--val_dataset",
        tmp_path / "val.jsonl",
        "--global_batch_size",
        4,
        "--max_steps",
        1,
        "--eval_iters",
        2,
        "--export_hf",
        "false",
        "--report_to",
        "none",
    )
    run(alone, tmp_path / "one", *options, "--per_device_train_batch_size", 4, ranks=1)
    run(alone, tmp_path / "dp", *options, "--per_device_train_batch_size", 2)
    [one], [dp] = (read_lines(tmp_path / name / "eval.jsonl") for name in ("one", "dp"))
    rows = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()[:8]]
    assert one["label_tokens"] == dp["label_tokens"] == sum(len(r["messages"][1]["content"]) + 1 for r in rows)
    assert one["tokens"] == dp["tokens"]
    assert dp["loss"] == pytest.approx(one["loss"], rel=1e-6)


@pytest.mark.process
def test_killed_and_started_again_a_run_is_the_uninterrupted_one(inputs: list[str], tmp_path: Path) -> None:
    out, options = (
        tmp_path / "out",
        ("--max_steps", 400, "--save_steps", 5, "--save_total_limit", 2, "--resume_from_checkpoint", "latest"),
    )
    pointer = out / "checkpoints" / "latest.json"
    told = killed(
        inputs,
        out,
        *options,  # the very command of the second start: without a checkpoint it begins at the beginning
        when=lambda: pointer.exists() and len(read_lines(out / "metrics.jsonl")) > 6,
    )
    assert "exit status -9" in told and "no checkpoint yet: starting from the beginning" in told
    saved = json.loads(pointer.read_text())["step"]
    steps = saved + 7
    kept = values(out)[:saved]
    text = run(inputs, out, *options[2:], "--max_steps", steps)
    assert f"resuming from {out / 'checkpoints' / f'step-{saved}'}" in text and "max_steps 400 -> " in text
    assert "; the learning rate follows the new length" in text
    lines = values(out)
    assert [line["step"] for line in lines] == list(range(1, steps + 1)) and lines[:saved] == kept
    assert CheckpointStore(out / "checkpoints").latest() == out / "checkpoints" / f"step-{steps}"
    assert len(list((out / "checkpoints").glob("step-*"))) == 2


@pytest.mark.process
def test_a_resumed_run_continues_bit_for_bit(inputs: list[str], tmp_path: Path, whole: tuple[Path, str]) -> None:
    out = tmp_path / "out"
    options = ("--max_steps", 8, "--split_dataset_ratio", 0.1, "--eval_steps", 4)
    run(inputs, out, *options, "--resume_from_checkpoint", whole[0] / "checkpoints" / "step-4")
    assert values(out) == values(whole[0])[4:]
    assert (out / "hf" / "model.safetensors").read_bytes() == (whole[0] / "hf" / "model.safetensors").read_bytes()


@pytest.mark.process
def test_another_run_in_the_folder_is_refused_and_a_finished_one_only_exports(
    whole: tuple[Path, str], inputs: list[str]
) -> None:
    out, _ = whole
    before = (out / "metrics.jsonl").read_bytes()
    process = start(inputs, out, "--max_steps", 8)
    text = finish(process)
    assert process.returncode == 1 and text.count("contains another run") == 2 and "megaswift/trainers" not in text
    text = run(inputs, out, "--max_steps", 8, "--split_dataset_ratio", 0.1, "--resume_from_checkpoint", "latest")
    assert (
        "step 8 of 8 is already done" in text and f"exported {out / 'hf'}" in text and str(out / "report.html") in text
    )
    assert (out / "metrics.jsonl").read_bytes() == before


@pytest.mark.process
@pytest.mark.slow
def test_a_bad_row_of_a_stream_ends_the_run_with_its_state_saved(inputs: list[str], tmp_path: Path) -> None:
    data = Path(inputs[inputs.index("--dataset") + 1]).read_text(encoding="utf-8").splitlines()
    streamed = tmp_path / "stream.jsonl"
    streamed.write_text("\n".join([*data[:10], '{"messages": "oops"}', *data[11:]]), encoding="utf-8")
    cut = inputs.index("--dataset_cache_dir")
    options = [
        *inputs[:2],
        *inputs[cut + 2 :],
        "--dataset",
        str(streamed),
        "--streaming",
        "true",
        "--shuffle",
        "false",
        "--max_steps",
        "5",
    ]
    process = start(options, tmp_path / "out")
    text = finish(process)
    assert process.returncode != 0 and f"{streamed}:11" in text
    assert CheckpointStore(tmp_path / "out" / "checkpoints").latest() == tmp_path / "out" / "checkpoints" / "step-2"
    streamed.write_text("\n".join(data), encoding="utf-8")
    run(options, tmp_path / "out", "--resume_from_checkpoint", "latest")
    run(options, tmp_path / "straight")
    losses = [[line["loss"] for line in values(tmp_path / name)] for name in ("out", "straight")]
    assert losses[0] == losses[1] and len(losses[0]) == 5
