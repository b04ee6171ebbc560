"""scripts/bench_gpu.py: its cases, what each contender counts as work, and the command on a CPU with small models."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megaswift.bridge.plan import WeightPlan
from megaswift.families import family_of
from megaswift.memory.estimate import uncovered_features, usable_bytes
from megaswift.memory.microbatch_setup import TORCH, TRANSFORMER_ENGINE, ComputeKernels
from megaswift.models.flops import StepFlopFormula
from megaswift.parallel.layout import Layout
from megaswift.planner.settings import FitChoice
from megaswift.run.checks.fit import choose_settings_for_run
from tests.memory.of_config import parameters_of
from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import bench_gpu  # type: ignore[import-not-found]  # noqa: E402 (of scripts/)
from gpu_benchmark.cases import (  # type: ignore[import-not-found]  # noqa: E402 (of scripts/)
    LENGTHS,
    SHAPES,
    all_cases,
    config_of,
    document_lengths,
    matching_cases,
    parse_case,
)

PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama3-8b": 8_030_261_248,
    "qwen3-30b-a3b": 30_532_122_624,
}
"""Parameters of the published checkpoints."""


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_have_the_published_sizes(shape: str) -> None:
    from transformers import AutoConfig

    case = next(case for case in all_cases() if case.shape == shape)
    raw = AutoConfig.for_model(**config_of(case, small=False)).to_dict()
    family = family_of(raw)
    assert WeightPlan(family, family.spec(raw)).parameters == PUBLISHED[shape]


def test_cases() -> None:
    """Each once; the ones with targets first; patterns as in a shell."""
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
    assert names[0] == "qwen3-8b/full/4096/te"
    assert [parse_case(name).name for name in names] == names
    assert {case.contender for case in matching_cases(["qwen3-8b/full/4096/*"])} == {"te", "torch", "hf", "hf_compile"}
    assert matching_cases(["qwen3-9b/*"]) == []
    plain, compiled = ({c.name.rpartition("/")[0] for c in matching_cases([f"*/{n}"])} for n in ("hf", "hf_compile"))
    assert plain == compiled and "qwen3-30b-a3b/lora/4096" in plain
    assert {f"qwen3-8b/{method}/{rows}" for method in ("full", "lora", "qlora") for rows in LENGTHS} <= plain
    with pytest.raises(ValueError, match="no case"):
        parse_case("qwen3-8b/full/4096")


@pytest.mark.parametrize("seed", range(20))
def test_packed_rows_are_full_of_documents(seed: int) -> None:
    case = parse_case("qwen3-8b/full/packed/te")
    lengths = document_lengths(case, False, seed)
    assert sum(lengths) == LENGTHS["packed"]
    assert min(lengths) >= 8
    assert len(lengths) > 1


FITTED = [case.name for case in all_cases() if case.contender.startswith("te")]


@pytest.mark.wide
@pytest.mark.parametrize("name", FITTED)
def test_what_fits_a_card_of_139_gib(name: str, tmp_path: Path) -> None:
    """Every case on Transformer Engine, by the estimate; the copies of weights in FP8 are counted."""
    from gpu_benchmark.contenders import megaswift_config  # type: ignore[import-not-found]

    case, usable = parse_case(name), usable_bytes(139 * 2**30, True)
    cfg, raw = megaswift_config(case, tmp_path, False, 4, True), config_of(case, False)
    spec = family_of(raw).spec(raw)
    assert cfg.model.moe_grouped_gemm_impl == ("transformer_engine" if name.endswith("te_grouped") else "auto")
    products = TORCH if case.method == "qlora" else TRANSFORMER_ENGINE
    kernels = ComputeKernels(products, TRANSFORMER_ENGINE, "bfloat16", True)
    assert not list(uncovered_features(cfg.model, None, False))
    chosen = choose_settings_for_run(cfg, parameters_of(cfg, spec, Layout(1), kernels), usable)
    assert isinstance(chosen, FitChoice) and chosen.after.total <= usable
    assert cfg.replace(**chosen.settings).model.fp8_format == cfg.model.fp8_format, "the rules allow it"
    assert (chosen.after.held.fp8_copies > 0) == (case.method == "fp8")
    if name.startswith("qwen3-8b/fp8"):
        linear = PUBLISHED["qwen3-8b"] - 2 * 151936 * 4096
        assert chosen.after.held.fp8_copies == pytest.approx(2 * linear, rel=1e-3)


@pytest.mark.process
def test_contenders_count_the_same_work(tmp_path: Path) -> None:
    """The FLOP rule over the engine's parameters and over transformers' own; a new model's loss is that of guessing."""
    from gpu_benchmark.contenders import build_contender, micro_batches  # type: ignore[import-not-found]

    for method, rows in product(("full", "lora", "qlora"), ("4096", "packed")):
        ours, theirs = (
            build_contender(parse_case(f"qwen3-8b/{method}/{rows}/{name}"), tmp_path, True, 2)
            for name in ("torch", "hf")
        )
        assert theirs.settings == "no gradient checkpointing, AdamW(fused=True)"
        assert ours.flops.attention == theirs.flops.attention
        assert ours.flops.parameters == pytest.approx(theirs.flops.parameters, abs=1)
        batches = micro_batches(parse_case(f"qwen3-8b/{method}/{rows}/hf"), True, 2, 0)
        assert all(batch.ahead is not None for batch in ours.prepare(batches)), "by the engine, as in a run"
        for contender in (ours, theirs):
            assert contender.step(contender.prepare(batches)) == pytest.approx(math.log(512), rel=0.05)
            contender.close()


