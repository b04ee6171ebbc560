"""Counts what exists only while an operation of a layer runs, beside the tensors that the layer keeps.

Owns the formulas, one line an operation: outputs that nothing keeps, gradients between two operations, gradients of
weights before they are accumulated, float32 copies, dequantized weights. An operation's forward pass finds what the
layer keeps up to its input; so does its backward pass, for what later operations kept is free by then. Letters as in
`layer_activations.py`; J is the width of queries, keys and values together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megaswift.memory.layer_activations import (
    BEHIND_ATTENTION,
    BEHIND_MLP,
    DELTA_NET,
    EXPERT_FC1,
    EXPERT_FC2,
    FC1,
    FC2,
    PROJECTION,
    QKV,
    Kept,
    first_width,
    joined_width,
    keeps_input,
    kept_by_attention,
    kept_by_block,
    layer_input_bytes,
)
from megaswift.memory.microbatch_setup import TORCH, MicrobatchSetup
from megaswift.models.qlora import BAND
from megaswift.models.spec import LINEAR

CORE = ("queries", "keys", "values", "attention output", "padded output", "probabilities", "log-sum-exp")
"""What attention keeps between its projections."""
SOFTCAP_CHUNK = 1 << 26
"""Bytes of the scores that are computed at a time under a soft cap (`engine/document_attention.py`)."""
GATHERED = (QKV, FC1)
"""Products whose inputs tensor-parallel ranks gather under sequence parallelism."""
SUMMED = (PROJECTION, FC2)
"""Products of which tensor-parallel ranks have one term each."""


@dataclass(frozen=True)
class Operation:
    """A step of a layer's passes."""

    after: str | tuple[str, ...]
    """How the last tensors begin that are kept while it runs."""
    forward: int
    """Bytes beside them in the forward pass, without the residual stream."""
    backward: int
    """The same in the backward pass."""


@dataclass(frozen=True)
class PassBytes:
    """At an operation of the forward or backward pass of a layer."""

    kept: int
    working: int
    forward: bool


def kept_input_bytes(setup: MicrobatchSetup, layer: int) -> int:
    """Returns the bytes of hidden states that a layer keeps as it is given them. Torch's norms keep a copy in float32
    instead; without a norm the projection keeps its input, if anything trains that needs it."""
    if setup.spec.features.pre_norm:
        kept = setup.kernels.linear != TORCH or setup.width == 4
    else:
        kept = kept_by_attention(setup, layer, False).get(f"{QKV} input", 0) > 0
    return layer_input_bytes(setup) if kept else 0


def layer_passes(setup: MicrobatchSetup, layer: int, recomputed: Sequence[str], again: bool) -> Iterator[PassBytes]:
    """Yields the bytes of a layer at each operation of its passes.

    Args:
        recomputed: Submodules that are computed again (`--recompute_modules`): whole in their own backward pass.
        again: Whether the whole layer is computed again. Its output and the gradient of that are then there, and its
            input is what the recomputed block has kept.
    """
    residual = layer_input_bytes(setup)
    # hidden states that are there beside the kept tensors, before attention or the MLP
    before = residual - kept_input_bytes(setup, layer)
    attention = kept_by_attention(setup, layer, "core_attn" in recomputed)
    block = kept_by_block(setup, layer)
    output = residual if again or {"mlp", "moe"} & set(recomputed) else 0
    if "mlp" in recomputed and not setup.spec.moe_layers[layer]:
        output += before  # the MLP's input, as it was given
    first = sum(attention.values())
    for op, kept in _kept_until(block, block_operations(setup, layer)):
        forward = op.forward + (residual if again else before) + before
        yield PassBytes(first + kept, forward, True)
        yield PassBytes(first + kept, op.backward + residual + output, False)
    output = residual if again else 0
    core = DELTA_NET if setup.spec.layer_kinds[layer].mixer == LINEAR else CORE
    core_again = 0
    if "core_attn" in recomputed:
        whole = kept_by_attention(setup, layer, False)
        core_again = sum(whole[name] for name in whole if name in core) + core_output_bytes(setup, layer)
    for op, kept in _kept_until(attention, attention_operations(setup, layer)):
        forward = op.forward + (residual if again else before)
        yield PassBytes(kept, forward, True)
        if op.after == core:
            kept += core_again
        yield PassBytes(kept, op.backward + residual + output, False)


def _kept_until(kept: Kept, operations: Iterator[Operation]) -> Iterator[tuple[Operation, int]]:
    """Yields each operation with the bytes of the tensors up to the last that it finds."""
    names = list(kept)
    for op in operations:
        found = [i for i, name in enumerate(names) if name.startswith(op.after)]
        if found:
            yield op, sum(kept[name] for name in names[: found[-1] + 1])


