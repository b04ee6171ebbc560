"""One case of `bench_gpu.py` in a process of its own: prints its result as one line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_benchmark.cases import BenchmarkCase, document_lengths
from gpu_benchmark.contenders import Contender, NotRun, build_contender, micro_batches
from megaswift.engine.flops import peak_tflops
from megaswift.losses.contract import Batch

MATMUL = 8192
"""Side of the square product whose rate is measured in every process: clocks and temperature differ between them."""


def seconds_of(work: Callable[[], object]) -> float:
    """By CUDA events where there is a device."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    work()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def matmul_tflops(small: bool) -> float:
    """Rate of a square bf16 product on random data: median of ten after three to warm up."""
    side, device = (256, "cpu") if small or not torch.cuda.is_available() else (MATMUL, "cuda")
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    times = [seconds_of(lambda: a @ b) for _ in range(13)][3:]
    return 2 * side**3 / statistics.median(times) / 1e12


@contextmanager
def counted_synchronizations(active: bool) -> Iterator[list[str]]:
    """Places where the host waits for the device, as PyTorch warns of them."""
    places: list[str] = []
    if not (active and torch.cuda.is_available()):
        yield places
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
            places += [f"{w.filename}:{w.lineno}" for w in caught if "synchron" in str(w.message)]


def measure(case: BenchmarkCase, contender: Contender, options: dict[str, Any]) -> dict[str, Any]:
    """Times, rates and memory."""
    small, count = options["small"], options["microbatches"]

    def batches_of(seed: int) -> list[Batch]:
        return contender.prepare(micro_batches(case, small, count, seed))

    for k in range(options["warmup"]):
        contender.step(batches_of(k))
    losses: list[float] = []
    times = []
    for k in range(options["warmup"], options["warmup"] + options["steps"]):
        batches = batches_of(k)
        times.append(seconds_of(lambda batches=batches: losses.append(contender.step(batches))))  # type: ignore[misc]
    prepared = batches_of(0)
    with counted_synchronizations(options["synchronizations"]) as places:
        contender.step(prepared)
    profiled = profile_of(lambda: contender.step(batches_of(0))) if options["profile"] else {}
    median = statistics.median(times)
    steps = range(options["warmup"], options["warmup"] + options["steps"])
    rates = [_tflop(case, contender, small, count, k) / seconds for k, seconds in zip(steps, times, strict=True)]
    return {
        "tokens_per_s": sum(document_lengths(case, small, 0)) * count / median,
        "tflops": statistics.median(rates),
        "step_s": {"median": median, "best": min(times), "worst": max(times)},
        "losses": [losses[0], losses[-1]],
        "settings": contender.settings,
        "memory_gib": _peak_gib(),
        "synchronizations": sorted(set(places)) if options["synchronizations"] else None,
        **profiled,
    }


def profile_of(step: Callable[[], object]) -> dict[str, dict[str, float]]:
    """One step under torch.profiler: how much is launched (kernels, or operations of a CPU), and the share of the time
    in which the device computes."""
    cuda = torch.cuda.is_available()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if cuda else [])]) as profiler:
        seconds = seconds_of(step)
    rows = profiler.key_averages()
    if not cuda:
        return {"profile": {"launched": sum(row.count for row in rows), "seconds": seconds}}
    kernels = [row for row in rows if row.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(row.self_device_time_total for row in kernels) / 1e6
    launched = sum(row.count for row in kernels)
    return {"profile": {"launched": launched, "seconds": seconds, "device_share": busy / seconds}}


def _tflop(case: BenchmarkCase, contender: Contender, small: bool, count: int, seed: int) -> float:
    """Of the step with this seed."""
    lengths = [n for k in range(count) for n in document_lengths(case, small, seed * count + k)]
    return contender.flops.step(sum(lengths), sum(n * n for n in lengths)) / 1e12


def _peak_gib() -> dict[str, float] | None:
    if not torch.cuda.is_available():
        return None
    return {
        "allocated": torch.cuda.max_memory_allocated() / 2**30,
        "reserved": torch.cuda.max_memory_reserved() / 2**30,
    }


def run_case(case: BenchmarkCase, options: dict[str, Any]) -> dict[str, Any]:
    """The result, or why there is none."""
    result: dict[str, Any] = {"matmul_tflops": matmul_tflops(options["small"])}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            contender = build_contender(case, Path(scratch), options["small"], options["microbatches"])
            result |= {"status": "ok", **measure(case, contender, options)}
        except NotRun as reason:
            return result | {"status": "not run", "reason": str(reason)}
        except torch.OutOfMemoryError as error:
            return result | {"status": "out of memory", "reason": str(error).splitlines()[0], "memory_gib": _peak_gib()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = peak_tflops(device, "bfloat16")
    return result | {"device": device, "mfu": result["tflops"] / peak if peak else None}


def main(case: BenchmarkCase, options: dict[str, Any]) -> None:
    """The result on the last line of standard output."""
    print("\n" + json.dumps(run_case(case, options)), flush=True)
    sys.stderr.flush()
