"""The setup on which the activations of a micro-batch depend: whose kernels compute, in which precision, on which
tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megaswift.memory.rank_parameters import TrainedParts
from megaswift.memory.state_bytes import HALF
from megaswift.memory.step_options import StepOptions
from megaswift.models.grouped_experts import groups_experts, torch_multiplies
from megaswift.models.spec import WINDOW, ModelSpec, RopeSpec
from megaswift.models.targets import Projection
from megaswift.parallel.layout import Layout
from megaswift.parallel.te_attention import megatron_version_at_least

TRANSFORMER_ENGINE = "transformer_engine"
TORCH = "torch"
ATTENTION_BLOCK = 1024
"""Queries of a block under a window (`engine/document_attention.py`)."""


@dataclass(frozen=True)
class ComputeKernels:
    """The kernels that compute on a device."""

    linear: str
    """Whose products, norms and experts: `transformer_engine` or `torch`."""
    attention: str
    """Whose attention."""
    dtype: str
    """`bfloat16`, `float16` or `float32`."""
    cuda: bool

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return 2 if self.dtype in HALF else 4


def scales_rotations(rope: RopeSpec) -> bool:
    """Return whether cosine and sine have a factor (YaRN, arXiv:2309.00071; LongRoPE, arXiv:2402.13753)."""
    scaling = rope.scaling or {}
    kind = scaling.get("rope_type")
    if kind not in ("yarn", "longrope"):
        return False
    if (factor := scaling.get("attention_factor")) is not None:
        return bool(factor != 1.0)
    return kind == "longrope" or not scaling.get("mscale") or scaling["mscale"] != scaling.get("mscale_all_dim")


@dataclass(frozen=True)
class MicrobatchSetup:
    """One micro-batch on a rank."""

    options: StepOptions
    spec: ModelSpec
    layout: Layout
    kernels: ComputeKernels
    parts: TrainedParts

    @property
    def width(self) -> int:
        """Bytes of an element of the activations."""
        return self.kernels.width

    @property
    def rows(self) -> int:
        """Documents of a micro-batch: rows, or both answers of pairs; packed rows count as rows."""
        return self.options.rows * self.options.objective.documents

    @property
    def positions(self) -> int:
        """Positions of a row on this rank: rows of max_length tokens, as long as the data may be."""
        return -(-self.options.max_length // self.layout.cp)

    @property
    def packed(self) -> bool:
        """Return whether the rows lie one after another in one row, as its documents."""
        return self.options.shares_rows

    @property
    def row_positions(self) -> int:
        """Positions with a cosine and a sine of their own: rows that are not packed share theirs."""
        return self.tokens if self.packed else self.positions

    @property
    def shares_angles(self) -> bool:
        """Return whether all micro-batches have the same rotary angles: Transformer Engine's attention counts within
        documents."""
        return self.kernels.attention != TORCH and self._rotates_last

    @property
    def angle_bytes(self) -> int:
        """Bytes of the rotary angles of a micro-batch: windowed layers may have theirs behind those of the others, and
        a factor on queries its own column."""
        spec = self.spec
        width = int(spec.rotated_width * spec.rope.partial) * (2 if spec.features.rope_local else 1)
        positions = self.positions if self.shares_angles else self.row_positions
        return 4 * positions * (width + (1 if spec.features.query_scale_beta else 0))

    @property
    def _rotates_last(self) -> bool:
        """Return whether Megatron-Core rotates queries and keys, right before attention."""
        latent = self.spec.transformer.get("multi_latent_attention")
        return not latent and not self.spec.features.changes_rotated_queries

    @property
    def tokens(self) -> int:
        """On this rank, each with all of its hidden state."""
        return self.rows * self.positions

    @property
    def residual_tokens(self) -> int:
        """On this rank where sequence parallelism divides them: norms, residuals, routers."""
        return -(-self.tokens // self.layout.tp) if self.layout.sequence_parallel else self.tokens

    @property
    def head_width(self) -> int:
        """Width of the queries of this rank's heads."""
        return self.spec.attention_width // self.layout.tp

    @property
    def kv_heads(self) -> int:
        """On this rank; ranks beyond the KV heads share one."""
        return max(1, self.spec.kv_heads // self.layout.tp)

    @property
    def heads(self) -> int:
        """On this rank."""
        return self.spec.heads // self.layout.tp

    @property
    def routed_tokens(self) -> int:
        """Rows that the tokens of this rank have in experts, of which each goes to `topk`. Padded to their capacity
        experts have it all."""
        even = self.residual_tokens * self.spec.topk
        factor = self.options.model.moe_expert_capacity_factor
        if factor is None:
            return even
        padded = self.options.model.moe_pad_expert_input_to_capacity
        return int(even * (factor if padded else min(1.0, factor)))

    @property
    def expert_tokens(self) -> int:
        """Rows of the products of the fullest rank's experts; expert-tensor-parallel ranks gather theirs."""
        rows = self.routed_tokens * self.layout.etp
        uneven = self.layout.ep > 1 and self.options.model.moe_expert_capacity_factor is None
        return int(rows * self.options.expert_imbalance) if uneven else rows

    @property
    def grouped_experts(self) -> bool:
        """Return whether all experts of a rank are multiplied in one product."""
        model = self.options.model
        dora = self.parts.dora
        return groups_experts(model, dora, self.spec, self.layout.etp, self.width, self.kernels.linear == TORCH)

    @property
    def sorts_tokens_twice(self) -> bool:
        """Return whether tokens are sorted by rank and then by expert: ranks exchange them, or experts have a capacity
        that is not filled up (`engine/megatron/layers/moe/dispatcher.py`)."""
        model = self.options.model
        limited = bool(model.moe_expert_capacity_factor) and not model.moe_pad_expert_input_to_capacity
        return self.layout.ep * self.layout.etp > 1 or limited

    @property
    def torch_experts(self) -> bool:
        """Return whether torch multiplies experts that are grouped (`engine/megatron/transformer_config.py`)."""
        model = self.options.model
        if torch_multiplies(model, self.kernels.linear == TORCH):
            return True
        whole = self.layout.ep == self.layout.etp == 1 and not model.moe_expert_capacity_factor
        return model.train_type == "lora" and whole and self.kernels.dtype == "bfloat16"

    def windowed(self, layer: int) -> bool:
        """Return whether a layer's attention has the model's window."""
        return self.spec.layer_kinds[layer].mixer == WINDOW

    @property
    def rotates_in_a_kernel(self) -> bool:
        """Return whether Transformer Engine's kernel rotates queries and keys."""
        pairs = self.spec.transformer.get("rotary_interleaved") and self.packed
        if pairs and not megatron_version_at_least("0.17"):
            return False
        return self.shares_angles and not scales_rotations(self.spec.rope)

    def runs(self, layer: int) -> list[tuple[int, int, bool]]:
        """(queries, keys, under a mask) of each product of torch's attention in all rows."""
        cp = self.layout.cp
        found = []
        if cp > 1:
            run = self.positions // 2
            found = [(run, run, False), (run, 2 * cp * run, True)]
        else:
            found = [(self.positions, self.positions, False)]
        window = self.spec.transformer.get("window_size")
        if window and self.windowed(layer):
            cut = []
            for queries, keys, _ in found:
                for first in range(0, queries, ATTENTION_BLOCK):
                    last = min(first + ATTENTION_BLOCK, queries)
                    before = keys - queries
                    low = max(0, before + first - window[0])
                    keys_seen = before + last - low
                    cut.append((last - first, keys_seen, keys_seen > min(window[0] + 1, last - first)))
            found = cut
        return [(queries, keys, masked) for queries, keys, masked in found for _ in range(self.rows)]

    def joins_runs(self, layer: int) -> bool:
        """Return whether torch's attention computes a row in several products, whose outputs are joined in a copy."""
        several = self.packed and self.rows > 1
        return self.kernels.attention == TORCH and (len(self.runs(layer)) > self.rows or several)

    def alike(self, layers: Iterable[int]) -> Counter[int]:
        """Returns how many of these layers are made alike and adapted alike, under the first of each kind."""
        return self.parts.alike(layers, self.spec)

    def adapters(self, layer: int, module: str) -> Sequence[Projection]:
        """Projections with an adapter in a module of a layer, `self_attention.linear_qkv`; of experts those of the
        first."""
        return self.parts.adapters.get(f"decoder.layers.{layer}.{module}", ())
