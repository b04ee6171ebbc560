"""Exact sizes of what an engine holds, counted from its own buffers, for the first screen."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn

from megaswift import distributed
from megaswift.bridge.adapters.plan import AdapterPlan
from megaswift.bridge.plan import WeightPlan
from megaswift.engine.megatron.layers.nf4_linear import NF4Matrix
from megaswift.engine.megatron.optim import optimizer as optim
from megaswift.engine.megatron.optim.fp8_weights import is_fp8_weight
from megaswift.engine.megatron.optim.host_adam import HostAdam
from megaswift.engine.megatron.state import EngineState
from megaswift.engine.options.optimizer import PLUGIN_OPTIMIZERS
from megaswift.engine.protocol import EngineSizeReport
from megaswift.models.spec import ModelSpec

MOMENTS = {"adam": 2, "sgd": 1}


def _optimizer_bytes(engine: EngineState) -> tuple[int, int]:
    """Moments and float32 main weights of this rank's part, on its device and, offloaded, on the host.

    Moments exist from the first step on; they are counted before it.
    """
    o = engine.optim
    plugin = PLUGIN_OPTIMIZERS.get(o.optimizer)
    count = MOMENTS[o.optimizer] if plugin is None else len(plugin.states)
    moments = 0 if o.optimizer == "sgd" and not o.sgd_momentum else 4 * count
    half = engine.config.bf16 or engine.config.fp16
    device = host = 0
    for part in optim.optimizer_parts(engine.optimizer):
        compact = (
            engine.config.bf16 and part.config.store_param_remainders and optim.uses_precision_aware_optimizer(part)
        )
        main = 2 if compact else 4
        if optim.uses_precision_aware_optimizer(part):
            moments = part.config.exp_avg_dtype.itemsize + part.config.exp_avg_sq_dtype.itemsize
        adam = part.optimizer if isinstance(part.optimizer, HostAdam) else None
        host += adam.host_bytes() if adam is not None else 0
        for group in part.optimizer.param_groups:
            for p in group["params"]:
                offloaded = adam is not None and adam.offloads(p)
                device += p.numel() * ((0 if offloaded else moments) + (main if half else 0))
    return device, host


def flop_parameter_count(plan: WeightPlan, spec: ModelSpec) -> int:
    """Parameters in the FLOP rule: those active for a token (of E experts k), without the input embedding unless it is
    also the output; the output once more for each layer for multi-token prediction."""
    experts = sum(math.prod(e.full_shape()) for e in plan.entries if e.expert is not None)
    idle = experts - experts * spec.topk // spec.experts if experts else 0
    products = spec.mtp_layers - (0 if spec.tied else 1)
    return plan.parameters - idle + products * spec.vocab_size * spec.hidden_size


def active_adapter_parameter_count(plan: AdapterPlan, spec: ModelSpec) -> int:
    """Adapter parameters in the FLOP rule: those active for a token, of E experts' adapters k."""
    counts = {True: 0, False: 0}
    for adapter in plan.adapters:
        counts[adapter.entry.expert is not None] += sum(math.prod(adapter.shape(half)) for half in adapter.halves)
    return counts[False] + (counts[True] * spec.topk // spec.experts if counts[True] else 0)


def _weights(chunk: nn.Module) -> Iterator[nn.Parameter | NF4Matrix]:
    """All that a chunk holds as weights, each once."""
    yield from chunk.parameters()
    yield from (m for m in chunk.modules() if isinstance(m, NF4Matrix))


def measure_engine_sizes(engine: EngineState) -> EngineSizeReport:
    """Sizes of the largest rank, parameters in all. Collective."""
    elements, weights = (
        sum(column)
        for column in zip(
            *((p.numel(), p.numel() if is_fp8_weight(p) else p.nbytes) for c in engine.plain for p in _weights(c)),
            strict=True,
        )
    )
    gradients = sum(
        b.grad_data.numel() * b.grad_data.element_size()
        for c in engine.chunks
        for b in c.buffers + c.expert_parallel_buffers
    )
    sizes = distributed.all_max([elements, weights, gradients, *_optimizer_bytes(engine)])
    elements, weights, gradients, optimizer, host = map(int, sizes)
    total = engine.plan.parameters
    flops = flop_parameter_count(engine.plan, engine.spec)
    if engine.lora is None:
        return EngineSizeReport(total, elements, weights, gradients, optimizer, flops, host_bytes=host)
    adapters = engine.lora.plan
    step = flops * 2 // 3 + active_adapter_parameter_count(adapters, engine.spec)
    return EngineSizeReport(
        total + adapters.added, elements, weights, gradients, optimizer, step, adapters.parameters, flops, host
    )
