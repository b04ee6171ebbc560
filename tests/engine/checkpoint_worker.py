"""The rank side of the checkpoint tests: build, load, train, save, and hand back full tensors by their Hugging Face
names.

Moments are gathered here with plain collectives from the optimizers' own buffers, not by the code under test.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.errors import CheckpointError
from megaswift.losses.mtp import MultiTokenPrediction
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import ROW, Case, documents, own, rows

TOTAL = 4
"""Micro-batches of a global batch, whatever the layout."""


@dataclass(frozen=True)
class Run:
    """One job: start from `load` (else from the model folder), train steps first .. last - 1, save to `save`, go on to
    `extra`."""

    case: Case
    folder: Path
    load: Path | None = None
    save: Path | None = None
    first: int = 0
    last: int = 0
    extra: int = 0
    """Steps after the save."""
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    row: int = ROW
    """Tokens of a row, most of them padding where it is longer than the documents."""


@dataclass
class Result:
    """What a rank saw; tensors on rank 0 only."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    step: int = 0
    host_bytes: int = 0
    error: str = ""


def build(run: Run, world: int) -> tuple[Any, Any]:
    """(engine, context). With a checkpoint to load, all else is other: weights at random, other seeds."""
    from megaswift.config import SwiftConfig
    from megaswift.engine.megatron.parallel_context import ParallelContext
    from megaswift.families import family_of
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import native_engine

    settings = {"learning_rate": 1e-3, **run.options}
    cfg = SwiftConfig(task="sft", model=str(run.folder), **run.case.config(**settings))
    hf_config = json.loads((run.folder / "config.json").read_text())
    spec = family_of(hf_config).spec(hf_config)
    dropout = {"attention_dropout": run.dropout, "hidden_dropout": run.dropout}
    features = dataclasses.replace(spec.features, mtp_layers=cfg.model.mtp_num_layers or 0)
    spec = dataclasses.replace(spec, transformer={**spec.transformer, **dropout}, features=features)
    context = ParallelContext(
        Layout.from_config(cfg.parallel, world), timeout_s=60, seed=11 if run.load is None else 99
    )
    engine = native_engine(cfg, spec, context)
    if run.load is None:
        engine.load_hf(run.folder)
    else:
        engine.random_init(5)
    return engine, context


def flat_moments(engine: Any, name: str) -> dict[int, Tensor]:
    """id(weight) to this tensor-parallel shard's whole moment: distributed ranges are summed into zeros."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megaswift.engine.megatron.optim.optimizer import optimizer_parts

    found: dict[int, Tensor] = {}
    for part in optimizer_parts(engine.optimizer):
        if isinstance(part, DistributedOptimizer):
            for buffer in part.buffers:
                for weight in buffer.params:
                    whole = torch.zeros(weight.numel())
                    if weight in part.model_param_group_index_map:
                        group, order = part.model_param_group_index_map[weight]
                        main = part.optimizer.param_groups[group]["params"][order]
                        at = part._get_model_param_range_map(weight)["param"]
                        whole[at.start : at.end] = part.optimizer.state[main][name]
                    dist.all_reduce(whole, group=part.data_parallel_group)
                    found[id(weight)] = whole.view(weight.shape)
        else:
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    found[id(main)] = part.optimizer.state[main][name]
            for halves, mains in zip(
                getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []), strict=True
            ):
                found.update({id(h): found[id(m)] for h, m in zip(halves, mains, strict=True)})
    return found


def stream(engine: Any, values: dict[int, Tensor]) -> dict[str, Tensor]:
    """By Hugging Face name, on rank 0."""
    stream = engine.weights.stream(lambda p: values[id(p)] if p.requires_grad else None, dtype=torch.float32)
    return {name: t.clone() for name, t in stream}


def snapshot(engine: Any, result: Result) -> None:
    """Weights and moments into `result`."""
    result.weights = {name: t.clone() for name, t in engine.hf_weights()}
    names = ("exp_avg", "exp_avg_sq") if engine.optim.optimizer == "adam" else ("momentum_buffer",)
    result.moments = {name: stream(engine, flat_moments(engine, name)) for name in names}


def job(rank: int, world: int, run: Run) -> Result:
    """One `Run` on this rank."""
    from megaswift.engine.megatron.checkpoint import optimizer_states

    result = Result()
    engine, context = build(run, world)
    data_rank = context.layout.coordinates(rank).dp
    layers = engine.spec.mtp_layers
    loss = MultiTokenPrediction(CrossEntropy(), layers, 0.3) if layers else CrossEntropy()

    def train(first: int, last: int) -> None:
        for k in range(first, last):
            batches = [rows(group, run.row) for group in documents(TOTAL, k)]
            taken = engine.train_batch(own(batches, run.case.dp, data_rank), loss, 1e-3 / (k + 1))
            result.losses.append(taken.loss)
            result.norms.append(taken.grad_norm)

    if run.load is not None:
        try:
            engine.load(run.load)
        except CheckpointError as error:
            result.error = error.message()
            return result
    train(run.first, run.last)
    if run.save is not None:
        engine.save(run.save)
    snapshot(engine, result)
    result.step = optimizer_states.get_step_count(engine.optimizer)
    result.host_bytes = engine.report().host_bytes
    train(run.last, run.last + run.extra)
    dist.barrier()
    context.close()
    return result
