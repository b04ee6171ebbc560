"""Time of one decoder layer's passes on a rank, by roofline.

Owns what a layer computes and exchanges: a matrix product takes the longer of its FLOPs at the product rate and its
bytes at the memory rate; attention its FLOPs at the attention rate (causal: half of the square; backward 2.5 times
forward, Dao 2023, arXiv:2307.08691); everything elementwise its bytes; a collective its bytes on the bus at the share
of its link. A layer that launches kernels for longer than these run takes the host's time. Rates are `machine.py`'s.
All rows have max_length tokens of one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from megaswift.memory.layer_activations import EXPERT_FC1, EXPERT_FC2, FC1, FC2, PROJECTION, QKV, first_width
from megaswift.memory.microbatch_setup import TORCH, MicrobatchSetup
from megaswift.models.spec import LINEAR, VOCABULARY, WINDOW
from megaswift.models.weights.table import padded_vocabulary_size
from megaswift.planner.machine import Machine

ATTENTION_BACKWARD = 2.5
"""FLOPs of flash attention's backward pass over its forward pass: five products in place of two."""
MAIN_GRADIENT = 4
"""Bytes of a float32 main gradient, read and written where a weight's gradient is added to it."""
LAUNCHES = {False: (60, 110), True: (150, 290)}
"""Kernels of a dense and of a MoE layer's forward and backward pass. An assumption, not measured here."""


@dataclass(frozen=True)
class Seconds:
    """Seconds by part."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    """Norms, rotation, activations, permutation of tokens, casts."""
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    """What attention does not hide."""
    all_to_all: float = 0.0
    """Tokens to experts and back, as far as no other micro-batch's pass hides them."""
    host: float = 0.0
    """What the launches of kernels take beyond all of these."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(*(getattr(self, f.name) * factor for f in fields(self)))

    @property
    def gpu(self) -> float:
        """Without what only the host takes."""
        exchanges = self.tensor_parallel + self.context_parallel + self.all_to_all
        return self.products + self.attention + self.elementwise + exchanges

    @property
    def total(self) -> float:
        """All of it."""
        return self.gpu + self.host


@dataclass(frozen=True)
class LayerTime:
    """A layer's passes for one micro-batch."""

    forward: Seconds
    backward: Seconds
    core: Seconds
    """Of the forward pass, attention's scores."""
    block: Seconds
    """Of the forward pass, the MLP or the experts with their exchanges."""


@dataclass(frozen=True)
class _Product:
    """[rows, inner] x [inner, outer], or a grouped product of as many rows in all."""

    module: str
    rows: int
    inner: int
    outer: int
    groups: int = 1


def layer_time(setup: MicrobatchSetup, layer: int, machine: Machine) -> LayerTime:
    """Returns the time of a layer."""
    moe = setup.spec.moe_layers[layer]
    mixer_forward, mixer_backward = _products_time(setup, layer, machine, list(_mixer_products(setup, layer)))
    block_forward, block_backward = _products_time(setup, layer, machine, list(_block_products(setup, moe)))
    core = _core_time(setup, layer, machine)
    exchange = _context_exchange(setup, layer, machine)
    attention_bytes, attention_bytes_back = _mixer_bytes(setup)
    block_bytes, block_bytes_back = _block_bytes(setup, moe)
    rate = machine.memory_rate
    tp_mixer = _tp_exchange(setup, machine, 1)
    tp_block = _tp_exchange(setup, machine, 1 if not moe or setup.spec.shared_ffn else 0)
    tokens = _expert_exchange(setup, machine) if moe else 0.0
    expert_tp = _expert_tp_exchange(setup, machine) if moe else 0.0
    exposed = (2 * tokens, 2 * tokens)
    # Megatron-Core's order: dispatch and combine forward beside backward passes of experts and attention, and the other
    # way round; the first and the last micro-batch of a step, which run alone, are left out
    if setup.options.overlap_experts and moe:
        mixer = mixer_forward + core + attention_bytes / rate
        mixer_back = mixer_backward + ATTENTION_BACKWARD * core + attention_bytes_back / rate
        experts = block_forward + block_bytes / rate
        experts_back = block_backward + block_bytes_back / rate
        exposed = (
            max(0.0, tokens - experts_back) + max(0.0, tokens - mixer_back),
            max(0.0, tokens - mixer) + max(0.0, tokens - experts),
        )
    block = Seconds(
        products=block_forward,
        elementwise=block_bytes / rate,
        tensor_parallel=tp_block + expert_tp,
        all_to_all=exposed[0],
    )
    forward = block + Seconds(
        products=mixer_forward,
        attention=core,
        elementwise=attention_bytes / rate,
        tensor_parallel=tp_mixer,
        context_parallel=max(0.0, exchange - core),
    )
    backward = Seconds(
        products=mixer_backward + block_backward,
        attention=ATTENTION_BACKWARD * core,
        elementwise=(attention_bytes_back + block_bytes_back) / rate,
        tensor_parallel=tp_mixer + tp_block + expert_tp,
        context_parallel=max(0.0, 2 * exchange - ATTENTION_BACKWARD * core),
        all_to_all=exposed[1],
    )
    forward_launches, backward_launches = LAUNCHES[moe]
    launch = machine.shares.launch_us * 1e-6
    return LayerTime(
        _with_host(forward, forward_launches * launch),
        _with_host(backward, backward_launches * launch),
        Seconds(attention=core),
        block,
    )