@pytest.mark.process
def test_experts_count_as_far_as_tokens_go_through_them(tmp_path: Path) -> None:
    """Adapters of experts in both; PEFT has one of twice the rank for gate and up, with a B of twice the elements, and
    routers have adapters, too."""
    from gpu_benchmark.contenders import LORA_RANK, build_contender, micro_batches  # type: ignore[import-not-found]

    raw = config_of(parse_case("qwen3-30b-a3b/lora/4096/hf"), True)
    ours, theirs = (
        build_contender(parse_case(f"qwen3-30b-a3b/lora/4096/{name}"), tmp_path, True, 2) for name in ("torch", "hf")
    )
    active = raw["num_hidden_layers"] * raw["num_experts_per_tok"]
    more = active * 2 * raw["moe_intermediate_size"] * LORA_RANK
    more += raw["num_hidden_layers"] * (raw["hidden_size"] + raw["num_experts"]) * LORA_RANK
    assert ours.flops.attention == theirs.flops.attention
    assert theirs.flops.parameters - ours.flops.parameters == pytest.approx(more, abs=1)
    batches = micro_batches(parse_case("qwen3-30b-a3b/lora/4096/hf"), True, 2, 0)
    for contender in (ours, theirs):
        assert contender.step(batches) == pytest.approx(math.log(512), rel=0.05)
        contender.close()


