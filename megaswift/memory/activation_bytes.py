"""Activations of a run on one rank: what micro-batches in flight keep for their backward passes, and what the largest
pass needs beside it.

Owns how layers add up: by the recompute settings, over the model chunks of a pipeline stage and over the micro-batches
that the schedule has in flight there. Stage p of P with m micro-batches: min(m, P - p) under 1F1B, and under the
interleaved schedule with v chunks min(m v, 2 (P - p - 1) + (v - 1) P + 1) passes of single chunks (Narayanan et al.
2021, arXiv:2104.04473; `megatron/core/pipeline_parallel/schedules.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaswift.memory.layer_activations import (
    first_width,
    hidden_norm_bytes,
    kept_by_block,
    kept_by_layer,
    layer_input_bytes,
    mask_bytes,
    score_bytes,
)
from megaswift.memory.microbatch_setup import MicrobatchSetup
from megaswift.models.options.model import selective_recompute_modules
from megaswift.models.spec import VOCABULARY
from megaswift.models.weights.table import padded_vocabulary_size
from megaswift.parallel.head_memory import HeadShape, megatron_engine_head_peak_bytes
from megaswift.parallel.pipeline_split import ModelChunk

BATCH = 40
"""Bytes a token: identifiers, labels and positions in 64 bits, weights, fields and masks."""
IDENTIFIERS = 8
"""Bytes a token that the embedding keeps."""
LABELS = 20
"""Bytes a token that the head and the loss keep."""
WEIGHTS = 4
"""Bytes of a token's weight in the loss, which each context-parallel rank has of the whole row."""


@dataclass(frozen=True)
class ActivationBytes:
    """At the moment of the peak."""

    kept: int
    """By the layers, of all micro-batches in flight."""
    recomputed: int
    """By the layers whose forward pass is repeated at the moment."""
    head: int
    """Kept and used by the vocabulary head, where the peak is in its pass."""
    working: int
    """Gradients of activations within a layer, gradients of its weights before they are accumulated, and weights that
    are dequantized for a product."""
    batches: int
    """Tokens of the micro-batches, and hidden states that a pipeline's schedule holds."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.kept + self.recomputed + self.head + self.working + self.batches


def activation_bytes(
    setup: MicrobatchSetup, stage: int, chunks: Sequence[ModelChunk], microbatches: int
) -> ActivationBytes:
    """Estimates the activations of a pipeline stage that holds these chunks; `microbatches` per optimizer step."""
    of_chunks = [kept_by_chunk(setup, chunk) for chunk in chunks]
    everything = max(
        sum(of_chunks[i].total * count for i, count in in_flight.items())
        for in_flight in passes_by_chunk(setup, stage, microbatches)
    )
    layers = [layer for chunk in chunks for layer in chunk.layers]
    working = max((_working(setup, layer) for layer in setup.alike(layers)), default=0)
    head = last_stage_head(setup) if any(chunk.loss for chunk in chunks) else HeadBytes(0, 0)
    batches = BATCH * setup.tokens * microbatches
    # what the head, the final norm and layers that are not recomputed kept is freed when the first layers are computed
    # again
    final = max(kept.final for kept in of_chunks)
    whole = max(kept.whole for kept in of_chunks)
    everything += shared_angle_bytes(setup)
    batches += _between_stages(setup, stage, max(passes_in_flight(setup, stage, microbatches), 1))
    again = _recomputed(setup, layers)
    moments = [
        ActivationBytes(everything, 0, head.kept + head.working, 0, batches),
        ActivationBytes(everything - final, 0, 0, working, batches),
        ActivationBytes(everything - final - whole, again, 0, working, batches),
    ]
    for layer in setup.alike(layers):
        if scores := score_bytes(setup, layer):  # the layer's MLP has had its backward pass
            kept = everything - final - (whole if again else 0) - _kept_by_block(setup, layer)
            moments.append(ActivationBytes(kept, again, 0, scores, batches))
    return max(moments, key=lambda moment: moment.total)


def shared_angle_bytes(setup: MicrobatchSetup) -> int:
    """Rotary angles that Transformer Engine's attention keeps, once for all micro-batches of a chunk."""
    full = setup.options.model.recompute_granularity == "full"
    kept = setup.shares_angles and (full or setup.rotates_in_a_kernel)
    return setup.angle_bytes * setup.layout.vpp if kept else 0


