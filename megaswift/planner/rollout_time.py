"""Time of writing completions in reinforcement learning, by roofline.

Owns the decode loop's time: each token of a wave of completions reads the weights and the cache of all of them, or
computes their products, whichever takes longer; prompts are computed once for all their completions. All completions
have the maximal length, and samplers share them evenly. The transfer of new weights to the sampler is part of it.
"""

from __future__ import annotations

import math

from megaswift.memory.estimate import RunParameters
from megaswift.memory.rollout_bytes import (
    TRANSFORMERS,
    VLLM,
    Rollout,
    completion_bytes,
    completions_at_once,
    kv_cache_bytes_per_token,
)
from megaswift.memory.step_options import StepOptions
from megaswift.parallel.layout import Layout
from megaswift.planner.layer_time import LAUNCHES
from megaswift.planner.machine import GIGA, Machine


def generation_seconds(run: RunParameters, options: StepOptions, machine: Machine) -> float:
    """Returns the seconds of a step's completions; 0 where servers write them, on GPUs of their own."""
    rollout = options.objective.rollout
    if rollout is None or rollout.backend not in (VLLM, TRANSFORMERS):
        return 0.0
    layout = run.layout
    spec = run.spec
    width = run.kernels.width
    ranks = rollout.ranks if rollout.backend == VLLM else 1
    samplers = layout.world_size // ranks if rollout.backend == VLLM else layout.dp
    completions = options.rows * options.passes * layout.dp / rollout.iterations
    each = math.ceil(completions / samplers)
    at_once = min(each, _room(run, rollout, options, ranks))
    waves = math.ceil(each / at_once)

    # a token of each completion that is written at a time
    prompt = max(0, options.max_length - rollout.completion)
    experts, others = run.whole_elements
    touched = others + experts * min(1.0, at_once * spec.topk / spec.experts if spec.experts else 0.0)
    active = others + experts * (spec.topk / spec.experts if spec.experts else 0.0)
    cache = at_once * kv_cache_bytes_per_token(spec, width) * (prompt + rollout.completion / 2)
    rate = machine.product_rate(False, width == 2)
    token = max(
        (width * touched + cache) / ranks / machine.memory_rate,
        2 * active * at_once / ranks / rate,
    )
    if ranks > 1:
        size = width * at_once * spec.hidden_size
        token += 2 * spec.num_layers * machine.seconds("all_reduce", size, Layout(ranks, tp=ranks), "tp")
    if rollout.backend == TRANSFORMERS:
        launches = sum(LAUNCHES[moe][0] for moe in spec.moe_layers) * machine.shares.launch_us * 1e-6
        token = max(token, launches)
    prompts = 2 * active * prompt * math.ceil(each / rollout.group) / ranks / rate
    return waves * rollout.completion * token + prompts + _transfer(run, machine) / rollout.iterations


def _room(run: RunParameters, rollout: Rollout, options: StepOptions, ranks: int) -> int:
    """Completions that a sampler writes at a time: vLLM no more than its share holds beside the weights."""
    width = run.kernels.width
    device = options.device_memory
    most = completions_at_once(rollout, run.spec, options.max_length, device, width)
    if rollout.backend != VLLM:
        return most
    left = rollout.share * device * ranks - run.whole_weights
    return max(1, min(most, int(left / completion_bytes(run.spec, options.max_length, width))))


def _transfer(run: RunParameters, machine: Machine) -> float:
    """Weights read and written once; over the links where ranks hold parts of them."""
    moved = 2 * run.whole_weights / machine.memory_rate
    if run.layout.world_size == run.layout.dp:
        return moved
    link = machine.gpu.link_gbs or machine.gpu.network_gbs
    assert link is not None
    return moved + run.whole_weights / (link * GIGA * machine.shares.link)