def _with_host(gpu: Seconds, host: float) -> Seconds:
    return gpu + Seconds(host=max(0.0, host - gpu.gpu))


def head_time(setup: MicrobatchSetup, machine: Machine) -> tuple[Seconds, Seconds]:
    """Returns forward and backward pass of the final norm and the vocabulary head, whose logits are read once forward,
    read and written backward; in bfloat16 also under FP8."""
    spec = setup.spec
    if spec.head != VOCABULARY:
        return Seconds(), Seconds()
    width = padded_vocabulary_size(spec, setup.layout.tp) // setup.layout.tp
    product = _Product("output_layer", setup.tokens, spec.hidden_size, width)
    half = setup.width == 2
    rate = machine.product_rate(False, half)
    trains = setup.parts.full or setup.parts.trains(["lm_head.weight"])
    forward, backward = _product_seconds(setup, machine, product, rate, trains)
    logits = setup.width * setup.tokens * width
    gather = machine.seconds("all_gather", setup.width * setup.tokens * spec.hidden_size, setup.layout, "tp")
    passes = 1 + spec.mtp_layers
    return (
        Seconds(products=forward, elementwise=logits / machine.memory_rate, tensor_parallel=gather) * passes,
        Seconds(products=backward, elementwise=2 * logits / machine.memory_rate, tensor_parallel=gather) * passes,
    )


