"""Bytes that a rank holds throughout a run on the native engine: weights, gradients and optimizer states.

Owns the formulas of Megatron-Core's DDP buffers and optimizers, per parameter on the rank (n elements, w bytes each: 2
in half precision, else 4):

    weights            w n; NF4: n / 2 + 4 n / 64 (a float32 scale for a block of 64 inputs, arXiv:2305.14314)
    FP8 copies         2 n of linear layers (`--fp8_format`): a weight and its transpose; in MXFP8 n / 16 for scales
    FP8 weights        n of linear layers and n for their transposes (`--fp8_param_gather`), no copies
    gradients          4 n of what trains (`grad_reduce_in_fp32`); 2 n with main_grads_dtype bf16
    main weights       4 n in half precision; with the precision-aware optimizer and bfloat16 2 n (the remainder)
    Adam's moments     8 n, 2 n less for each in bf16; SGD with momentum 4 n
    reference          w n, on the device or in host memory
    host Adam          moments in host memory (a fraction of them: up to one parameter fewer), with two buffers of at
                       most 2^24 float32 numbers

With the distributed optimizer, optimizer states are divided by the data-parallel ranks that hold the same parameter
(over DP x CP, for experts over their own replicas), and weights and gradients lie in buffers in which each parameter
begins at a multiple of 64 elements and whose size is a multiple of lcm(ranks, 128)
(`megatron/core/distributed/param_and_grad_buffer.py`). No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product

from megaswift.engine.options.optimizer import PLUGIN_OPTIMIZERS, OptimConfig
from megaswift.engine.options.optimizer_checks import uses_distributed_optimizer
from megaswift.memory.objective import DEVICE, HOST
from megaswift.memory.rank_parameters import RankParameters
from megaswift.memory.step_options import StepOptions
from megaswift.models.options.model import ModelConfig
from megaswift.models.qlora import BLOCK
from megaswift.parallel.layout import Layout

HALF = ("bfloat16", "float16")
ALIGNED = 64
"""Elements: a parameter begins at a multiple of it in a buffer."""
BUCKET = 128
"""Elements: a buffer's size is a multiple of it."""
HOST_CHUNK = 2**23
"""Elements that the host optimizer moves at a time (`engine/megatron/optim/host_adam.py`)."""
HOST_SLOTS = 2
"""Chunks that the host optimizer has room for."""


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on a device, and in host memory."""

    weights: int = 0
    gradients: int = 0
    main_weights: int = 0
    """Full precision copies of half-precision weights, or the parts that these lack."""
    moments: int = 0
    first_values: int = 0
    """Base weights before training, of modules that train beside adapters."""
    host: int = 0
    """Optimizer states in host memory; not on the device."""
    fp8_copies: int = 0
    """Weights of FP8 products and their transposes, which Transformer Engine keeps between micro-batches; of weights
    that are FP8 themselves the transposes."""
    reference: int = 0
    """Weights of the reference of preference learning, a copy of all tensors of the model."""

    def __add__(self, other: HeldBytes) -> HeldBytes:
        return HeldBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's states on the device."""
        return self.main_weights + self.moments

    @property
    def device(self) -> int:
        """All that is on the device."""
        weights = self.weights + self.fp8_copies + self.reference + self.first_values
        return weights + self.gradients + self.optimizer


def held_bytes(options: StepOptions, dtype: str, layout: Layout, chunks: Sequence[RankParameters]) -> HeldBytes:
    """Bytes of a rank with these model chunks, weights in `dtype`. The counters of steps of torch's Adam, 4 bytes a
    parameter, are left out.

    Some of the distributed optimizer's equal shards hold a buffer's padding, which has no moments: theirs are fewer.
    """
    o = options.optim
    width = 2 if dtype in HALF else 4
    main, moments = state_bytes_per_element(o, dtype)
    gradient_width = 2 if o.main_grads_dtype == "bf16" else 4
    sharded = uses_distributed_optimizer(options.distributed_optimizer, o.optimizer)
    fraction = o.optimizer_offload_fraction if o.optimizer_cpu_offload else 0.0
    frozen = sum(_frozen_bytes(chunk, width) for chunk in chunks)
    total = HeldBytes(weights=frozen, fp8_copies=_fp8_copies(options.model, chunks))
    total += _reference(options, width, chunks)
    largest = 0
    for buffer in gradient_buffers(options.model, layout, chunks):
        elements = buffer.padded if sharded else buffer.elements
        own = elements // buffer.replicas if sharded else elements
        own_main = float32_main_bytes(o) if buffer.float32 else main
        total += HeldBytes(
            weights=buffer.weight_bytes(width) * elements,
            gradients=(4 if buffer.float32 else gradient_width) * elements,
            main_weights=own_main * own,
            moments=moments * own - int(fraction * moments * own),
            first_values=buffer.weight_bytes(width) * buffer.restored,
            host=int(fraction * moments * own),
        )
        largest = max(largest, min(own, buffer.largest))
    return total + HeldBytes(host=8 * HOST_SLOTS * min(HOST_CHUNK, largest) if fraction else 0)


