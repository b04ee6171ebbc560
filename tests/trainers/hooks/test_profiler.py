"""`--profile`: which steps are in the trace, and times by kind against the trace's own events."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaswift.run.report import page
from megaswift.trainers.hook import Hook, StepRecord
from megaswift.trainers.hooks.profiler import (
    OTHER,
    OUTSIDE,
    StepProfilerHook,
    kind_of_operation,
    operation_times,
    profile_summaries,
    time_by_kind,
)
from megaswift.trainers.loop import train
from megaswift.trainers.options.profiling import ProfileConfig
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run
from tests.trainers.tiny import tiny_loop

OPTIONS = ProfileConfig(profile=True)
MICROBATCHES = 2


def events(folder: Path) -> list[list[dict[str, Any]]]:
    """Operations of the CPU in each trace of rank 0."""
    traces = [json.loads(path.read_text())["traceEvents"] for path in sorted(folder.glob("rank-0-step-*.trace.json"))]
    return [[e for e in trace if e.get("cat") in ("cpu_op", "user_annotation")] for trace in traces]


def profiled(folder: Path, steps: int, **options: Any) -> StepProfilerHook:
    """The hook after a run of so many steps."""
    hook = StepProfilerHook(replace(OPTIONS, **options), folder)
    train(tiny_loop(steps, hook))
    return hook


@pytest.mark.parametrize(
    "steps, options, count",
    [(6, {}, 2), (3, {}, 1), (6, {"profile_step_start": 0, "profile_step_end": 3}, 3), (4, {"profile_step_end": 9}, 2)],
)
def test_the_trace_holds_these_steps(steps: int, options: dict[str, int], count: int, tmp_path: Path) -> None:
    """Counted by the optimizer's own marks, and by the products of two linear layers in each micro-batch."""
    profiled(tmp_path, steps, **options)
    first = options.get("profile_step_start", 2)
    assert {p.name for p in tmp_path.glob("*.trace.json")} == {
        f"rank-0-step-{first + n}.trace.json" for n in range(1, count + 1)
    }
    for trace in events(tmp_path):
        names = [e["name"] for e in trace]
        assert sum(name.startswith("Optimizer.step#") for name in names) == 1
        assert names.count("aten::addmm") == 2 * MICROBATCHES
    assert profile_summaries(tmp_path)[0]["steps"] == count
    (line,) = [x for x in (tmp_path / "rank-0.txt").read_text().splitlines() if x.endswith(" aten::addmm")]
    assert line.split()[2:5] == [f"{2 * MICROBATCHES:.1f}", "matrix", "products"]


def test_what_is_between_steps_is_left_out(tmp_path: Path) -> None:
    """Evaluations and checkpoints are other hooks' work after a step."""

    class Evaluation(Hook):
        def on_step(self, loop: Any, step: StepRecord) -> None:
            loop.engine.evaluate(loop.data.next(), loop.loss)

    train(tiny_loop(6, StepProfilerHook(OPTIONS, tmp_path), Evaluation()))
    assert [[e["name"] for e in trace].count("aten::addmm") for trace in events(tmp_path)] == [2 * MICROBATCHES] * 2


def test_steps_after_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the middle of the interval the rest is profiled; behind it nothing, and a warning says so."""
    for step, count in ((3, 1), (4, 0)):
        folder = tmp_path / str(step)
        loop = tiny_loop(6, StepProfilerHook(OPTIONS, folder))
        loop.step = step
        train(loop)
        assert [s["steps"] for s in profile_summaries(folder).values()] == [count] * bool(count)
    assert "no step was profiled; steps 3 to 4 were asked for, this run ended after step 6" in capsys.readouterr().err


def test_another_rank_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 says where the files are, as it alone prints."""
    profiled(tmp_path / "profile", 6, profile_ranks=(1,))
    assert not (tmp_path / "profile").exists()
    assert (
        capsys.readouterr().err == f"megaswift: --profile: traces and times of steps 3 to 4 in {tmp_path / 'profile'}\n"
    )