def test_a_peer_recomputes_only_once_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its result says so; a second shortage is the result."""
    from gpu_benchmark.contenders import build_contender  # type: ignore[import-not-found]
    from gpu_benchmark.transformers_loop import TransformersLoop  # type: ignore[import-not-found]

    real, short = TransformersLoop._step, ["once"]

    def step(self: Any, batches: Any) -> float:
        if short and short.pop():
            raise torch.OutOfMemoryError("none left")
        assert self.model.is_gradient_checkpointing
        return float(real(self, batches))

    monkeypatch.setattr(TransformersLoop, "_step", step)
    case = parse_case("qwen3-8b/lora/8192/hf")
    assert build_contender(case, tmp_path, True, 2).settings.startswith("with gradient checkpointing (out of memory")
    short += ["once", "twice"]
    with pytest.raises(torch.OutOfMemoryError):
        build_contender(case, tmp_path, True, 2)


def test_packed_peers_keep_documents_apart(tmp_path: Path) -> None:
    """The loss of a packed row is that of its documents one by one."""
    from gpu_benchmark.contenders import build_contender, micro_batches  # type: ignore[import-not-found]
    from gpu_benchmark.transformers_loop import TransformersLoop  # type: ignore[import-not-found]

    case = parse_case("qwen3-8b/full/packed/hf")
    build_contender(case, tmp_path, True, 1)  # writes config.json
    loop, (row,) = TransformersLoop(case, tmp_path, 1e-5, 4), micro_batches(case, True, 1, 0)
    parts = [ids for ids in row.input_ids.split(document_lengths(case, True, 0), 1)]
    assert len(parts) > 1
    with torch.no_grad():
        losses = [loop.model(input_ids=ids, labels=ids).loss * (ids.numel() - 1) for ids in parts]
    assert loop.step([row]) == pytest.approx(float(sum(losses)) / sum(ids.numel() - 1 for ids in parts), rel=1e-5)


COMPILED = [f"qwen3-8b/{method}/{rows}" for method in ("full", "lora", "qlora") for rows in ("4096", "packed")]
COMPILED += ["qwen3-30b-a3b/lora/4096"]


def peer(name: str, folder: Path) -> Any:
    """A case's loop over a new model, always the same one."""
    from gpu_benchmark.contenders import LORA_RANK  # type: ignore[import-not-found]
    from gpu_benchmark.transformers_loop import TransformersLoop  # type: ignore[import-not-found]
    from transformers import AutoConfig

    case = parse_case(name)
    AutoConfig.for_model(**config_of(case, True)).save_pretrained(folder)
    torch.manual_seed(1)
    return TransformersLoop(case, folder, 1e-2, LORA_RANK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_experts_that_are_registered_once(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the compiled peer has them: losses and weights bit by bit as with PEFT's own wrappers."""
    from gpu_benchmark.contenders import micro_batches  # type: ignore[import-not-found]
    from peft.tuners.lora.layer import ParamWrapper
    from transformers import AutoModelForCausalLM

    real = AutoModelForCausalLM.from_config
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lambda config, **kw: real(config, **kw | {"dtype": dtype}))
    monkeypatch.setattr(torch, "compile", lambda model: model)
    theirs, ours = (peer(f"qwen3-30b-a3b/lora/4096/{name}", tmp_path) for name in ("hf", "hf_compile"))
    wrappers = [sum(isinstance(m, ParamWrapper) for m in loop.model.modules()) for loop in (theirs, ours)]
    assert wrappers == [2 * 3, 0], "two of the experts and one of the router in each of two layers"
    assert theirs.flops == ours.flops
    for k in range(3):
        batches = micro_batches(parse_case("qwen3-30b-a3b/lora/4096/hf"), True, 2, k)
        assert theirs.step(batches) == ours.step(batches)
    lists = [
        sorted((tuple(p.shape), float(p.detach().double().sum())) for p in loop.trained) for loop in (theirs, ours)
    ]
    assert lists[0] == lists[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", COMPILED)
def test_compiled_peers_have_the_losses_of_uncompiled_ones(family: str, tmp_path: Path) -> None:
    """Of the first step and of the next two, by the same code generator as `--small` on a CPU; in one graph, and rows
    of other documents are not compiled again."""
    from gpu_benchmark.contenders import micro_batches  # type: ignore[import-not-found]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = (peer(f"{family}/{name}", tmp_path) for name in ("hf", "hf_compile"))
    for k in range(3):
        batches = micro_batches(parse_case(f"{family}/hf"), True, 2, k)
        assert compiled.step(batches) == pytest.approx(plain.step(batches), rel=1e-6 if k == 0 else 1e-5)
    assert compiled.settings == f"{plain.settings}, torch.compile (graphs: 1, graph breaks: 0)"


def test_a_compiled_peer_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not run, and says why; others and those on a GPU are not asked."""
    from gpu_benchmark import contenders, transformers_loop  # type: ignore[import-not-found]
    from torch._inductor import cpp_builder

    monkeypatch.setattr(cpp_builder.config.cpp, "cxx", ("no-such-compiler",))
    cpp_builder.cpp_compiler_search.cache_clear()
    with pytest.raises(contenders.NotRun, match="C\\+\\+ compiler"):
        contenders.build_contender(parse_case("qwen3-8b/full/packed/hf_compile"), tmp_path, True, 1)
    assert contenders.build_contender(parse_case("qwen3-8b/full/packed/hf"), tmp_path, True, 1).settings
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert transformers_loop.uncompilable_reason() is None


@pytest.mark.wide
def test_a_case_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After --limit seconds, 9 minutes by default: its process is gone, the table says so, the next case is run."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho $$ >> {tmp_path}/started\ncase "$*" in *4096*) exec sleep 30;; esac\n'
        'echo \'{"status": "not run", "reason": "so"}\'\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(bench_gpu.sys, "executable", str(python))
    assert bench_gpu.command_line().parse_args([]).limit < 600
    args = bench_gpu.command_line().parse_args(["--out", str(tmp_path / "out"), "--limit", "1"])
    cases = [parse_case(f"qwen3-8b/full/{rows}/hf_compile") for rows in ("4096", "8192")]
    assert bench_gpu.run_cases(cases, args) == 1
    results = bench_gpu.results_of(tmp_path / "out")
    assert [results[case.name]["status"] for case in cases] == ["timed out", "not run"]
    assert "4096/hf_compile | timed out: longer than 1 s |" in (tmp_path / "out/results.md").read_text()
    started = [int(number) for number in (tmp_path / "started").read_text().split()]
    assert len(started) == 2 and not any(psutil.pid_exists(number) for number in started)


def test_what_counts_as_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that takes too long or does not fit is one, but for a peer's model; a case with a measurement is run again
    with --redo only. Calls whose cases cannot be run have an exit code of their own."""
    outcomes = {
        "qwen3-8b/full/4096/te": "out of memory",
        "qwen3-8b/full/4096/hf": "out of memory",
        "qwen3-8b/lora/4096/te": "timed out",
        "qwen3-4b/full/4096/te": "failed",
        "qwen3-8b/fp8/4096/te": "not run",
    }
    run: list[str] = []

    def result(case: Any, args: Any, limit: float) -> dict[str, Any]:
        run.append(case.name)
        return {"status": outcomes[case.name], "reason": "so"}

    monkeypatch.setattr(bench_gpu, "run_in_process", result)
    cases = [parse_case(name) for name in outcomes]
    failed = [name for name in outcomes if not name.endswith("hf")]
    for words, again in (((), []), ((), []), (("--redo_failed",), failed), (("--redo",), [*failed, *outcomes])):
        args = bench_gpu.command_line().parse_args(["--out", str(tmp_path), *words])
        assert bench_gpu.run_cases(cases, args) == 3
        assert run == [*outcomes, *again]
    parts = (cases[-1:], cases[1:], cases[:-1], [])
    codes = [bench_gpu.exit_code_without_failures(part, tmp_path) for part in parts]
    assert codes == [77, 77, 0, 0]
    bench_gpu.run_cases(cases[:1], bench_gpu.command_line().parse_args(["--out", str(tmp_path)]))
    assert all(f"| {name} | {outcomes[name]}" in (tmp_path / "results.md").read_text() for name in outcomes)


def test_a_case_that_the_budget_cuts_short_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets more time by a later call; with the whole of a budget it has had what there is."""
    taken: list[str] = []
    clock = 0.0

    def result(case: Any, args: Any, limit: float) -> dict[str, Any]:
        nonlocal clock
        taken.append(case.name)
        needed = 100.0 if len(taken) > 1 else 30.0
        clock += min(needed, limit)
        return {"status": "timed out" if needed > limit else "failed", "reason": "so"}

    monkeypatch.setattr(bench_gpu, "run_in_process", result)
    monkeypatch.setattr(bench_gpu.time, "monotonic", lambda: clock)
    cases = [parse_case(f"qwen3-8b/{kind}/4096/te") for kind in ("full", "lora", "fp8")]
    args = bench_gpu.command_line().parse_args(["--out", str(tmp_path), "--budget", "95"])
    bench_gpu.run_cases(cases, args)
    assert taken == [case.name for case in cases[:2]]
    assert list(bench_gpu.results_of(tmp_path)) == taken[:1]
    bench_gpu.run_cases(cases, args)
    assert taken[2:] == [cases[1].name]
    assert bench_gpu.results_of(tmp_path)[cases[1].name]["status"] == "timed out"


@pytest.mark.process
@pytest.mark.slow
def test_the_command_is_resumed(tmp_path: Path) -> None:
    """What is not there is said, by the exit code, too; a case with a result is not run again; the table has all."""
    patterns = ("llama3-8b/full/4096/torch", "qwen3-30b-a3b/lora/4096/te", "qwen3-8b/qlora/packed/torch")
    words = ["--out", str(tmp_path), "--steps", "2", "--warmup", "1", "--microbatches", "2"]
    for only in (patterns[:2], patterns):
        command = [sys.executable, str(ROOT / "scripts/bench_gpu.py"), *words, "--only", *only]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 77, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert {r["case"]: r["status"] for r in results} == dict(zip(patterns, ("ok", "not run", "ok"), strict=True))
    assert len(results) == 3
    for r in results:
        assert r["matmul_tflops"] > 0
        if r["status"] == "ok":
            assert r["tokens_per_s"] > 0
            assert r["step_s"]["best"] <= r["step_s"]["median"] <= r["step_s"]["worst"]
    table = (tmp_path / "results.md").read_text()
    assert all(name in table for name in patterns)
    wrong = subprocess.run([*command[:2], "--only", "qwen9"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "--list" in wrong.stderr


def test_a_step_is_profiled_once_more() -> None:
    from gpu_benchmark.case_process import profile_of  # type: ignore[import-not-found]

    x = torch.ones(8, 8)
    found = profile_of(lambda: (x @ x).relu())["profile"]
    assert found["launched"] >= 2 and found["seconds"] > 0


def test_rates_mfu_and_peak_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 2 s of a model of 1,000 parameters and 10 of attention, on a device with a known peak: tokens and the
    FLOP rule's work over the median step; bytes as GiB."""
    from gpu_benchmark import case_process  # type: ignore[import-not-found]
    from gpu_benchmark.cases import document_lengths  # type: ignore[import-not-found]

    case = parse_case("qwen3-0.6b/full/4096/torch")
    options = {"small": True, "microbatches": 1, "steps": 3, "warmup": 1, "synchronizations": False, "profile": False}
    seconds = iter([2.0, 1.0, 4.0])
    taken: list[Any] = []

    def step(batches: Any) -> float:
        taken.append(batches)
        return 0.5

    def prepare(batches: list[Any]) -> tuple[str, int]:
        return "prepared", len(batches)

    contender = SimpleNamespace(step=step, prepare=prepare, flops=StepFlopFormula(1000, 10), settings="as is")
    monkeypatch.setattr(case_process, "matmul_tflops", lambda small: 1.0)
    monkeypatch.setattr(case_process, "peak_tflops", lambda device, dtype: 1e-6)
    monkeypatch.setattr(case_process, "build_contender", lambda *_: contender)
    monkeypatch.setattr(case_process, "seconds_of", lambda work: (work(), next(seconds))[1])
    result = case_process.run_case(case, options)
    assert taken == [("prepared", 1)] * 5, "as a run's data threads do, outside of what is timed"
    [length] = document_lengths(case, True, 0)
    work = 6 * 1000 * length + 6 * 10 * length**2
    assert result["tokens_per_s"] == length / 2 and result["tflops"] == pytest.approx(work / 2 / 1e12)
    assert result["mfu"] == pytest.approx(work / 2 / 1e6) and result["memory_gib"] is None
    assert result["step_s"] == {"median": 2.0, "best": 1.0, "worst": 4.0} and result["losses"] == [0.5, 0.5]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * 2**30)
    assert case_process._peak_gib() == {"allocated": 3.0, "reserved": 5.0}