def _norm(setup: MicrobatchSetup, name: str, elements: int) -> Operation:
    """Torch's is not fused: the gradients of both factors and of the mean of squares, the power of the input, its
    product with 2 and with that gradient, all in float32."""
    return Operation(f"{name} 1/rms", 0, (5 * 4 if setup.kernels.linear == TORCH else setup.width) * elements)


def _product(
    setup: MicrobatchSetup, layer: int, module: str, rows: int, widths: tuple[int, int], matrices: int = 1
) -> Operation:
    """A linear layer: its output, in parts and joined where there are adapters, and an input that nothing keeps.
    Backward gradients of output, input and one weight. NF4 weights are dequantized, with codes in 32 bits and values in
    float32 for a band of them.

    Args:
        widths: Of input and output on this rank.
        matrices: How many there are, of whose weights one product makes all gradients.
    """
    w = setup.width
    inputs, outputs = widths
    adapters = len(setup.adapters(layer, module))
    copies = 3 if adapters else 1
    if adapters > 1 and matrices > 1:  # with what the joined parts were made of
        copies = 4
    weight = w * matrices * inputs * outputs if setup.parts.full else 0
    dequantized = w * inputs * outputs if setup.parts.four_bits else 0
    codes = 6 * min(inputs * outputs, BAND["cuda" if setup.kernels.cuda else "cpu"]) if setup.parts.four_bits else 0
    forward = w * rows * outputs * copies
    backward = w * rows * outputs + max(w * rows * inputs + max(weight, dequantized), dequantized + codes)
    if module in SUMMED and setup.layout.sequence_parallel:  # over ranks, which then have a part of the rows each
        own = rows // setup.layout.tp
        forward += w * outputs * (max(rows + own, copies * own) - copies * rows)
    forward = max(forward, dequantized + max(w * rows * outputs, codes))
    if module in GATHERED + SUMMED and not keeps_input(setup, layer, module):
        forward += w * inputs * (setup.residual_tokens if module in GATHERED else rows)
    return Operation((f"{module} input", f"adapters of {module}"), forward, backward)


def block_operations(setup: MicrobatchSetup, layer: int) -> Iterator[Operation]:
    """Yields the operations of an MLP or of the experts of a layer."""
    spec = setup.spec
    h = spec.hidden_size
    r = setup.residual_tokens
    if spec.features.pre_norm:
        yield _norm(setup, "mlp norm", r * h)
    yield from _experts(setup, layer) if spec.moe_layers[layer] else _mlp(setup, layer)
    if spec.features.post_norm:
        yield _norm(setup, BEHIND_MLP, r * h)


def _mlp(setup: MicrobatchSetup, layer: int) -> Iterator[Operation]:
    spec = setup.spec
    t = setup.tokens
    h = spec.hidden_size
    f = spec.ffn // setup.layout.tp
    first = first_width(setup, f)
    yield _product(setup, layer, FC1, t, (h, first))
    yield _activation(setup, "inner", t, f)
    yield _product(setup, layer, FC2, t, (f, h))


def _activation(setup: MicrobatchSetup, after: str, rows: int, inner: int) -> Operation:
    """Gradients of its output and input, and torch's activated gate, or of a square its power and twice that."""
    factors = 0
    if setup.kernels.linear == TORCH:
        factors = 1 if setup.spec.gated else 2
    return Operation(after, 0, setup.width * rows * (first_width(setup, inner) + (1 + factors) * inner))