def _between_stages(setup: MicrobatchSetup, stage: int, passes: int) -> int:
    """Hidden states and gradients that a pipeline's schedule holds for the passes in flight: inputs, which under full
    recomputation the first layer keeps anyway, outputs, which only a CPU does not free, a gradient from the next stage,
    and one to the stage before."""
    last = setup.layout.pp - 1
    if not last:
        return 0
    tensors = 0
    if stage > 0:
        tensors += 1 + (passes if setup.options.model.recompute_granularity != "full" else 0)
    if stage < last:
        tensors += 1 + (0 if setup.kernels.cuda else passes)
    return tensors * layer_input_bytes(setup)


def passes_in_flight(setup: MicrobatchSetup, stage: int, microbatches: int) -> int:
    """Forward passes of model chunks whose backward pass is to come, at most. A combined schedule is one ahead."""
    pp = setup.layout.pp
    vpp = setup.layout.vpp
    ahead = int(setup.options.overlap_experts)
    if vpp == 1:
        return min(microbatches, pp - stage + ahead)
    return min(microbatches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1 + ahead)


def passes_by_chunk(setup: MicrobatchSetup, stage: int, microbatches: int) -> Iterator[Counter[int]]:
    """Yields how many passes of each of a stage's chunks are in flight, before each backward pass from the first on:
    chunks take turns of as many micro-batches as there are stages."""
    layout = setup.layout
    forward = passes_in_flight(setup, stage, microbatches)
    total = microbatches * layout.vpp
    turns = [n // layout.pp % layout.vpp for n in range(total)]
    in_flight = Counter(turns[:forward])
    for n in range(total):
        yield in_flight
        in_flight = in_flight - Counter([layout.vpp - 1 - turns[n]])
        if forward + n < total:
            in_flight[turns[forward + n]] += 1


@dataclass(frozen=True)
class ChunkKept:
    """Bytes from the forward to the backward pass of one micro-batch, without the head's."""

    inputs: int
    """Bytes of the inputs of recomputed layers, the rotary angles, and masks."""
    whole: int
    """Bytes of the other layers under full recomputation by blocks."""
    layers: int
    """Bytes of all layers otherwise."""
    final: int
    """Bytes of the norm before the head, and of layers for multi-token prediction."""
    tokens: int
    """Bytes of identifiers, labels and places of tokens, which are among the batch's and not in the total."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.inputs + self.whole + self.layers + self.final


def kept_by_chunk(setup: MicrobatchSetup, chunk: ModelChunk) -> ChunkKept:
    """Returns the bytes that one model chunk keeps."""
    m = setup.options.model
    layers = list(chunk.layers)
    angles = 0 if setup.shares_angles else setup.angle_bytes
    final = hidden_norm_bytes(setup) + _ahead_bytes(setup) if chunk.loss else 0
    embeds = chunk.embedding and setup.parts.full
    cp = setup.layout.cp
    loss = LABELS + WEIGHTS * cp + (IDENTIFIERS if cp > 1 else 0)  # with places in the whole row
    tokens = setup.tokens * (IDENTIFIERS * embeds + loss * chunk.loss)
    if m.recompute_granularity != "full":
        modules = recomputed_modules(setup)
        kept = sum(n * _all_kept(setup, layer, modules) for layer, n in setup.alike(layers).items())
        return ChunkKept(mask_bytes(setup, layers), 0, kept, final, tokens)
    every = m.recompute_num_layers or 1
    block = m.recompute_method == "block"
    inputs = min(every, len(layers)) if block else -(-len(layers) // every)
    whole = sum(n * _all_kept(setup, layer) for layer, n in setup.alike(layers[every:]).items()) if block else 0
    held = angles + mask_bytes(setup, layers) + inputs * layer_input_bytes(setup)
    return ChunkKept(held, whole, 0, final, tokens)


def recomputed_modules(setup: MicrobatchSetup) -> tuple[str, ...]:
    """Those of selective recomputation."""
    return selective_recompute_modules(setup.options.model, setup.spec.moe_layers)


def _ahead_bytes(setup: MicrobatchSetup) -> int:
    """Layers for multi-token prediction: norms of an embedding and of a hidden state, the product of both, a decoder
    layer, a norm, and what their passes of the head keep."""
    spec = setup.spec
    if not spec.mtp_layers:
        return 0
    embedding = layer_input_bytes(setup)
    head = last_stage_head(setup).kept + (IDENTIFIERS + LABELS + WEIGHTS) * setup.tokens
    if setup.options.model.recompute_granularity == "full":
        return spec.mtp_layers * (2 * embedding + head)
    inside = _all_kept(setup, spec.layer_kinds.index(spec.mtp_kind), recomputed_modules(setup))
    return spec.mtp_layers * (3 * hidden_norm_bytes(setup) + 2 * embedding + inside + head)


def last_stage_head(setup: MicrobatchSetup) -> HeadBytes:
    """With the head's weight trained or frozen."""
    trains = setup.parts.full or setup.parts.trains(["lm_head.weight"])
    return head_bytes(setup, trains)


def _recomputed(setup: MicrobatchSetup, layers: Sequence[int]) -> int:
    """By the layers, or their submodules, that are computed again at a time."""
    m = setup.options.model
    alike = setup.alike(layers)
    if m.recompute_granularity == "full":
        again = 1 if m.recompute_method == "block" else m.recompute_num_layers or 1
        largest = sorted(((_all_kept(setup, layer), n) for layer, n in alike.items()), reverse=True)
        total = 0
        for kept, n in largest:
            total += min(n, again) * kept
            again -= min(n, again)
        return total
    modules = recomputed_modules(setup)
    return max((_all_kept(setup, i) - _all_kept(setup, i, modules) for i in alike), default=0) if modules else 0


def _all_kept(setup: MicrobatchSetup, layer: int, modules: Sequence[str] = ()) -> int:
    """Kept from one call to the next: layouts that differ in other axes ask for the same."""
    layout = setup.layout
    sizes = (layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel)
    options = setup.options
    rows = (setup.rows, options.shares_rows, options.max_length)
    key = (sizes, rows, options.lora_dropout, setup.kernels, layer, tuple(modules))
    known = setup.parts.kept_by_layer
    if key not in known:
        known[key] = sum(kept_by_layer(setup, layer, modules).values())
    return known[key]


def _kept_by_block(setup: MicrobatchSetup, layer: int) -> int:
    """By a layer's MLP or experts."""
    model = setup.options.model
    modules = () if model.recompute_granularity == "full" else recomputed_modules(setup)
    return sum(kept_by_block(setup, layer, modules).values())


def _working(setup: MicrobatchSetup, layer: int) -> int:
    """Within the backward pass of an MLP, at the first matrix or at the activation behind it: gradients of its inner
    activations and of input and output, and of one weight in the dtype of the products. NF4 weights are dequantized one
    at a time."""
    spec = setup.spec
    layout = setup.layout
    h = spec.hidden_size
    w = setup.width
    full = setup.parts.full
    if spec.moe_layers[layer]:
        rows = setup.expert_tokens
        inner = spec.expert_ffn // layout.etp
        matrices = spec.experts // layout.ep
    else:
        rows = setup.tokens
        inner = spec.ffn // layout.tp
        matrices = 1
    first = first_width(setup, inner)
    weight = w * first * h
    if spec.moe_layers[layer]:
        if full and setup.grouped_experts:
            weight *= matrices  # a grouped product's gradients of all its weights
        elif not full and not setup.parts.four_bits:
            weight = 0
        return w * rows * (first + inner + 2 * h) + weight
    if not full:
        return w * rows * (first + inner + 2 * h) + (weight if setup.parts.four_bits else 0)
    # the activation's gradient is computed when the output of the activation is free, that of the weight when both are
    return max(w * rows * (first + inner + h), w * rows * (2 * h - inner) + weight)


# Memory of the vocabulary head for a micro-batch: the head's own formula, with the shapes of a run.


@dataclass(frozen=True)
class HeadBytes:
    """Bytes on a rank of the last pipeline stage."""

    kept: int
    """Between forward and backward pass."""
    working: int
    """At most beside these, within its forward or backward pass."""


def head_bytes(setup: MicrobatchSetup, trains: bool) -> HeadBytes:
    """Returns the bytes of the head for a micro-batch in which every token has a label. `trains`: whether the head's
    weight has a gradient."""
    spec = setup.spec
    tokens = setup.tokens
    width = setup.width
    hidden = tokens * spec.hidden_size * width
    if spec.head != VOCABULARY:
        read = setup.rows * spec.hidden_size * width if setup.options.objective.last_tokens else hidden
        return HeadBytes(read, hidden)
    model = setup.options.model
    shape = HeadShape(
        rows=tokens,
        hidden_size=spec.hidden_size,
        width=padded_vocabulary_size(spec, setup.layout.tp) // setup.layout.tp,
        element_bytes=width,
        fields=setup.options.objective.fields,
        float32_products=model.fp32_lm_head,
        extra_tiles=int(spec.features.logit_softcap is not None or spec.features.logit_scale != 1.0),
        weight_trained=trains,
    )
    # the head adds to float32 main gradients only
    fused = model.gradient_accumulation_fusion is not False and setup.options.optim.main_grads_dtype == "fp32"
    device = "cuda" if setup.kernels.cuda else "cpu"
    return HeadBytes(hidden + 16 * tokens, megatron_engine_head_peak_bytes(shape, device, fused))
