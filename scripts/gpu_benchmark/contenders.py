"""Those that train in `bench_gpu.py`: each builds its model on the device with random weights and returns its step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_benchmark.cases import BenchmarkCase, config_of, document_lengths, row_length
from gpu_benchmark.transformers_loop import TransformersLoop, uncompilable_reason
from megaswift.config import SwiftConfig
from megaswift.engine.flops import step_flop_formula
from megaswift.losses.contract import Batch
from megaswift.losses.sft import CrossEntropy
from megaswift.models.flops import StepFlopFormula

LR = 1e-5
LORA_RANK = 16
TRANSFORMER_ENGINE = ("te", "te_grouped", "bf16_moment")


class NotRun(Exception):  # noqa: N818 (an outcome, not an error)
    """Why a case cannot run on this machine."""


@dataclass(frozen=True)
class Contender:
    """A model that is ready to train."""

    step: Callable[[Sequence[Batch]], float]
    """One optimizer step over micro-batches that `prepare` has given; the loss, which has been read from the device."""
    flops: StepFlopFormula
    settings: str
    """What it chose by itself."""
    prepare: Callable[[list[Batch]], list[Batch]] = list
    """What a run's data threads do to micro-batches before their step."""
    close: Callable[[], None] = lambda: None
    """Ends its process groups."""


def micro_batches(case: BenchmarkCase, small: bool, count: int, seed: int) -> list[Batch]:
    """One row each, in host memory."""
    return [_row(case, small, seed * count + k) for k in range(count)]


def _row(case: BenchmarkCase, small: bool, seed: int) -> Batch:
    lengths = document_lengths(case, small, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, config_of(case, small)["vocab_size"], (1, sum(lengths)), generator=generator)
    weights = torch.ones(ids.shape)
    ends = torch.tensor(lengths).cumsum(0)
    weights[0, ends - 1] = 0.0
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), ends.int()]) if case.rows == "packed" else None
    return Batch(ids, ids.roll(-1, 1), weights, positions, torch.ones(ids.shape, dtype=torch.bool), cu_seqlens=bounds)


def build_contender(case: BenchmarkCase, folder: Path, small: bool, count: int) -> Contender:
    """The case's contender; `folder` is a scratch folder, `count` the micro-batches of a step.

    Raises:
        NotRun: it lacks something on this machine.
    """
    from transformers import AutoConfig

    AutoConfig.for_model(**config_of(case, small)).save_pretrained(folder)
    if case.contender == "hf_compile" and (reason := uncompilable_reason()):
        raise NotRun(reason)
    if case.contender in ("hf", "hf_compile"):
        loop = TransformersLoop(case, folder, LR, LORA_RANK)
        loop.step(micro_batches(case, small, count, 0))  # finds out whether it has to recompute
        return Contender(loop.step, loop.flops, loop.settings)
    return _megaswift(case, folder, small, count)


def _megaswift(case: BenchmarkCase, folder: Path, small: bool, count: int) -> Contender:
    from megaswift.engine.megatron.layers.implementation import transformer_engine_unusable_reason
    from megaswift.engine.megatron.parallel_context import ParallelContext
    from megaswift.families import family_of
    from megaswift.parallel.layout import Layout
    from megaswift.run.checks.fit import fit_to_device
    from megaswift.run.engines import native_engine

    cuda = torch.cuda.is_available()
    if case.contender in TRANSFORMER_ENGINE and (reason := transformer_engine_unusable_reason()):
        raise NotRun(reason)
    if case.method == "fp8" and not cuda:
        raise NotRun("FP8 products need a CUDA device")
    cfg = megaswift_config(case, folder, small, count, cuda)
    raw = json.loads((folder / "config.json").read_text())
    spec = family_of(raw).spec(raw)
    context = ParallelContext(Layout(1), timeout_s=600, seed=1)
    cfg, settings = fit_to_device(cfg, spec, context.layout)
    engine = native_engine(cfg, spec, context)
    engine.random_init(seed=1, device=context.device)
    loss = CrossEntropy()

    def step(batches: Sequence[Batch]) -> float:
        """As the train loop takes it: counts are launched before the passes."""
        counted = engine.start_count(batches, loss)()
        return engine.train_batch(batches, loss, LR, counted=counted).loss

    return Contender(
        step,
        step_flop_formula(engine, spec, 0),
        f"{engine.kernels}; {settings.replace(chr(10), '; ')}".rstrip("; "),
        engine.prepare_ahead,
        context.close,
    )


def megaswift_config(case: BenchmarkCase, folder: Path, small: bool, count: int, cuda: bool) -> SwiftConfig:
    """Of megaswift's contenders; `--fit` chooses the rest for the device."""
    layers = "transformer_engine" if case.contender in TRANSFORMER_ENGINE else "torch"
    return SwiftConfig(
        task="sft",
        model=str(folder),
        torch_dtype="bfloat16" if cuda else "float32",
        transformer_impl="auto"
        if (layers, case.method) == ("transformer_engine", "qlora")
        else layers,  # attention only
        train_type=case.method if case.method in ("lora", "qlora") else "full",
        learning_rate=LR,
        max_length=row_length(case, small),
        packing=case.rows == "packed",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=count,
        **({"lora_rank": LORA_RANK} if case.method in ("lora", "qlora") else {}),
        fit=case.contender != "bf16_moment",
        **({"precision_aware_optimizer": True, "exp_avg_dtype": "bf16"} if case.contender == "bf16_moment" else {}),
        **({"moe_grouped_gemm_impl": "transformer_engine"} if case.contender == "te_grouped" else {}),
        **({"fp8_format": "hybrid", "fp8_recipe": "tensorwise"} if case.method == "fp8" else {}),
        **({} if cuda or case.contender == "bf16_moment" else {"device_memory": "16GiB"}),
    )
