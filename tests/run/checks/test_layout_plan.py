"""`--layout auto` of a training command, and forecasts: the choice, the words for other processes, and refusals.

Covers: megaswift/run/checks/layout_plan.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaswift.cli import main
from megaswift.config import SwiftConfig, load_config
from megaswift.errors import ConfigError
from megaswift.models.published.sizes import MODELS
from megaswift.parallel.hardware import planned_gpu
from megaswift.planner.machine import Machine
from megaswift.planner.search import AXES
from megaswift.planner.settings import RECOMPUTE
from megaswift.run.checks.layout_plan import forecast_text, global_batch_rows, plan_run, resolve_layout
from tests.planner.questions import H100, run_of, spec_of

AUTO: dict[str, Any] = {"layout": "auto", "planned_gpu": "h100", "global_batch_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODELS["llama-3.1-70b"][0]))
    return tmp_path / "model"


@pytest.mark.wide
def test_a_run_takes_the_choice_and_repeats_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """70 B on 64 GPUs needs model parallelism. The words give the same run in another process, which looks at no
    GPU."""
    words = ["--model", str(folder), "--dataset", "d", "--max_length", "4096"]
    for name, value in AUTO.items():
        words += [f"--{name}", str(value)]
    cfg, more = resolve_layout(load_config("sft", words, environ={}), 64, 8, tell=True)
    assert "layout auto: " in capsys.readouterr().err
    p = cfg.parallel
    assert p.tensor_parallel_size * p.pipeline_parallel_size > 2 and p.layout == "given"
    assert cfg.engine.engine == "megatron" and cfg.model.torch_dtype == "bfloat16"
    again, none = resolve_layout(load_config("sft", [*words, *more], environ={}), 64, 8, tell=True)
    assert none == [] and capsys.readouterr().err == ""
    for name in (*AXES.values(), "per_device_train_batch_size", "gradient_accumulation_steps", "recompute_granularity"):
        assert again.value(name) == cfg.value(name)
    assert again.parallel.pipeline_layout == cfg.parallel.pipeline_layout
    assert global_batch_rows(cfg, 64) == (64, True)


def test_without_auto_nothing_changes() -> None:
    cfg = run_of("qwen3-8b")
    assert resolve_layout(cfg, 8, 8, tell=True) == (cfg, [])


def test_a_machine_without_gpu_needs_a_name(folder: Path) -> None:
    cfg = SwiftConfig(task="sft", model=str(folder), layout="auto", global_batch_size=64)
    with pytest.raises(ConfigError, match="there is no CUDA device to choose a layout for") as error:
        resolve_layout(cfg, 8, 8, tell=True)
    assert error.value.problems[0].fix == "--planned_gpu h100"
    with pytest.raises(ConfigError, match="--planned_gpu h101: is not in the table") as error:
        resolve_layout(cfg.replace(planned_gpu="h101"), 8, 8, tell=True)
    assert error.value.problems[0].fix == "did you mean h100?"


def test_what_cannot_fit_is_refused_before_anything_starts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """70 B on two GPUs: by the command, with exit code 2."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": []}\n')
    words = ["sft", "--model", str(folder), "--dataset", str(rows), "--output_dir", str(tmp_path / "out")]
    words += ["--layout", "auto", "--planned_gpu", "h100", "--global_batch_size", "64", "--nproc_per_node", "2"]
    with pytest.raises(SystemExit, match="2"):
        main(words)
    text = capsys.readouterr().err
    assert "2 x h100: nothing fits 74.8 GiB usable of a GPU" in text and "weights" in text
    assert not (tmp_path / "out").exists()


def test_weights_in_fp8_keep_their_own_main_weights() -> None:
    """Neither a plan nor `--fit` chooses the precision-aware optimizer, with which a run refuses them."""
    spec = spec_of("qwen3-8b")
    cfg = run_of("qwen3-8b", fp8_format="hybrid", fp8_param_gather=True)
    rows = plan_run(cfg, spec, H100, 8, 30).rows
    assert rows and not any("precision_aware_optimizer" in row.settings for row in rows)
    text = forecast_text(cfg.replace(fit=True), spec, H100, 8)
    assert text.endswith("--recompute_granularity selective --recompute_modules mlp")


@pytest.mark.wide
def test_forecasts() -> None:
    """Of the layout as it is; of --fit with what it would choose."""
    spec = spec_of("qwen3-8b")
    text = forecast_text(run_of("qwen3-8b", tp=2, global_batch_size=16), spec, H100, 8)
    assert text.startswith("TP2 SP DP4, 4 micro-batches of 1: 45.2 GiB of 74.8 GiB usable; by roofline")
    with pytest.raises(ConfigError, match="nothing fits 74.8 GiB usable"):
        forecast_text(run_of("qwen3-8b", recompute_granularity="none"), spec, H100, 8)
    with pytest.raises(ConfigError) as error:
        forecast_text(run_of("qwen3-8b"), spec, H100, 8)
    chosen = forecast_text(run_of("qwen3-8b", fit=True), spec, H100, 8)
    settings = "--precision_aware_optimizer true --exp_avg_dtype bf16"
    assert chosen.startswith("DP8, ") and chosen.endswith(f"%, with {settings}")
    fix = error.value.problems[0].fix
    assert fix and fix.startswith(f"--fit true, which would choose {settings}; or more GPUs")
    a100 = Machine(planned_gpu("a100"), 8)
    with pytest.raises(ConfigError, match="a100 has no FP8"):
        forecast_text(run_of("qwen3-8b", fp8_format="hybrid"), spec, a100, 8)
    assert forecast_text(run_of("qwen3-8b", engine="fsdp2"), spec, H100, 8).startswith("fsdp2 DP8, ")
    pairs = run_of("qwen3-8b", task="dpo", tp=2, global_batch_size=16)
    assert forecast_text(pairs, spec, H100, 8).startswith("TP2 SP DP4, 4 micro-batches of 1: 62.9 GiB of 74.8 GiB")
    policy = run_of("qwen3-8b", task="grpo", reward_funcs=("length",), rollout_backend="vllm", tp=2, pp=2)
    assert "GiB of 74.8 GiB usable" in forecast_text(policy, spec, H100, 16)
    for ahead in ({"max_staleness": 3}, {"async_generation": True}):
        text = forecast_text(policy.replace(**ahead), spec, H100, 16)
        assert "plans are for generation and training in turn" in text and "--" + next(iter(ahead)) in text
    student = run_of("qwen3-8b", task="gkd", teacher_model="t")
    assert forecast_text(student, spec, H100, 8).startswith("none (--task gkd: is not a task that plans cover)")
    uncovered = run_of("qwen3-8b", attn_impl="unfused")
    assert "does not cover --attn_impl unfused" in forecast_text(uncovered, spec, H100, 8)
    graphs = run_of("qwen3-8b", cuda_graph_impl="local", packing=False)
    found = plan_run(graphs, spec, Machine(planned_gpu("h100"), 8), 16).rows
    assert all(row.layout.cp == 1 and not {*RECOMPUTE} & {*row.settings} for row in found)
    experts = run_of("qwen3-30b-a3b", cuda_graph_impl="local", packing=False)
    assert "experts: the host reads" in forecast_text(experts, spec_of("qwen3-30b-a3b"), H100, 8)
    hybrid = spec_of("qwen3-next-80b-a3b")
    cfg = run_of("qwen3-next-80b-a3b", train_type="lora", ep=8, recompute_granularity="full")
    assert "GiB usable" in forecast_text(cfg, hybrid, H100, 8)
