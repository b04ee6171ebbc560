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
from dataclasses import dataclass, replace
from functools import cache

from megaswift.memory.layer_activations import (
    hidden_norm_bytes,
    kept_by_layer,
    layer_input_bytes,
    mask_bytes,
)
from megaswift.memory.layer_passes import PassBytes, dense_layer_weight_bytes, kept_input_bytes, layer_passes
from megaswift.memory.microbatch_setup import TORCH, MicrobatchSetup
from megaswift.models.options.model import selective_recompute_modules
from megaswift.models.spec import VOCABULARY
from megaswift.models.weights.table import padded_vocabulary_size
from megaswift.parallel.head_memory import HeadShape, kept_product_bytes, megatron_engine_head_peak_bytes
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
    """Tokens and masks of the micro-batches, and hidden states that the graph or a pipeline's schedule holds."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.kept + self.recomputed + self.head + self.working + self.batches


def activation_bytes(
    setup: MicrobatchSetup, stage: int, chunks: Sequence[ModelChunk], microbatches: int
) -> ActivationBytes:
    """Estimates the activations of a pipeline stage that holds these chunks; `microbatches` per optimizer step."""
    moments = activation_moments(setup, stage, chunks, microbatches)
    if setup.options.model.uses_cuda_graphs:
        return _captured(setup, stage, chunks, microbatches, [*moments])
    return max(moments, key=lambda moment: moment.total)


def _captured(
    setup: MicrobatchSetup,
    stage: int,
    chunks: Sequence[ModelChunk],
    microbatches: int,
    moments: Sequence[ActivationBytes],
) -> ActivationBytes:
    """Return the bytes under CUDA graphs of layers, an upper bound. The graphs of all layers share one pool of memory,
    which nothing else may use: the peak of the layers and that of all else add up.

    Beside what the layers need without graphs, the pool has a buffer for the input of each chunk's pass in flight and
    one for the gradient of its output, and the gradients of one layer's weights, which are copied out of the pool
    unless they are added to main gradients (`megatron/core/transformer/cuda_graphs.py`).
    """
    layers = max(moment.kept + moment.recomputed + moment.working for moment in moments)
    buffers = (passes_in_flight(setup, stage, microbatches) + 1) * layer_input_bytes(setup)
    options = setup.options
    fused = options.model.gradient_accumulation_fusion is not False and options.optim.main_grads_dtype == "fp32"
    gradients = 0 if fused else 2 * dense_layer_weight_bytes(setup)
    batches = max(moment.batches for moment in moments)
    return ActivationBytes(layers, 0, max(moment.head for moment in moments), buffers + gradients, batches)


def activation_moments(
    setup: MicrobatchSetup, stage: int, chunks: Sequence[ModelChunk], microbatches: int
) -> Iterator[ActivationBytes]:
    """Yields the moments of a stage's passes of which one is the peak: those of the head, and the operations of the
    last layer of each kind in a model chunk."""
    of_chunks = [kept_by_chunk(setup, chunk) for chunk in chunks]
    ends = [_ends(setup, chunk) for chunk in chunks]
    fullest: dict[int, tuple[int, int]] = {}
    for in_flight, turn in passes_by_chunk(setup, stage, microbatches):
        passes = [(of_chunks[i].total * count, ends[i] * count) for i, count in in_flight.items()]
        kept, outside = (sum(sizes) for sizes in zip(*passes, strict=True))
        fullest[turn] = max(fullest.get(turn, (0, 0)), (kept, outside), key=sum)
    # micro-batches keep their masks until the end of the step
    batches = BATCH * setup.tokens * microbatches
    batches += microbatches * mask_bytes(setup, [layer for chunk in chunks for layer in chunk.layers])
    if setup.layout.sequence_parallel and setup.kernels.linear == TORCH and setup.parts.full:
        batches += setup.layout.tp * layer_input_bytes(setup)  # Megatron-Core's buffer of gathered hidden states
    for turn, (kept, outside) in fullest.items():
        chunk = chunks[turn]
        kept += shared_angle_bytes(setup)
        left_over = _left_over(setup, stage, chunk, microbatches)
        forward, backward = (batches + outside + left for left in left_over)
        if chunk.loss:
            for moment, in_forward in _head_moments(setup, kept):
                yield replace(moment, batches=forward if in_forward else backward)
        # the head, the final norm and later layers have had their backward pass
        kept += _waiting_embedding_bytes(setup, chunk) - of_chunks[turn].final
        for moment, in_forward in _layer_moments(setup, chunk, kept):
            yield replace(moment, batches=forward if in_forward else backward)


def _waiting_embedding_bytes(setup: MicrobatchSetup, chunk: ModelChunk) -> int:
    """The gradient that layers for multi-token prediction give to the model's own embedding: it waits for that of the
    first layer."""
    if not (setup.spec.mtp_layers and chunk.loss and chunk.embedding and setup.parts.full):
        return 0
    vocabulary = padded_vocabulary_size(setup.spec, setup.layout.tp) // setup.layout.tp
    return setup.width * vocabulary * setup.spec.hidden_size


def _left_over(setup: MicrobatchSetup, stage: int, chunk: ModelChunk, microbatches: int) -> tuple[int, int]:
    """Hidden states and gradients of passes that have had their backward pass, which are there in (a forward pass, a
    backward pass): variables of Megatron-Core's schedules hold a loss with the leaves of its graph until the next takes
    its place, two of them under the interleaved schedule, and the gradient that went to the stage before. An embedding
    that trains is no leaf."""
    layout = setup.layout
    hidden = layer_input_bytes(setup)
    if layout.vpp > 1 and stage == layout.pp - 1 and not chunk.loss:
        return 4 * hidden, 4 * hidden
    if microbatches * layout.vpp <= passes_in_flight(setup, stage, microbatches):
        return 0, 0
    leaf = 0 if chunk.embedding and setup.parts.full else 2 * hidden
    return leaf, hidden if stage else 0


def _head_moments(setup: MicrobatchSetup, kept: int) -> Iterator[tuple[ActivationBytes, bool]]:
    """Yields the passes of the head, and whether they are forward passes; between them those of the last layer for
    multi-token prediction.

    Args:
        kept: Bytes that all layers have kept.
    """
    spec = setup.spec
    head = last_stage_head(setup)
    others = spec.mtp_layers * head.products  # of the passes of the head before this one
    # the hidden states of which the head takes those with a label, gathered from ranks that have parts of them
    hidden = layer_input_bytes(setup)
    whole = hidden + (hidden * setup.layout.tp if setup.layout.sequence_parallel else 0)
    yield ActivationBytes(kept, 0, others + head.kept + head.forward + whole, 0, 0), True
    yield ActivationBytes(kept, 0, others + head.kept + head.backward, 0, 0), False
    if not spec.mtp_layers:
        return
    # of the gradients of the head's weight the first waits for the last
    waiting = others + head.weight
    again = setup.options.model.recompute_granularity == "full"
    modules = () if again else recomputed_modules(setup)
    like = spec.layer_kinds.index(spec.mtp_kind)
    outside = 3 * hidden_norm_bytes(setup) + 2 * hidden
    rest = kept - head.kept - (0 if again else _all_kept(setup, like, modules))
    for one in _passes(setup, like, modules, again):
        if again:
            yield ActivationBytes(rest, outside + one.kept, waiting, one.working, 0), False
        else:
            yield ActivationBytes(rest + one.kept, 0, waiting, one.working, 0), False
    yield ActivationBytes(kept - _ahead_bytes(setup), 0, head.kept + head.backward + head.weight, 0, 0), False


def _layer_moments(setup: MicrobatchSetup, chunk: ModelChunk, kept: int) -> Iterator[tuple[ActivationBytes, bool]]:
    """Yields the operations of a chunk's layers, and whether they are in a forward pass; of each kind of layer where
    most is kept.

    Args:
        kept: Bytes that all layers have kept.
    """
    modules = () if setup.options.model.recompute_granularity == "full" else recomputed_modules(setup)
    hidden = layer_input_bytes(setup)
    most: dict[object, int] = {}
    received = 0 if chunk.loss else hidden
    for layers, again in reversed(_groups(setup, chunk)):
        own = hidden if again else sum(_all_kept(setup, layer, modules) for layer in layers)
        kinds = (again, *(setup.parts.kind(layer, setup.spec) for layer in layers))
        for number in range(len(layers) if kept > most.get(kinds, 0) else 0):
            before = sum(_all_kept(setup, layer) for layer in layers[:number])
            for one in _passes(setup, layers[number], modules, again):
                if again:
                    recomputed = before + one.kept - kept_input_bytes(setup, layers[0])
                    yield ActivationBytes(kept, recomputed, 0, one.working, 0), False
                else:
                    yield ActivationBytes(kept - own + one.kept, 0, 0, one.working, 0), one.forward
        most[kinds] = kept
        if again and any(setup.spec.moe_layers[layer] for layer in layers):
            kept += hidden  # dispatchers hold routing weights, and these the group's input and its gradient
        else:
            kept -= own
        # the gradient from the next stage stays
        kept += received
        received = 0


def _groups(setup: MicrobatchSetup, chunk: ModelChunk) -> list[tuple[list[int], bool]]:
    """Return the layers of a chunk in the groups that are computed again together, or single ones that are not."""
    model = setup.options.model
    layers = list(chunk.layers)
    every = model.recompute_num_layers or 1
    if model.recompute_granularity != "full":
        return [([layer], False) for layer in layers]
    if model.recompute_method == "block":
        return [([layer], number < every) for number, layer in enumerate(layers)]
    return [(layers[first : first + every], True) for first in range(0, len(layers), every)]


def _passes(setup: MicrobatchSetup, layer: int, modules: Sequence[str], again: bool) -> list[PassBytes]:
    """Kept from one call to the next, as in `_all_kept`."""
    key = (*_key(setup, layer, modules), again)
    known = setup.parts.passes_by_layer
    if key not in known:
        known[key] = list(layer_passes(setup, layer, modules, again))
    return known[key]


def shared_angle_bytes(setup: MicrobatchSetup) -> int:
    """Rotary angles that Transformer Engine's attention keeps, once for all micro-batches of a chunk."""
    full = setup.options.model.recompute_granularity == "full"
    kept = setup.shares_angles and (full or setup.rotates_in_a_kernel)
    return setup.angle_bytes * setup.layout.vpp if kept else 0


