"""What the activations of a micro-batch depend on: whose kernels compute, in which precision, on which tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megaswift.memory.rank_parameters import TrainedParts
from megaswift.memory.state_bytes import HALF
from megaswift.memory.step_options import StepOptions
from megaswift.models.grouped_experts import groups_experts
from megaswift.models.spec import WINDOW, ModelSpec
from megaswift.models.targets import Projection
from megaswift.parallel.layout import Layout

TRANSFORMER_ENGINE = "transformer_engine"
TORCH = "torch"


@dataclass(frozen=True)
class ComputeKernels:
    """What computes on a device."""

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
    def row_positions(self) -> int:
        """Positions of a row on this rank where documents may share one."""
        return self.tokens if self.options.shares_rows else self.positions

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
    def expert_tokens(self) -> int:
        """Rows of the products of the fullest rank's experts: each token goes to `topk` experts, and
        expert-tensor-parallel ranks gather theirs. Padded to their capacity they have it all."""
        even = self.residual_tokens * self.spec.topk * self.layout.etp
        factor = self.options.model.moe_expert_capacity_factor
        if factor is None:
            return int(even * self.options.expert_imbalance) if self.layout.ep > 1 else even
        padded = self.options.model.moe_pad_expert_input_to_capacity
        return int(even * (factor if padded else min(1.0, factor)))

    @property
    def grouped_experts(self) -> bool:
        """Whether all experts of a rank are multiplied in one product."""
        model = self.options.model
        dora = self.parts.dora
        return groups_experts(model, dora, self.spec, self.layout.etp, self.width, self.kernels.linear == TORCH)

    def windowed(self, layer: int) -> bool:
        """Whether a layer's attention has the model's window."""
        return self.spec.layer_kinds[layer].mixer == WINDOW

    def alike(self, layers: Iterable[int]) -> Counter[int]:
        """Returns how many of these layers are made alike and adapted alike, under the first of each kind."""
        return self.parts.alike(layers, self.spec)

    def adapters(self, layer: int, module: str) -> Sequence[Projection]:
        """Projections with an adapter in a module of a layer, `self_attention.linear_qkv`; of experts those of the
        first."""
        return self.parts.adapters.get(f"decoder.layers.{layer}.{module}", ())
