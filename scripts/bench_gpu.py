"""Measures training throughput (tokens/s, TFLOP/s, MFU) and peak memory on one GPU, compared with a plain transformers
loop and with bare matrix multiplications.

    python scripts/bench_gpu.py --list                            # list the cases in running order
    python scripts/bench_gpu.py --only 'qwen3-8b/full/4096/*'     # run some of them
    python scripts/bench_gpu.py --budget 540                      # start no new case after 540 s; rerun to continue

Each case runs in its own process for at most --limit seconds and appends one line to OUT/results.jsonl. Cases that
already have a result are skipped, so the command can be rerun until all are done (--redo repeats those that match
--only, --redo_failed those of them that failed or could not be run). The exit code is 1 after a failure, else 77 if a
case could not be run on this machine. Models have published shapes and random weights, created on the
device. FLOPs are counted in the same way for every contender (`megaswift.engine.flops`); MFU is relative to the
device's bf16 peak. Without a GPU the shapes are scaled down (--small), which only shows that the cases run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from gpu_benchmark.cases import CONTENDERS, BenchmarkCase, matching_cases, parse_case  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
USED_UP = "the budget is used up; type the command again for the rest"
NOT_RUN = 77
"""Exit code, as test programs of automake have it; pytest has none above 5."""
PACKAGES = ("torch", "transformer-engine", "megatron-core", "transformers", "triton")


def machine() -> dict[str, str | None]:
    """Versions, the commit and the date of a result."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        **versions,
        "python": platform.python_version(),
        "commit": head.stdout.strip() or None,
        "date": datetime.date.today().isoformat(),
    }


def run_in_process(case: BenchmarkCase, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """The case's result; its standard error goes to OUT/logs."""
    log = args.out / "logs" / (case.name.replace("/", "-") + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    words = ["--case", case.name, "--steps", str(args.steps), "--warmup", str(args.warmup)]
    words += ["--microbatches", str(args.microbatches)]
    words += ["--small"] if args.small else []
    words += ["--synchronizations"] if args.synchronizations else []
    words += ["--profile"] if args.profile else []
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                [sys.executable, __file__, *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"status": "timed out", "reason": f"longer than {limit:.0f} s"}
    if done.returncode:
        return {"status": "failed", "reason": f"exit code {done.returncode}, see {log}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def results_of(out: Path) -> dict[str, dict[str, Any]]:
    """The last result of each case in the folder."""
    file = out / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {entry["case"]: entry for entry in map(json.loads, lines)}


def run_cases(cases: Sequence[BenchmarkCase], args: argparse.Namespace) -> int:
    """Runs those that have no result yet; the number of failures among all: also cases that took too long, and
    megaswift's that needed more memory than the device has."""
    args.out.mkdir(parents=True, exist_ok=True)
    known, begun, first = results_of(args.out), time.monotonic(), True
    for case in cases:
        status = known.get(case.name, {}).get("status", "")
        again = args.redo or (args.redo_failed and (status == "not run" or has_failed(case, status)))
        if case.name in known and not again:
            continue
        left = args.budget - (time.monotonic() - begun) if args.budget else args.limit
        if left < min(args.limit, 60):
            print(USED_UP)
            break
        start = time.monotonic()
        result = {"case": case.name, **run_in_process(case, args, min(args.limit, left)), **machine()}
        if result["status"] == "timed out" and left < args.limit and not first:  # a later call gives it more time
            print(USED_UP)
            break
        first = False
        result["seconds"] = round(time.monotonic() - start, 1)
        with (args.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        known[case.name] = result
        print(line_of(result), flush=True)
    every = [known[case.name] for case in matching_cases([]) if case.name in known]  # of earlier calls, too
    (args.out / "results.md").write_text(table(every))
    return sum(has_failed(case, known[case.name]["status"]) for case in cases if case.name in known)


def has_failed(case: BenchmarkCase, status: str) -> bool:
    """Whether something is wrong; what a peer's model needs is a result."""
    return status in ("failed", "timed out") or (status == "out of memory" and not case.contender.startswith("hf"))


def exit_code_without_failures(cases: Sequence[BenchmarkCase], out: Path) -> int:
    """77 where a case could not be run here, else 0."""
    known = results_of(out)
    return NOT_RUN if any(known[case.name]["status"] == "not run" for case in cases if case.name in known) else 0


def line_of(result: dict[str, Any]) -> str:
    """For the terminal."""
    if result["status"] != "ok":
        return f"{result['case']:36} {result['status']}: {result['reason']}"
    mfu = f", MFU {result['mfu']:.1%}" if result["mfu"] else ""
    memory = f", {result['memory_gib']['allocated']:.1f} GiB" if result["memory_gib"] else ""
    return f"{result['case']:36} {result['tokens_per_s']:10.0f} tokens/s, {result['tflops']:.3g} TFLOP/s{mfu}{memory}"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| case | tokens/s | TFLOP/s | MFU | step (median, best, worst) | peak GiB | matmul TFLOP/s | settings |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if r["status"] != "ok":
            lines.append(f"| {r['case']} | {r['status']}: {r['reason']} | | | | | | |")
            continue
        step = ", ".join(f"{r['step_s'][key] * 1e3:.0f} ms" for key in ("median", "best", "worst"))
        mfu = f"{r['mfu']:.1%}" if r["mfu"] else ""
        memory = f"{r['memory_gib']['allocated']:.1f}" if r["memory_gib"] else ""
        lines.append(
            f"| {r['case']} | {r['tokens_per_s']:.0f} | {r['tflops']:.3g} | {mfu} | {step} | {memory} | "
            f"{r['matmul_tflops']:.3g} | {r['settings']} |"
        )
    return "\n".join(lines) + "\n"


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench-gpu"), help="folder of the results and logs")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="cases by name; * matches anything")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--redo", action="store_true", help="repeat cases that have a result")
    parser.add_argument("--redo_failed", action="store_true", help="repeat cases without a measurement")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds in all (0: no limit)")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds a case may take")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before these")
    parser.add_argument("--microbatches", type=int, default=4, help="rows a step, one a micro-batch")
    parser.add_argument("--synchronizations", action="store_true", help="also list where a step waits for the device")
    parser.add_argument("--profile", action="store_true", help="also count the kernels of a step, by torch.profiler")
    parser.add_argument("--small", action="store_true", help="small models and rows; always so without a GPU")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """The command."""
    parser = command_line()
    args = parser.parse_args()
    cases = matching_cases(args.only)
    if not cases:
        parser.error(f"--only {' '.join(args.only)}: no case has such a name; --list prints the names")
    if args.list:
        print("\n".join(case.name for case in cases))
        print("\n".join(f"  {name:16} {text}" for name, text in CONTENDERS.items()))
        return 0
    import torch

    args.small = args.small or not torch.cuda.is_available()
    if args.case:
        from gpu_benchmark.case_process import main as run_one

        run_one(parse_case(args.case), vars(args))
        return 0
    try:
        failures = run_cases(cases, args)
    except KeyboardInterrupt:
        print("stopped; type the command again for the rest")
        return 128 + signal.SIGINT
    return 1 if failures else exit_code_without_failures(cases, args.out)


if __name__ == "__main__":
    sys.exit(main())