def _frozen_bytes(chunk: RankParameters, width: int) -> int:
    return sum(
        n * (p.elements // 2 + 4 * p.elements // BLOCK if p.four_bits else (4 if p.float32 else width) * p.elements)
        for p, n in chunk.items()
        if not p.trains
    )


def _reference(options: StepOptions, width: int, chunks: Sequence[RankParameters]) -> HeldBytes:
    copied = width * sum(n * p.elements for chunk in chunks for p, n in chunk.items())
    where = options.objective.reference
    return HeldBytes(reference=copied if where == DEVICE else 0, host=copied if where == HOST else 0)


def _fp8_copies(model: ModelConfig, chunks: Sequence[RankParameters]) -> int:
    """The scales of tensors and of blocks of 128 x 128 weights are left out."""
    if model.fp8_format is None:
        return 0
    elements = sum(n * p.elements for chunk in chunks for p, n in chunk.items() if p.product)
    if model.fp8_param_gather:
        return elements
    return 2 * elements + (elements // 16 if model.fp8_recipe == "mxfp8" else 0)


def float32_main_bytes(o: OptimConfig) -> int:
    """Bytes of an element's main weight where the weight is in float32: the precision-aware optimizer has a copy."""
    return 4 if o.precision_aware_optimizer and not o.optimizer_cpu_offload else 0


def state_bytes_per_element(o: OptimConfig, dtype: str) -> tuple[int, int]:
    """(of main weights, of moments)."""
    aware = o.precision_aware_optimizer and not o.optimizer_cpu_offload
    remainders = aware and o.store_param_remainders and dtype == "bfloat16"
    main = 0
    if dtype in HALF:
        main = 2 if remainders else 4
    if (plugin := PLUGIN_OPTIMIZERS.get(o.optimizer)) is not None:
        return main, 4 * len(plugin.states)
    if o.optimizer != "adam":
        return main, 4 if o.sgd_momentum else 0
    small = [o.exp_avg_dtype, o.exp_avg_sq_dtype].count("bf16") if aware else 0
    return main, 8 - 2 * small


@dataclass(frozen=True)
class _GradientBuffer:
    """Trained parameters of a chunk that have the same replicas."""

    sizes: tuple[tuple[int, int], ...]
    """(elements of a parameter, how many there are)."""
    shared: tuple[tuple[int, int], ...]
    """Those of embeddings tied between pipeline stages, which lie apart."""
    replicas: int
    restored: int
    float32: bool
    fp8: bool

    def weight_bytes(self, width: int) -> int:
        """Bytes of a weight, where the model's have `width`."""
        if self.fp8:
            return 1
        return 4 if self.float32 else width

    @property
    def elements(self) -> int:
        return sum(n * count for n, count in (*self.sizes, *self.shared))

    @property
    def largest(self) -> int:
        return max(n for n, _ in (*self.sizes, *self.shared))

    @property
    def padded(self) -> int:
        unit = math.lcm(self.replicas, BUCKET)
        own = sum(count * _rounded_up(n, ALIGNED) for n, count in self.sizes)
        return _rounded_up(own, unit) + sum(
            count * _rounded_up(_rounded_up(n, ALIGNED), unit) for n, count in self.shared
        )


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def gradient_buffers(model: ModelConfig, layout: Layout, chunks: Sequence[RankParameters]) -> Iterator[_GradientBuffer]:
    """Megatron's DDP makes one for each chunk, kind of replicas and precision of the weights."""
    for chunk in chunks:
        for expert, float32, fp8 in product((False, True), repeat=3):
            replicas = layout.edp if expert else layout.dp * layout.cp
            kind = (expert, float32, fp8)
            trained = ((p, n) for p, n in chunk.items() if p.trains)
            mine = [(p, n) for p, n in trained if (p.expert, p.float32, model.fp8_param_gather and p.product) == kind]
            if mine:
                yield _GradientBuffer(
                    tuple((p.elements, n) for p, n in mine if not p.shared),
                    tuple((p.elements, n) for p, n in mine if p.shared),
                    replicas,
                    sum(n * p.elements for p, n in mine if p.restored),
                    float32,
                    fp8,
                )
