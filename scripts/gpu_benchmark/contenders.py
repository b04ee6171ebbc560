"""Those that train in `bench_gpu.py`: each builds its model on the device with random weights and returns its step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_benchmark.cases import BenchmarkCase, config_of, document_lengths, row_length
from megaswift.config import SwiftConfig
from megaswift.losses.contract import Batch
from megaswift.losses.sft import CrossEntropy
from megaswift.trainers.flops import StepFlopFormula, step_flop_formula

LR = 1e-5
LORA_RANK = 16


class NotRun(Exception):  # noqa: N818 (an outcome, not an error)
    """Why a case cannot run on this machine."""


@dataclass(frozen=True)
class Contender:
    """A model that is ready to train."""

    step: Callable[[Sequence[Batch]], float]
    """One optimizer step over these micro-batches; the loss, which has been read from the device."""
    flops: StepFlopFormula
    settings: str
    """What it chose by itself."""
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
    if case.contender in ("hf", "hf_compile"):
        return _transformers_loop(case, folder)
    return _megaswift(case, folder, small, count)


def _megaswift(case: BenchmarkCase, folder: Path, small: bool, count: int) -> Contender:
    from megaswift.engine.megatron.engine import MegatronEngine
    from megaswift.engine.megatron.layers.layer_implementation import transformer_engine_unusable_reason
    from megaswift.engine.megatron.parallel_context import ParallelContext
    from megaswift.families import family_of
    from megaswift.parallel.layout import Layout
    from megaswift.trainers.fit_to_device import fit_to_device

    cuda = torch.cuda.is_available()
    if case.contender == "te" and (reason := transformer_engine_unusable_reason()):
        raise NotRun(reason)
    if case.method == "fp8" and not cuda:
        raise NotRun("FP8 products need a CUDA device")
    cfg = megaswift_config(case, folder, small, count, cuda)
    raw = json.loads((folder / "config.json").read_text())
    spec = family_of(raw).spec(raw)
    context = ParallelContext(Layout(1), timeout_s=600, seed=1)
    cfg, settings = fit_to_device(cfg, spec, context.layout)
    engine = MegatronEngine(spec, cfg, context)
    engine.random_init(seed=1, device=context.device)
    loss = CrossEntropy()
    return Contender(
        lambda batches: engine.train_batch(batches, loss, LR).loss,
        step_flop_formula(engine, spec, 0),
        f"{engine.kernels}; {settings.replace(chr(10), '; ')}".rstrip("; "),
        context.close,
    )


def megaswift_config(case: BenchmarkCase, folder: Path, small: bool, count: int, cuda: bool) -> SwiftConfig:
    """Of megaswift's contenders; `--fit` chooses the rest for the device."""
    layers = "transformer_engine" if case.contender == "te" else "torch"
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
        fit=True,
        **({"fp8_format": "hybrid", "fp8_recipe": "tensorwise"} if case.method == "fp8" else {}),
        **({} if cuda else {"device_memory": "16GiB"}),
    )


def _transformers_loop(case: BenchmarkCase, folder: Path) -> Contender:
    """bf16 weights, gradients and moments with PyTorch's fused AdamW: the fastest that is common, with less precision
    than megaswift's float32 main weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if case.rows == "packed" or case.method not in ("full", "lora"):
        raise NotRun("the plain loop has full weights and LoRA on whole rows only")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder),
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            attn_implementation="sdpa",
        )
    if case.method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=LORA_RANK, target_modules="all-linear"))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    flops = _flops_of(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, fused=True)
    forward: Any = torch.compile(model) if case.contender == "hf_compile" else model

    def step(batches: Sequence[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for batch in batches:
            ids: Tensor = batch.input_ids.to(device, non_blocking=True)
            loss = forward(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return float(total)

    return Contender(step, flops, "gradient checkpointing, AdamW(fused=True)")


def _flops_of(model: Any) -> StepFlopFormula:
    """The FLOP rule of `megaswift.trainers.flops` for a transformers model without experts."""
    config = model.config
    counted = {id(p): p for p in model.parameters()}
    if not config.tie_word_embeddings:
        counted.pop(id(model.get_input_embeddings().weight))
    trained = sum(p.numel() for p in counted.values() if p.requires_grad)
    frozen = sum(p.numel() for p in counted.values() if not p.requires_grad)
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return StepFlopFormula(trained + frozen * 2 // 3, attention)