@pytest.mark.parametrize("steps, options, which", [(6, {}, "steps 3 to 4"), (3, {}, "step 3"), (2, {}, "")])
def test_the_folder_is_printed_once(
    steps: int, options: dict[str, int], which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled(tmp_path, steps, **options)
    lines = [line for line in capsys.readouterr().err.splitlines() if "traces and times" in line]
    assert lines == [f"megaswift: --profile: traces and times of {which} in {tmp_path}"] * bool(which)


def test_an_error_in_a_profiled_step_ends_the_profiler(tmp_path: Path) -> None:
    """The next run can profile again."""
    loop = tiny_loop(6, StepProfilerHook(OPTIONS, tmp_path / "first"))
    loop.learning_rate = lambda step, total: 1 / 0 if step == 3 else 0.1
    with pytest.raises(ZeroDivisionError):
        train(loop)
    assert profile_summaries(tmp_path / "first") == {}
    profiled(tmp_path / "second", 6)


@pytest.mark.process
def test_a_run_profiles_the_ranks_asked_for(tmp_path: Path) -> None:
    """By the options alone: a trace of each step, the table, and the section of report.html."""
    words = [*write_inputs(tmp_path), "--max_steps", "4", "--report_to", "none", "--save_strategy", "no"]
    asked = ("--profile", "true", "--profile_step_start", 1, "--profile_step_end", 3, "--profile_ranks", 1)
    run(words, tmp_path / "out", *asked, ranks=2)
    names = {path.name for path in (tmp_path / "out" / "profile").iterdir()}
    assert names == {"rank-1.json", "rank-1.txt", "rank-1-step-2.trace.json", "rank-1-step-3.trace.json"}
    html = (tmp_path / "out" / "report.html").read_text()
    assert "rank 1: " in html and "matrix products" in html


def own_times(trace: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of each operation without those inside it, from the begins and ends in the trace."""
    sums: dict[str, float] = defaultdict(float)
    for thread in {e["tid"] for e in trace}:
        stack: list[tuple[float, str]] = []
        for event in sorted((e for e in trace if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            if stack:
                sums[stack[-1][1]] -= event["dur"] / 1000
            sums[event["name"]] += event["dur"] / 1000
            stack.append((event["ts"] + event["dur"], event["name"]))
    return sums


def test_times_are_those_of_the_trace(tmp_path: Path) -> None:
    profiled(tmp_path, 6)
    summary = profile_summaries(tmp_path)[0]
    kinds = dict(summary["by_kind_ms_per_step"])
    assert sum(kinds.values()) == pytest.approx(summary["ms_per_step"])
    outside = kinds.pop(OUTSIDE)
    assert outside > 0 and list(kinds.values()) == sorted(kinds.values(), reverse=True)
    want: dict[str, float] = defaultdict(float)
    for trace in events(tmp_path):
        for name, ms in own_times(trace).items():
            want[kind_of_operation(name)] += ms / 2
    assert kinds == pytest.approx(want, rel=0.02, abs=0.02)


@pytest.mark.parametrize(
    "kind, names",
    [
        (
            "communication",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)|c10d::allreduce_|gloo:all_gather|_ReduceScatterToSequenceParallel",
        ),
        (
            "attention",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16|void flash_fwd_kernel<T>|FusedAttnFunc"
            "|aten::_scaled_dot_product_flash_attention_for_cpu",
        ),
        (
            "matrix products",
            "nvjet_tst_128x256_64x4|sm90_xmma_gemm_bf16bf16_bf16f32|void cutlass::Kernel2<cutlass_80>|aten::mm"
            "|aten::addmm|aten::bmm|aten::linear|aten::_grouped_mm|aten::_scaled_mm",
        ),
        (
            "optimizer",
            "aten::_fused_adamw_|aten::_foreach_mul_|_adam_update_kernel|void multi_tensor_apply_kernel<T>"
            "|Optimizer.step#AdamW.step",
        ),
        (
            "softmax, norms and activations",
            "aten::_softmax|aten::silu_backward|void rmsnorm_fwd_kernel<T>|_logit_gradient_kernel",
        ),
        ("copies", "Memcpy HtoD (Pinned -> Device)|aten::copy_|aten::clone|aten::cat|aten::index_select"),
        (
            OTHER,
            "aten::add|void at::native::vectorized_elementwise_kernel<4, T>|aten::embedding|aten::sum|aten::comment",
        ),
    ],
)
def test_kinds_of_operations(kind: str, names: str) -> None:
    for name in names.split("|"):
        assert kind_of_operation(name) == kind, name


def test_overlapping_streams_leave_no_negative_rest() -> None:
    """By hand: 3 + 2 ms of kernels in 4 ms."""
    assert time_by_kind([("nvjet_a", 3.0), ("ncclDevKernel", 2.0)], 4.0) == {
        "matrix products": 3.0,
        "communication": 2.0,
        OUTSIDE: 0.0,
    }


def test_on_a_gpu_kernels_count_alone() -> None:
    """Of averages as the profiler makes them under CUDA: an operation of the CPU and the kernel that it starts."""
    from types import SimpleNamespace

    from torch.autograd import DeviceType

    averages = [
        SimpleNamespace(
            key="aten::mm", device_type=DeviceType.CPU, self_cpu_time_total=900, self_device_time_total=2000, count=3
        ),
        SimpleNamespace(
            key="nvjet_a", device_type=DeviceType.CUDA, self_cpu_time_total=0, self_device_time_total=2000, count=3
        ),
    ]
    assert operation_times(averages, True) == [("nvjet_a", 2.0, 3)]
    assert operation_times(averages, False) == [("aten::mm", 0.9, 3), ("nvjet_a", 0.0, 3)]


def test_the_report_shows_each_profiled_rank(tmp_path: Path) -> None:
    assert page.profile_html(tmp_path) == ""
    for rank in (0, 12, 3):
        summary = {
            "steps": 1 if rank == 3 else 2,
            "ms_per_step": 4.25,
            "by_kind_ms_per_step": {"attention": 3.0, OUTSIDE: 1.25},
        }
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(summary))
    (tmp_path / "rank-0-step-3.trace.json").write_text("not a summary")
    html = page.profile_html(tmp_path)
    assert (
        html.index("rank 0: 4.2 ms a step, 2 steps")
        < html.index("rank 3: 4.2 ms a step, 1 step<")
        < html.index("rank 12:")
    )
    assert "attention" in html and "3.00 ms" in html
