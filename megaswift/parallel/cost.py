"""What a layout costs: parameters of every rank, and the bytes of weights, gradients and optimizer state. Pure arithmetic.

Owns the counts by which a layout can be judged before anything is built. The engine measures its own buffers exactly
(`Engine.report`); these numbers leave out the few elements by which buffers are padded. Activations are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megaswift.parallel.layout import Layout
from megaswift.parallel.shape import ModelShape
from megaswift.parallel.stages import Chunk, Split, stage_chunks

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAIN_BYTES = 4
"""Gradients, moments and main weights are float32."""


@dataclass(frozen=True)
class Precision:
    """What is stored for each parameter."""

    dtype: str = "bfloat16"
    """Of weights: a key of `BYTES`."""
    moments: int = 2
    """Float32 numbers an optimizer keeps for each parameter: 2 for Adam, 1 for SGD with momentum."""
    distributed_optimizer: bool = True


@dataclass(frozen=True)
class RankParameters:
    """Parameters that a rank holds: those of experts are replicated over other ranks than the dense ones."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts

    def __add__(self, other: RankParameters) -> RankParameters:
        return RankParameters(self.dense + other.dense, self.experts + other.experts)


@dataclass(frozen=True)
class RankBytes:
    """Memory of one rank that does not depend on the batch, in bytes."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def parameters(shape: ModelShape) -> int:
    """Parameters of the model; a tied output layer counts once."""
    chunk = Chunk(range(shape.num_layers), embedding=True, loss=True)
    return chunk_parameters(shape, Layout(1), chunk, shape.vocab_size).total


def flop_parameters(shape: ModelShape) -> int:
    """Parameters in the FLOP rule: those active for a token, without the input embedding (a tied one works as the output layer)."""
    idle = (shape.experts - shape.topk) * _expert(shape, 1) * (shape.num_layers - shape.dense_layers)
    return parameters(shape) - idle - (0 if shape.tied else shape.vocab_size * shape.hidden_size)


def stage_parameters(shape: ModelShape, layout: Layout, padded_vocab: int, split: Split | None = None) -> list[RankParameters]:
    """[pp]: what each rank of a stage holds; `padded_vocab` rows are shared by tp ranks. All ranks of one stage hold as many."""
    none = RankParameters(0, 0)
    stages = stage_chunks(shape.num_layers, layout, split)
    return [sum((chunk_parameters(shape, layout, chunk, padded_vocab) for chunk in stage), none) for stage in stages]


def stage_bytes(shape: ModelShape, layout: Layout, padded_vocab: int, precision: Precision, split: Split | None = None) -> list[RankBytes]:
    """[pp]: bytes on each rank of a stage."""
    return [rank_bytes(held, layout, precision) for held in stage_parameters(shape, layout, padded_vocab, split)]


def rank_bytes(held: RankParameters, layout: Layout, precision: Precision) -> RankBytes:
    """Weights and float32 gradients in whole; moments and, below float32, float32 main weights in the optimizer.

    The distributed optimizer splits its state over the ranks that hold the same parameters: dp x cp, for experts edp."""
    width = BYTES[precision.dtype]
    state = MAIN_BYTES * (precision.moments + (width < MAIN_BYTES))
    owned = held.total
    if precision.distributed_optimizer:
        owned = ceil(held.dense / layout.size("dp-cp")) + ceil(held.experts / layout.edp)
    return RankBytes(held.total * width, held.total * MAIN_BYTES, owned * state)


def chunk_parameters(shape: ModelShape, layout: Layout, chunk: Chunk, padded_vocab: int) -> RankParameters:
    """What a rank holds of one model chunk. With a tied output layer the last stage has a copy of the embedding."""
    vocabulary = padded_vocab // layout.tp * shape.hidden_size
    dense = _norm(shape) * chunk.loss
    copies = chunk.embedding + chunk.loss
    dense += vocabulary * (min(1, copies) if shape.tied else copies)
    experts = 0
    for layer in chunk.layers:
        dense += _attention(shape, layout.tp) + 2 * _norm(shape)
        if shape.is_moe(layer):
            dense += shape.experts * shape.hidden_size + _shared(shape, layout.tp)
            experts += shape.experts // layout.ep * _expert(shape, layout.etp)
        else:
            dense += _mlp(shape, shape.ffn, layout.tp)
    return RankParameters(dense, experts)


def _norm(shape: ModelShape) -> int:
    return shape.hidden_size * (2 if shape.norm_bias else 1)


def _attention(shape: ModelShape, tp: int) -> int:
    """Queries, keys and values split by heads, the output projection by its inputs; biases of inputs-split layers are whole."""
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim // tp
    weights = rows * shape.hidden_size + shape.hidden_size * shape.heads * shape.head_dim // tp
    biases = rows * shape.qkv_bias + shape.hidden_size * shape.linear_bias
    return weights + biases + 2 * shape.head_dim * shape.qk_norm


def _mlp(shape: ModelShape, width: int, tp: int) -> int:
    up = width // tp * (2 if shape.gated else 1)
    return up * shape.hidden_size + shape.hidden_size * width // tp + (up + shape.hidden_size) * shape.linear_bias


def _expert(shape: ModelShape, etp: int) -> int:
    return _mlp(shape, shape.expert_ffn, etp)


def _shared(shape: ModelShape, tp: int) -> int:
    return _mlp(shape, shape.shared_ffn, tp) + shape.hidden_size * shape.shared_gate if shape.shared_ffn else 0