def _ends(setup: MicrobatchSetup, chunk: ModelChunk) -> int:
    """Hidden states that are there for a pass of a chunk: its input, which the graph or a pipeline's schedule holds
    where the first layer does not keep it anyway, unless an embedding that trains has made it, and its output, which
    the schedule holds and only a GPU frees."""
    received = layer_input_bytes(setup) - kept_input_bytes(setup, chunk.layers[0]) if chunk.layers else 0
    if (chunk.embedding and setup.parts.full) or setup.options.model.recompute_granularity == "full":
        received = 0
    sent = 0 if chunk.loss or setup.kernels.cuda else layer_input_bytes(setup)
    return received + sent


def passes_in_flight(setup: MicrobatchSetup, stage: int, microbatches: int) -> int:
    """Forward passes of model chunks whose backward pass is to come, at most. A combined schedule is one ahead."""
    pp = setup.layout.pp
    vpp = setup.layout.vpp
    ahead = int(setup.options.overlap_experts)
    if vpp == 1:
        return min(microbatches, pp - stage + ahead)
    return min(microbatches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1 + ahead)


def passes_by_chunk(setup: MicrobatchSetup, stage: int, microbatches: int) -> list[tuple[Counter[int], int]]:
    """Returns (how many passes of each of a stage's chunks are in flight, the chunk that has its backward pass), each
    pair once, from the first backward pass on."""
    forward = passes_in_flight(setup, stage, microbatches)
    return _passes_by_chunk(setup.layout.pp, setup.layout.vpp, forward, microbatches)


