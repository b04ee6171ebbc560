"""The interface between trainers and engines. Trainers use this protocol only, so a run on any engine gives the same
curve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megaswift.engine.replica_checksums import ReplicatedWeights
from megaswift.losses.contract import Batch, Loss, ModelOutputs, RequestedModelOutputs
from megaswift.parallel.layout import Layout


@dataclass(frozen=True)
class MicrobatchLossAndSamples:
    """One micro-batch of a step, to name what a loss came from."""

    loss: float
    """Its share of the objective, which is divided by the counts of the global batch."""
    samples: tuple[int, ...]
    """Numbers of its samples in the data set, from 0; empty where they have none."""


@dataclass(frozen=True)
class GlobalBatchCounts:
    """Sums over data-parallel ranks and micro-batches, context-parallel replicas once."""

    counts: Mapping[str, float]
    tokens: int
    label_tokens: int
    microbatches: int
    """Those with any token: fillers of uneven ends do not count."""
    beside: tuple[float, ...] = ()
    """Sums over all ranks of what each passed beside its micro-batches."""


StartedCount = Callable[[], GlobalBatchCounts]
"""Waits for counts that are being added up over the ranks."""
Counted = GlobalBatchCounts | None
"""The counts of micro-batches that were counted before they are trained on; None: they are counted then."""


@dataclass(frozen=True)
class Addends:
    """What a batch's numbers are made of, so that those of several batches can be added up exactly."""

    terms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The weighted sum of each term of the objective, and the count by which it is divided."""
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The sum and the count of each metric that is a mean."""
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Metrics that are one of the means less another."""


@dataclass(frozen=True)
class StepResult:
    """The numbers of one optimizer step or one evaluation, the same on every rank where a field does not say
    otherwise."""

    loss: float
    """Objective of the global batch, without auxiliary, z and MTP losses."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The terms under their names when there are several, the algorithm's own metrics, auxiliary losses."""
    grad_norm: float | None = None
    """Before clipping, each parameter counted once; None in evaluation."""
    skipped: bool = False
    """True when the step was not taken because a gradient was not finite."""
    tokens: int = 0
    label_tokens: int = 0
    counts: Mapping[str, float] = field(default_factory=dict)
    parts: Sequence[MicrobatchLossAndSamples] = ()
    """This rank's micro-batches, on ranks of the last pipeline stage: not the same on every rank."""
    compute_seconds: float = 0.0
    """Seconds of this rank's own forward and backward passes (`compute_time`): not the same on every rank."""
    loss_scale: float | None = None
    """By which the loss of this step was multiplied in float16."""
    loss_scale_falling: bool = False
    """Skipped in float16 while the loss scale is above its minimum: a smaller one may fit."""
    addends: Addends = Addends()


FileEntries = dict[str, dict[str, Any]]
"""Name of a file in the folder -> its `bytes` and `sha256`."""


class StartedSave(Protocol):
    """A save whose content is fixed and not yet written."""

    def write(self) -> None:
        """This rank's files, on disk when this returns; in any thread. OSError where they cannot be written."""

    def finish(self) -> FileEntries:
        """What is written once all ranks have written. The entries of this rank's files. Collective."""


@dataclass(frozen=True)
class EngineSizeReport:
    """Exact numbers for the first screen. Bytes are of the largest rank."""

    parameters_total: int
    parameters_per_rank: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    flops_per_token_parameters: int
    """Parameters that count in the FLOP rule: all active ones but the input embedding; frozen ones by two thirds (no
    weight gradient)."""
    parameters_trained: int | None = None
    """The number of parameters that train; None: all of them."""
    forward_parameters: int | None = None
    """Those of the FLOP rule in a forward pass alone; None: the same."""
    host_bytes: int = 0
    """Optimizer state that was moved to host memory; not among `optimizer_bytes`."""


