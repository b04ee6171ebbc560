"""Whole runs of distillation: resumed in the middle, evaluated on held-out rows, with probabilities on disk.

Covers: megaswift/run/distillation_task.py, megaswift/trainers/distillation/stored.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.trainers.distillation.on_policy import ROWS, STUDENT, writer_of_step
from megaswift.trainers.hooks.metrics import read_lines
from tests.parity.pool import RankError
from tests.rollout.sampling_server import Backend, Sglang, Vllm, serving
from tests.trainers.inputs import write_conversations, write_model
from tests.trainers.runs import run

pytestmark = pytest.mark.process
SLOW = pytest.mark.slow
SPREAD = ("--per_device_train_batch_size", 2, "--global_batch_size", 4)
SEED = 5
HELD_OUT = 7
"""Rows for evaluation, which no layout divides."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, a wider teacher/, and rows to train on and to evaluate on."""
    made = tmp_path_factory.mktemp("distillation")
    write_model(made / "model")
    write_model(made / "teacher", layers=3, hidden_size=48, intermediate_size=80, num_attention_heads=6, head_dim=8)
    write_conversations(made / "rows.jsonl")
    write_conversations(made / "others.jsonl", seed=5)
    write_conversations(made / "held-out.jsonl", rows=HELD_OUT, seed=9)
    return made


def distilled(folder: Path, out: Path, *options: object, ranks: int = 2) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    inputs = ["--model", str(folder / "model"), "--dataset_cache_dir", str(folder / "cache")]
    usual = {
        "--teacher_model": folder / "teacher",
        "--dataset": folder / "rows.jsonl",
        "--per_device_train_batch_size": 4,
        "--lr": "1e-2",
        "--report_to": "none",
        "--export_hf": "false",
        "--seed": SEED,
    }
    left_out = {"--teacher_model"} if "--without_teacher" in options else set()
    inputs += [str(w) for pair in usual.items() if pair[0] not in {*options} | left_out for w in pair]
    run(inputs, out, *(word for word in options if word != "--without_teacher"), ranks=ranks, task="gkd")
    return read_lines(out / "metrics.jsonl")


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param(layout, ranks, marks=SLOW)
        for layout, ranks in (
            (("--tp", 2), 2),
            ((*SPREAD, "--teacher_tp", 2), 2),
            (("--engine", "zero3", *SPREAD), 2),
        )
    ],
)
def test_a_resumed_run_has_the_undisturbed_curve(
    layout: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path
) -> None:
    """Before and after the restart steps of both kinds; the sampler draws from the whole distribution."""
    writers = [writer_of_step(SEED, step, 0.5, False) for step in range(6)]
    assert {*writers[:3]} == {*writers[3:]} == {ROWS, STUDENT}
    steps = ("--max_steps", 6, "--save_steps", 3, "--max_completion_length", 6, "--max_length", 64)
    whole = distilled(folder, tmp_path / "whole", *steps, *layout, ranks=ranks)
    saved = tmp_path / "whole/checkpoints/step-3"
    again = distilled(folder, tmp_path / "again", *steps, *layout, "--resume_from_checkpoint", saved, ranks=ranks)
    assert [line["on_policy"] for line in whole] == [float(writer == STUDENT) for writer in writers]
    names = ("step", "loss", "grad_norm", "tokens", "on_policy", "cross_entropy")
    assert [[line[n] for n in names] for line in again] == [[line[n] for n in names] for line in whole[3:]]