@cache
def _passes_by_chunk(pp: int, vpp: int, forward: int, microbatches: int) -> list[tuple[Counter[int], int]]:
    """Chunks take turns of as many micro-batches as there are stages."""
    total = microbatches * vpp
    turns = [n // pp % vpp for n in range(total)]
    in_flight = Counter(turns[:forward])
    found: dict[object, tuple[Counter[int], int]] = {}
    for n in range(total):
        turn = vpp - 1 - turns[n]
        found.setdefault((frozenset(in_flight.items()), turn), (in_flight, turn))
        in_flight = in_flight - Counter([turn])
        if forward + n < total:
            in_flight[turns[forward + n]] += 1
    return list(found.values())


@dataclass(frozen=True)
class ChunkKept:
    """Bytes from the forward to the backward pass of one micro-batch, without the head's."""

    inputs: int
    """Bytes of the inputs of recomputed layers, and the rotary angles."""
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
        return ChunkKept(0, 0, kept, final, tokens)
    every = m.recompute_num_layers or 1
    block = m.recompute_method == "block"
    inputs = min(every, len(layers)) if block else -(-len(layers) // every)
    whole = sum(n * _all_kept(setup, layer) for layer, n in setup.alike(layers[every:]).items()) if block else 0
    held = angles + inputs * layer_input_bytes(setup)
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


def _all_kept(setup: MicrobatchSetup, layer: int, modules: Sequence[str] = ()) -> int:
    """Kept from one call to the next: layouts that differ in other axes ask for the same."""
    key = _key(setup, layer, modules)
    known = setup.parts.kept_by_layer
    if key not in known:
        known[key] = sum(kept_by_layer(setup, layer, modules).values())
    return known[key]


def _key(setup: MicrobatchSetup, layer: int, modules: Sequence[str]) -> tuple[object, ...]:
    """All that the bytes of a layer depend on."""
    layout = setup.layout
    sizes = (layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel)
    options = setup.options
    rows = (setup.rows, options.shares_rows, options.max_length, options.expert_imbalance)
    return (sizes, rows, options.lora_dropout, setup.kernels, layer, tuple(modules))


# Memory of the vocabulary head for a micro-batch: the head's own formula, with the shapes of a run.


@dataclass(frozen=True)
class HeadBytes:
    """Bytes on a rank of the last pipeline stage."""

    kept: int
    """Between forward and backward pass."""
    forward: int
    """At most beside these, within its forward pass."""
    backward: int
    """The same within its backward pass."""
    products: int = 0
    """Products among these, which are there between both passes."""
    weight: int = 0
    """Gradient that autograd gets for the weight."""


def head_bytes(setup: MicrobatchSetup, trains: bool) -> HeadBytes:
    """Returns the bytes of the head for a micro-batch in which every token has a label. `trains`: whether the head's
    weight has a gradient."""
    spec = setup.spec
    tokens = setup.tokens
    width = setup.width
    hidden = tokens * spec.hidden_size * width
    if spec.head != VOCABULARY:
        read = setup.rows * spec.hidden_size * width if setup.options.objective.last_tokens else hidden
        return HeadBytes(read, hidden, hidden)
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
    products = kept_product_bytes(shape, device)
    weight = shape.weight_elements * width if trains else 0
    return HeadBytes(hidden + 16 * tokens, *megatron_engine_head_peak_bytes(shape, device, fused), products, weight)