def _experts(setup: MicrobatchSetup, layer: int) -> Iterator[Operation]:
    """Experts in one product, or one after another: these share the gradient of all outputs, which were joined.

    The factor of routing is in float32, and so are its product with the activation and all gradients there.
    """
    spec = setup.spec
    layout = setup.layout
    m = setup.expert_tokens
    w = setup.width
    h = spec.hidden_size
    e = spec.expert_ffn // layout.etp
    experts = spec.experts // layout.ep
    together = setup.grouped_experts or experts == 1
    rows = m if together else -(-m // experts)
    matrices = experts if together else 1
    others = 0 if together else w * m * h
    # in the forward pass tokens before and after their exchange, and the output of shared experts
    there = layer_input_bytes(setup) if spec.shared_ffn else 0
    if not keeps_input(setup, layer, EXPERT_FC1):
        there += w * m * h
    if setup.sorts_tokens_twice:
        there += w * h * setup.routed_tokens
        there += w * h * m // layout.etp if layout.ep > 1 and experts > 1 else 0
    first = _product(setup, layer, EXPERT_FC1, rows, (h, first_width(setup, e)), matrices)
    yield replace(first, forward=first.forward + there + others, backward=first.backward + others)
    unit = _activation(setup, "inner", rows, e)
    yield replace(unit, backward=unit.backward + others)
    if setup.kernels.linear == TORCH:
        half = w if w < 4 else 0
        yield Operation("unweighted activation", there + others + 4 * rows * e, others + (12 + half) * rows * e)
    second = _product(setup, layer, EXPERT_FC2, rows, (e, h), matrices)
    outputs = w * h * (2 * m if setup.sorts_tokens_twice or others else m)
    if layout.etp > 1:  # summed over ranks in float32
        outputs += 4 * h * (m + m // layout.etp)
    weighted = 0 if keeps_input(setup, layer, EXPERT_FC2) else w * rows * e
    forward = there + max(second.forward + weighted, outputs)
    yield replace(second, forward=forward, backward=second.backward + others)


def attention_operations(setup: MicrobatchSetup, layer: int) -> Iterator[Operation]:
    """Yields the operations of attention."""
    spec = setup.spec
    h = spec.hidden_size
    r = setup.residual_tokens
    t = setup.tokens
    w = setup.width
    a = setup.head_width
    if spec.features.pre_norm:
        yield _norm(setup, "attention norm", r * h)
    latent = bool(spec.transformer.get("multi_latent_attention"))
    linear = spec.layer_kinds[layer].mixer == LINEAR
    if not latent and not linear:
        k = setup.kv_heads * spec.head_dim
        j = joined_width(setup)
        product = _product(setup, layer, QKV, t, (h, j))
        yield replace(product, backward=max(product.backward, 2 * w * t * j))  # the gradient is joined of parts
        if spec.qk_norm:
            query = _norm(setup, "query norm", t * a)
            yield Operation(query.after, 0, query.backward + 2 * w * t * k)
            key = _norm(setup, "key norm", t * k)
            yield Operation(key.after, 0, key.backward + w * t * (a + k))
    if linear:
        # the output, in float32 too; its gradient, that in float32 and its products with both factors
        output = core_output_bytes(setup, layer)
        yield Operation(DELTA_NET, output * (w + 4) // w, output * (w + 12) // w)
    else:
        yield _core(setup, layer)
        yield _product(setup, layer, PROJECTION, t, (a, h))
    if spec.features.post_norm:
        yield _norm(setup, BEHIND_ATTENTION, r * h)


def dense_layer_weight_bytes(setup: MicrobatchSetup) -> int:
    """Returns the bytes of the matrices of a layer with attention and an MLP, on this rank."""
    h = setup.spec.hidden_size
    f = setup.spec.ffn // setup.layout.tp
    return setup.width * h * (joined_width(setup) + setup.head_width + first_width(setup, f) + f)


def core_output_bytes(setup: MicrobatchSetup, layer: int) -> int:
    """Returns the bytes of what lies between attention and its output projection."""
    spec = setup.spec
    linear = spec.layer_kinds[layer].mixer == LINEAR
    return setup.width * setup.tokens * (spec.linear_values // setup.layout.tp if linear else setup.head_width)


def _core(setup: MicrobatchSetup, layer: int) -> Operation:
    """Attention, without scores where a kernel hides them: gradients of output, queries, and keys and values of all
    ranks. Torch's has scores of one run of queries under a soft cap, whose chunks of queries are computed again, and
    with unequal widths of keys and values on a CPU; of packed documents one after another."""
    spec = setup.spec
    w = setup.width
    queries = w * setup.tokens * setup.head_width
    keys = setup.tokens * setup.layout.cp * setup.head_width
    if setup.kernels.attention != TORCH:
        return Operation(CORE, 0, 2 * queries + 2 * w * setup.tokens * setup.kv_heads * spec.head_dim)
    rows = 1 if setup.packed else setup.rows
    seen = max(run[0] * run[1] for run in setup.runs(layer))
    scores = 4 * rows * setup.heads * seen
    if spec.features.attention_softcap is not None:  # sums of the gradients of keys and values are in float32
        return Operation(CORE, 0, 2 * queries + 5 * min(SOFTCAP_CHUNK, scores) + 8 * keys)
    if spec.transformer.get("multi_latent_attention") and not setup.kernels.cuda:
        # the forward pass has a mask in float32 too, queries and keys of a run before they are scaled, and all three
        # as they were given
        width = spec.latent_queries // setup.layout.tp
        given = w * setup.tokens * (2 * width + setup.head_width) if w < 4 else 0
        forward = scores + 4 * seen + 2 * 4 * rows * setup.positions * width + given
        return Operation(CORE, forward, 2 * scores + queries)
    return Operation(CORE, 0, 2 * queries + 2 * w * keys)
