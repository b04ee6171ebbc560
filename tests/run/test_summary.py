"""The first screen, word by word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megaswift.base.byte_size import bytes_text
from megaswift.config import SwiftConfig
from megaswift.data.stream.batches import StreamBatchSource, StreamRowCountsAndWarnings
from megaswift.data.stream.cursor import Cursor
from megaswift.engine.protocol import EngineSizeReport
from megaswift.errors import Problem
from megaswift.parallel.grid import rank_grid_text
from megaswift.parallel.layout import Layout
from megaswift.run.course import tell_streamed_rows
from megaswift.run.summary import (
    SummaryFacts,
    data_text,
    engine_suffix,
    expert_capacity_text,
    optimizer_text,
    output_text,
    render_summary,
    summary_rows,
)

GOLDEN = """\
supervised fine-tuning
  model       qwen3, 4 layers x 64: DIR
  parameters  1,234,567 in total, 345,678 on the largest rank
  memory      weights 1.3 MiB + gradients 1.3 MiB + optimizer 2.6 MiB = 5.3 MiB on the largest rank, \
activations not counted
  layout      TP2 SP PP2 DP1 on 4 processes
                       stage 0     stage 1
              layers   embed+0-1   2-3+head
              dp 0     ranks 0-1   ranks 2-3
  kernels     torch (no CUDA device), float32
  data        1,000 rows, 3,000 documents, 120,000 tokens, 40,000 label tokens, fill 99.2%
  batch       2 per device x 4 accumulation x 1 data-parallel = 8 rows a step, at most 8,192 tokens
  steps       250 = 2 epochs of 1,000 rows, resuming after step 100
  optimizer   adam, learning rate 0.0001 cosine to 1e-06, 25 warm-up steps, weight decay 0.1, gradients clipped to 1
  output      out (metrics every 10, evaluation every 50, checkpoint every 100 steps, the last 2 kept)"""


def test_the_screen() -> None:
    cfg = SwiftConfig(
        task="sft",
        model="DIR",
        dataset="d.jsonl",
        val_dataset="v.jsonl",
        tp=2,
        pp=2,
        per_device_train_batch_size=2,
        gbs=8,
        max_length=1024,
        lr=1e-4,
        min_lr=1e-6,
        warmup_ratio=0.1,
        logging_steps=10,
        eval_steps=50,
        save_steps=100,
        save_total_limit=2,
        output_dir="out",
    )
    layout = Layout(4, tp=2, pp=2, sequence_parallel=True)
    stats = {
        "rows": 1000.0,
        "documents": 3000.0,
        "tokens": 120000.0,
        "label_tokens": 40000.0,
        "global_batch": 8.0,
        "deleted": 0.0,
        "fill": 0.9921,
    }
    sizes = EngineSizeReport(1234567, 345678, 1382712, 1382712, 2765424, 1)
    facts = SummaryFacts(
        "supervised fine-tuning",
        "qwen3, 4 layers x 64: DIR",
        sizes,
        f"{layout.describe()} on 4 processes",
        rank_grid_text(layout, 4),
        "torch (no CUDA device), float32",
        data_text(stats),
        layout.dp,
        4,
        250,
        1000,
        100,
    )
    assert render_summary(facts.title, summary_rows(cfg, facts)) == GOLDEN


def test_host_memory_is_told_apart() -> None:
    layout = Layout(1)
    facts = SummaryFacts(
        "t",
        "m",
        EngineSizeReport(100, 100, 2**20, 2**20, 2**19, 1, host_bytes=3 * 2**20),
        "l",
        "",
        "k",
        "d",
        layout.dp,
        1,
        5,
        10,
    )
    assert dict(summary_rows(SwiftConfig(task="sft"), facts))["memory"] == (
        "weights 1.0 MiB + gradients 1.0 MiB + optimizer 512.0 KiB = 2.5 MiB on the largest rank, activations not "
        "counted; 3.0 MiB of optimizer state in host memory"
    )


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({}, ""),
        ({"engine": "ddp"}, ", ddp"),
        ({"engine": "zero3_offload"}, ", zero3_offload"),
        ({"engine": "fsdp2", "fsdp": "hybrid_shard offload"}, ", fsdp2 (hybrid_shard offload)"),
    ],
)
def test_the_engine_is_named(engine: dict[str, str], text: str) -> None:
    assert engine_suffix(SwiftConfig(**engine)) == text


def test_one_is_said_in_the_singular() -> None:
    data = data_text({"rows": 1.0, "documents": 3.0, "tokens": 9.0}, 1)
    facts = SummaryFacts("t", "m", EngineSizeReport(1, 1, 1, 1, 1, 1), "l", "", "k", data, 1, 1, 1, 1)
    said = dict(summary_rows(SwiftConfig(task="sft", max_length=8), facts))
    assert said["data"] == "1 row, 3 documents, 9 tokens; 1 row for evaluation"
    assert said["steps"] == "1 = 1 epoch of 1 row" and "= 1 row a step" in said["batch"]
    assert data_text({"rows": 2.0, "tokens": 9.0, "longest": 5.0}) == "2 rows, 9 tokens, 5 in the longest"


def test_a_reward_model_learns_of_answers_not_of_tokens() -> None:
    stats = {"rows": 428.0, "documents": 856.0, "tokens": 9000.0, "label_tokens": 1712.0, "pairs": 428.0}
    assert data_text(stats) == "856 documents, 9,000 tokens, 1,712 label tokens, 428 pairs"
    assert data_text(stats, scored=True) == "856 documents, 9,000 tokens, 428 pairs"


def optimizer(steps: int, **options: Any) -> str:
    cfg = SwiftConfig(**options)
    return optimizer_text(cfg.optim, cfg.schedule, steps)


def test_warm_up_is_the_schedule_s_own() -> None:
    assert ", 2 warm-up steps," in optimizer(14, warmup_ratio=0.1)
    assert ", 3 warm-up steps," in optimizer(14, warmup_steps=3)


def test_the_course_of_the_learning_rate_is_told_as_it_is() -> None:
    for options, text in (
        ({}, "cosine to 0,"),
        ({"lr_scheduler_type": "constant"}, "constant,"),
        ({"lr_scheduler_type": "inverse_sqrt"}, "inverse_sqrt,"),
        ({"lr_scheduler_type": "inverse_sqrt", "min_lr": 1e-6}, "inverse_sqrt, at least 1e-06,"),
    ):
        assert f"learning rate 1e-05 {text} weight decay" in optimizer(10, **options)


def test_bytes() -> None:
    texts = [bytes_text(n) for n in (0, 1023, 1024, 1536, 3 * 2**30, 5 * 2**40)]
    assert texts == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "3.0 GiB", "5.00 TiB"]


def test_a_deterministic_run_says_so() -> None:
    facts = SummaryFacts("t", "m", EngineSizeReport(1, 1, 1, 1, 1, 1), "DP1", "", "torch, float32", "d", 1, 1, 1, None)
    for wanted, text in ((True, "torch, float32, deterministic"), (False, "torch, float32")):
        cfg = SwiftConfig(task="sft", model="m", dataset="d.jsonl", deterministic=wanted)
        assert dict(summary_rows(cfg, facts))["kernels"] == text


def test_a_stream_ends_with_the_counts_of_what_was_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    source = object.__new__(StreamBatchSource)
    tally = StreamRowCountsAndWarnings(quiet=True)
    source.sources, source._after = [SimpleNamespace(name="d.jsonl")], Cursor(rows=1234)
    source.contents = SimpleNamespace(tally=tally)
    rows: list[tuple[str, str]] = []
    tell_streamed_rows(source, rows)
    tell_streamed_rows(object(), rows)
    assert capsys.readouterr().err == "" and rows == [], "nothing was left out"
    for _ in range(3):
        tally.malformed(Problem("d.jsonl:7", "is not JSON"))
    tally.long("deleted", 8, 100)
    tally.note(["empty_answers"])
    tell_streamed_rows(source, rows)
    text = (
        "of 1,234 rows read: 3 malformed and skipped, 1 deleted (longer than --max_length), 1 with an empty completion"
    )
    assert f"d.jsonl: {text}" in capsys.readouterr().err and rows == [("rows", text)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
            "evaluation every epoch, checkpoint every epoch, the best exported",
        ),
        (
            {"eval_steps": 5, "save_strategy": "best", "save_total_limit": 2},
            "evaluation every 5, checkpoint at each best evaluation, the last 2 kept",
        ),
        (
            {"save_steps": 0.25, "eval_steps": 0.1, "logging_steps": 0.0005},
            "every 1, evaluation every 100, checkpoint every 250",
        ),
        ({"save_strategy": "no"}, "metrics every 1, checkpoint only if interrupted"),
    ],
)
def test_what_is_written_when(options: dict[str, object], text: str) -> None:
    assert text in output_text(SwiftConfig(val_dataset="v", **options), 1000)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, ""),
        (
            {"moe_expert_capacity_factor": 1.25},
            "at most 1.25 x an equal share of a micro-batch's tokens each; further tokens skip the expert",
        ),
        (
            {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
            "at most 2 x an equal share of a micro-batch's tokens each, inputs padded to that; further tokens skip the "
            "expert",
        ),
    ],
)
def test_experts_that_drop_tokens_are_on_the_screen(options: dict[str, object], text: str) -> None:
    assert expert_capacity_text(SwiftConfig(**options).model) == text