def _mixer_products(setup: MicrobatchSetup, layer: int) -> Iterator[_Product]:
    spec = setup.spec
    t = setup.tokens
    h = spec.hidden_size
    tp = setup.layout.tp
    if spec.layer_kinds[layer].mixer == LINEAR:
        keys = 2 * spec.linear_groups * spec.linear_key_width
        values = 2 * spec.linear_values + 2 * spec.linear_heads
        yield _Product("linear in", t, h, (keys + values) // tp)
        yield _Product("linear out", t, spec.linear_values // tp, h)
    elif spec.transformer.get("multi_latent_attention"):
        r = setup.residual_tokens
        if spec.q_rank:
            yield _Product("query down", r, h, spec.q_rank)
        yield _Product("query up", t, spec.q_rank or h, spec.latent_queries // tp)
        yield _Product("key and value down", r, h, spec.latent_width)
        yield _Product("key and value up", t, spec.kv_rank, spec.latent_keys_values // tp)
        yield _Product(PROJECTION, t, setup.head_width, h)
    else:
        gate = setup.head_width if spec.transformer.get("attention_output_gate") else 0
        yield _Product(QKV, t, h, setup.head_width + 2 * setup.kv_heads * spec.head_dim + gate)
        yield _Product(PROJECTION, t, setup.head_width, h)


def _block_products(setup: MicrobatchSetup, moe: bool) -> Iterator[_Product]:
    spec = setup.spec
    h = spec.hidden_size
    t = setup.tokens
    if not moe:
        inner = spec.ffn // setup.layout.tp
        yield _Product(FC1, t, h, first_width(setup, inner))
        yield _Product(FC2, t, inner, h)
        return
    inner = spec.expert_ffn // setup.layout.etp
    experts = spec.experts // setup.layout.ep
    yield _Product("router", setup.residual_tokens, h, spec.experts)
    yield _Product(EXPERT_FC1, setup.expert_tokens, h, first_width(setup, inner), experts)
    yield _Product(EXPERT_FC2, setup.expert_tokens, inner, h, experts)
    if spec.shared_ffn:
        shared = spec.shared_ffn // setup.layout.tp
        yield _Product("shared expert 1", t, h, first_width(setup, shared))
        yield _Product("shared expert 2", t, shared, h)


def _products_time(
    setup: MicrobatchSetup, layer: int, machine: Machine, products: list[_Product]
) -> tuple[float, float]:
    """Forward and backward, adapters included."""
    rate = machine.product_rate(setup.options.model.fp8_format is not None, setup.width == 2)
    forward = 0.0
    backward = 0.0
    for product in products:
        ahead, back = _product_seconds(setup, machine, product, rate, setup.parts.full)
        forward += ahead
        backward += back
        if setup.parts.four_bits:  # dequantized for each product
            dequantized = product.inner * product.outer * product.groups * (0.5625 + setup.width)
            forward += dequantized / machine.memory_rate
            backward += dequantized / machine.memory_rate
        if adapters := len(setup.adapters(layer, product.module)):
            # products with A and B are bound by their rows: each reads the input, and they are added to the output
            rows = setup.width * product.rows * (adapters * product.inner + 2 * product.outer)
            forward += rows / machine.memory_rate
            backward += 2 * rows / machine.memory_rate
    return forward, backward


def _product_seconds(
    setup: MicrobatchSetup, machine: Machine, p: _Product, rate: float, trains: bool
) -> tuple[float, float]:
    """Forward; and the gradients of the input and, if it trains, of the weight, which are added to the main gradient:
    within Transformer Engine's product, after torch's."""
    flops = 2 * p.rows * p.inner * p.outer / rate
    operands = setup.width * p.rows * (p.inner + p.outer)
    weight = p.inner * p.outer * p.groups
    forward = max(flops, (operands + setup.width * weight) / machine.memory_rate)
    gradient = 2 if setup.options.optim.main_grads_dtype == "bf16" else MAIN_GRADIENT
    of_weight = max(flops, (operands + 2 * gradient * weight) / machine.memory_rate)
    if setup.kernels.linear == TORCH:
        of_weight += (setup.width + 2 * gradient) * weight / machine.memory_rate
    return forward, forward + (of_weight if trains else 0.0)


def _core_time(setup: MicrobatchSetup, layer: int, machine: Machine) -> float:
    """Forward pass of the scores: 2 FLOPs for each query, key before it, and element of both products; of a gated delta
    net its states."""
    spec = setup.spec
    rate = machine.attention_rate(setup.width == 2)
    mixer = spec.layer_kinds[layer].mixer
    if mixer == LINEAR:
        return 6 * setup.tokens * spec.linear_values * spec.linear_key_width / setup.layout.tp / rate
    length = setup.options.max_length
    window = spec.transformer.get("window_size")
    keys = length / 2
    if mixer == WINDOW and window and window[0] < length:
        keys = window[0] * (1 - window[0] / (2 * length))
    return 4 * setup.tokens * keys * (spec.product_width / setup.layout.tp) / rate


def _mixer_bytes(setup: MicrobatchSetup) -> tuple[float, float]:
    """Bytes read and written forward and backward: the norm before (2 and 4 times its rows), the addition to the
    residual stream (3 and 1), norms of queries and keys (2 and 4), rotation (2 and 2), and the join of their
    gradients."""
    spec = setup.spec
    w = setup.width
    residual = w * setup.residual_tokens * spec.hidden_size
    width = setup.head_width + setup.kv_heads * spec.head_dim
    heads = w * setup.tokens * width
    forward = 5.0 * residual + 2 * heads
    backward = 5.0 * residual + 4 * heads
    # a ring adds the output of each of its steps to that of the others, and the gradients of keys and values
    steps = setup.layout.cp - 1
    forward += 1.5 * steps * w * setup.tokens * setup.head_width
    backward += 1.5 * steps * 2 * (width - setup.head_width) * w * setup.tokens
    if spec.qk_norm:
        forward += 2 * heads
        backward += 4 * heads
    if spec.features.post_norm:
        forward += 2 * residual
        backward += 4 * residual
    if setup.options.model.fp8_format is not None:
        forward += 4 * setup.tokens * (spec.hidden_size + setup.head_width)
        backward += 4 * setup.tokens * (spec.hidden_size + width)
    return forward, backward


def _block_bytes(setup: MicrobatchSetup, moe: bool) -> tuple[float, float]:
    """The norm and the addition as above; the gated activation (its inputs and output; backward inputs, gradient and
    their gradients); of experts the permutation of tokens before and after each exchange."""
    spec = setup.spec
    w = setup.width
    residual = w * setup.residual_tokens * spec.hidden_size
    rows = setup.expert_tokens if moe else setup.tokens
    inner = spec.expert_ffn // setup.layout.etp if moe else spec.ffn // setup.layout.tp
    first = first_width(setup, inner)
    forward = 5 * residual + w * rows * (first + inner)
    backward = 5 * residual + w * rows * (2 * first + inner)
    if moe:
        permuted = w * rows * spec.hidden_size * (8 if setup.layout.ep > 1 else 4)
        forward += permuted
        backward += permuted
        if spec.shared_ffn:
            shared = spec.shared_ffn // setup.layout.tp
            forward += w * setup.tokens * (first_width(setup, shared) + shared)
            backward += w * setup.tokens * (2 * first_width(setup, shared) + shared)
    if spec.features.post_norm:
        forward += 2 * residual
        backward += 4 * residual
    if setup.options.model.fp8_format is not None:
        forward += 4 * rows * (spec.hidden_size + inner)
        backward += 4 * rows * (spec.hidden_size + first)
    return forward, backward


def _tp_exchange(setup: MicrobatchSetup, machine: Machine, blocks: int) -> float:
    """One pass of an attention or an MLP block: hidden states are gathered before it and scattered behind it, or
    all-reduced without sequence parallelism. The second gathering for a weight's gradient overlaps."""
    size = setup.width * setup.tokens * setup.spec.hidden_size * blocks
    layout = setup.layout
    if not layout.sequence_parallel:
        return machine.seconds("all_reduce", size, layout, "tp")
    return machine.seconds("all_gather", size, layout, "tp") + machine.seconds("reduce_scatter", size, layout, "tp")


def _context_exchange(setup: MicrobatchSetup, layer: int, machine: Machine) -> float:
    """Keys and values of the other context-parallel ranks, in a ring."""
    layout = setup.layout
    spec = setup.spec
    if layout.cp == 1 or spec.layer_kinds[layer].mixer == LINEAR:
        return 0.0
    width = 2 * setup.kv_heads * spec.head_dim
    if spec.transformer.get("multi_latent_attention"):
        width = spec.latent_queries // layout.tp + setup.head_width
    size = setup.width * setup.tokens * width * layout.cp
    return machine.seconds("all_gather", size, layout, "cp")


def _expert_exchange(setup: MicrobatchSetup, machine: Machine) -> float:
    """Tokens to their experts, or back. The flexible dispatcher sends a token once to each node that has an expert of
    its choice, and from there over NVLink to each rank; both at once, so that the slower one counts."""
    layout = setup.layout
    size = setup.width * setup.expert_tokens // layout.etp * setup.spec.hidden_size
    if setup.options.model.moe_token_dispatcher_type != "flex" or layout.ep == 1:
        return machine.seconds("all_to_all", size, layout, "ep")
    choices = setup.spec.topk
    inside = size * _places(layout.ep, choices) / choices
    nodes = machine.places(layout, "ep")
    if nodes == 1:
        return machine.seconds("all_to_all", inside, layout, "ep")
    across = machine.seconds("all_to_all", size * _places(nodes, choices) / choices, layout, "ep")
    return max(across, inside / machine.link_rate)


def _places(places: int, choices: int) -> float:
    """Return how many of `places` of equal size a token visits with so many even choices."""
    return places * (1 - (1 - 1 / places) ** choices)


def _expert_tp_exchange(setup: MicrobatchSetup, machine: Machine) -> float:
    """Tokens gathered within an expert's tensor-parallel group, and their outputs scattered."""
    size = setup.width * setup.expert_tokens * setup.spec.hidden_size
    layout = setup.layout
    return machine.seconds("all_gather", size, layout, "etp") + machine.seconds("reduce_scatter", size, layout, "etp")