class Engine(Protocol):
    """A model spread over ranks, with its optimizer."""

    layout: Layout
    rank: int
    kind: str
    """`megatron`, `ddp`, ... for the log."""
    vocab_size: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""

    @property
    def kernels(self) -> str:
        """For the first screen: which layers, why, and the precision."""

    def start_count(self, microbatches: Sequence[Batch], loss: Loss, beside: Sequence[float] = ()) -> StartedCount:
        """The counts of the global batch, and `beside` added up over all ranks in the same reduction. Collective."""

    def prepare_ahead(self, microbatches: list[Batch]) -> list[Batch]:
        """The same micro-batches with what the engine computes of them in host memory, for loader threads."""

    def train_batch(
        self,
        microbatches: Sequence[Batch],
        loss: Loss,
        lr: float,
        weight_decay: float | None = None,
        counted: Counted = None,
        before_read: Callable[[], None] | None = None,
    ) -> StepResult:
        """Forward, backward and one optimizer step (or a skipped one) over this rank's micro-batches. `counted`: of
        `start_count` for them; None: they are counted here. `before_read` is called once, with all passes launched,
        before the host waits for the step's numbers."""

    def evaluate(self, microbatches: Sequence[Batch], loss: Loss) -> StepResult:
        """The same numbers, no gradient, no state touched."""

    def score(self, microbatches: Sequence[Batch], needs: RequestedModelOutputs) -> list[ModelOutputs]:
        """Evaluation mode, no RNG use, input order, on every model-parallel rank."""

    def keep_reference(self, on_host: bool = False) -> None:
        """From now on `reference` is the model as it is now; `on_host`: its values lie in host memory between uses."""

    def reference(self) -> AbstractContextManager[None]:
        """The reference model for the length of a block: `score` and `evaluate` inside it, never `train_batch`.
        Collective."""

    def move_reference(self, share: float) -> None:
        """reference = share x model + (1 - share) x reference."""

    def hf_weights(
        self, dtype: Any = None, everywhere: bool = False, on_device: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Streamed (Hugging Face name, full tensor), adapters merged in: export and rollout sync.

        Collective; rank 0 gets tensors, or every rank; in host memory, or on the ranks' device.
        """

    def load_hf(self, directory: Path) -> None:
        """Weights from a Hugging Face folder, each rank reading its own slices."""

    def random_init(self, seed: int) -> None:
        """Weights from the seed."""

    def keep(self, directory: Path) -> None:
        """No weights yet: a checkpoint of a run on the model in `directory` brings them."""

    def export(self, folder: Path, source: Path, dtype: Any = None) -> None:
        """A Hugging Face folder, each tensor in the dtype that it has in `source`, or all in `dtype`. Replaces an older
        one. Collective."""

    def write_adapter(self, folder: Path, base: str) -> None:
        """The PEFT folder of a run with adapters on the model named `base`. Collective."""

    def describe(self, target: Path, folder: Path) -> None:
        """The files that tell what a checkpoint is of (config.json, tokenizer, dtypes), from the model in `folder`. On
        one rank."""

    def replicated_weights(self) -> list[ReplicatedWeights]:
        """The weights that several data-parallel ranks hold, by their process groups; none where they are sharded."""

    def save(self, directory: Path) -> FileEntries:
        """Sharded state: weights, optimizer, RNG of every rank, on disk when this returns. The entries of files that
        this rank has hashed as it wrote them. Collective."""

    def start_save(self, directory: Path) -> StartedSave:
        """The same from copies in host memory, written while training goes on (`--async_save`). Collective."""

    def load(self, directory: Path) -> None:
        """The inverse of `save`, on the same or another layout."""

    def offload(self, what: frozenset[str]) -> None:
        """`optimizer` (its state, and gradients, which are dropped) or `model` (the weights) leave the device until
        `onload`."""

    def onload(self) -> None:
        """Everything is back, bit by bit."""

    def report(self) -> EngineSizeReport:
        """Exact sizes for the first screen."""