def held_out_divergence(folder: Path, beta: float, temperature: float) -> float:
    """TRL's divergence of the untrained model from the teacher over all labels of the held-out rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.gkd import GKDTrainer

    model, teacher = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("model", "teacher"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    total = 0.0
    count = 0
    for line in (folder / "held-out.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids = torch.tensor([found["input_ids"]])
        labeled = torch.tensor(found["assistant_masks"][1:]).bool()
        with torch.no_grad():
            own, theirs = (m(ids).logits[0, :-1][labeled].double() for m in (model, teacher))
        each = GKDTrainer.generalized_jsd_loss(own, theirs, beta=beta, temperature=temperature, reduction="none")
        total += float(each.sum())
        count += int(labeled.sum())
    return total / count


EVALUATED: list[Any] = [
    (SPREAD, 2),
    *(
        pytest.param(layout, ranks, marks=SLOW)
        for layout, ranks in (
            (("--tp", 2), 2),
            (("--pp", 2, "--teacher_pp", 1), 2),
            (("--engine", "ddp", *SPREAD), 2),
            ((), 1),
        )
    ),
]


@pytest.mark.parametrize(("layout", "ranks"), EVALUATED)
def test_evaluation_is_the_divergence_of_held_out_rows(
    layout: tuple[object, ...], ranks: int, folder: Path, tmp_path: Path
) -> None:
    """The held-out rows' own answers, although steps train on completions."""
    alike = ("--beta", 0.3, "--temperature", 0.8, "--lmbda", 1, "--max_completion_length", 6, "--max_length", 64)
    held_out = ("--val_dataset", folder / "held-out.jsonl", "--max_steps", 1, "--lr", "1e-30")
    distilled(folder, tmp_path / "out", *alike, *held_out, *layout, ranks=ranks)
    (line,) = read_lines(tmp_path / "out/eval.jsonl")
    assert line["loss"] == pytest.approx(held_out_divergence(folder, 0.3, 0.8), rel=1e-5) and line["loss"] > 1e-3


@SLOW
@pytest.mark.parametrize(("name", "kind"), [("vllm_server", Vllm), ("sglang", Sglang)])
@pytest.mark.parametrize("layout", [SPREAD, ("--tp", 2)], ids=["dp2", "tp2"])
def test_servers_write_the_completions_of_the_sampler_in_the_run(
    name: str, kind: type[Backend], layout: tuple[object, ...], folder: Path, tmp_path: Path
) -> None:
    """Stand-ins for the servers, which answer with the weights that each step sends them."""
    alike = ("--lmbda", 1, "--max_completion_length", 6, "--max_length", 64, "--max_steps", 3, *layout)
    wanted = distilled(folder, tmp_path / "transformers", *alike, "--rollout_batch_size", 1)
    with serving(kind(folder / "model")) as url:
        found = distilled(folder, tmp_path / name, *alike, "--rollout_backend", name, "--rollout_server_url", url)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert len({line["loss"] for line in wanted}) == 3


STORED = ("--lmbda", 0, "--gkd_logits_topk", 4, "--max_steps", 2)


@SLOW
def test_probabilities_of_other_rows_are_refused_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    """Rows of training, rows of evaluation that are not there, and a shorter maximum length."""
    stored = (*STORED, "--teacher_logits", tmp_path / "probabilities")
    distilled(folder, tmp_path / "out", *stored)
    for name, options, rule in (
        ("others", ("--dataset", folder / "others.jsonl"), "other rows of training: 48 rows, "),
        ("evaluated", ("--val_dataset", folder / "held-out.jsonl"), "no probabilities for --val_dataset"),
        ("short", ("--max_length", 9, "--truncation_strategy", "right"), "other rows of training"),
    ):
        with pytest.raises(RankError, match=rule):
            distilled(folder, tmp_path / name, *stored, *options, "--without_teacher")
        assert not (tmp_path / name / "metrics.jsonl").exists()


@SLOW
def test_a_resumed_run_reads_the_probabilities(folder: Path, tmp_path: Path) -> None:
    """The whole command again, with the teacher; then without it, evaluated from disk."""
    held_out = ("--val_dataset", folder / "held-out.jsonl", "--save_steps", 1)
    stored = (*STORED, *held_out, "--teacher_logits", tmp_path / "probabilities")
    whole = distilled(folder, tmp_path / "whole", *stored)
    saved = ("--resume_from_checkpoint", tmp_path / "whole/checkpoints/step-1")
    for name, options in (("again", ()), ("alone", ("--without_teacher",))):
        (line,) = distilled(folder, tmp_path / name, *stored, *options, *saved)
        assert (line["loss"], line["grad_norm"]) == (whole[1]["loss"], whole[1]["grad_norm"])
        ends = [read_lines(tmp_path / run_name / "eval.jsonl")[-1]["loss"] for run_name in ("whole", name)]
        assert ends[0] == ends[1] and math.isfinite(ends[0])
