"""The interface between trainers and engines. Trainers use this protocol only, so a run on any engine gives the same
curve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megaswift.engine.diagnostics.replica_checksums import ReplicatedWeights
from megaswift.losses.contract import Addable, Batch, Loss, ModelOutputs, RequestedModelOutputs
from megaswift.parallel.layout import Layout

Receivers = Literal["rank0", "replicas", "all"]
"""Ranks that get whole tensors: the first one, the first one of each data-parallel replica, or every rank."""


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
    further: tuple[float, ...] = ()
    """Sums over all ranks of the further numbers that each passed with its micro-batches."""


StartedCount = Callable[[], GlobalBatchCounts]
"""Waits for counts that are being added up over the ranks."""
Counted = GlobalBatchCounts | None
"""The counts of micro-batches that were counted before they are trained on; None: they are counted then."""


@dataclass(frozen=True)
class Addends:
    """The sums that a batch's numbers are made of, so that those of several batches can be added up exactly."""

    terms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The weighted sum of each term of the objective, and the count by which it is divided."""
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The sum and the count of each metric that is a mean."""
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Metrics that are one of the means less another."""
    vectors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The sums of each `VectorMetric`."""
    addable: Mapping[str, Addable] = field(default_factory=dict)
    """What is made of `vectors`."""


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
        """Write this rank's files; may run in any thread, and returns when they are on disk.

        Raises:
            OSError: The files cannot be written.
        """

    def finish(self) -> FileEntries:
        """Write what comes last, once all ranks have written. Collective.

        Returns:
            The entries of this rank's files.
        """


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
    """Train one model that is spread over ranks, together with its optimizer.

    Trainers use this interface only, so a run on any engine gives the same curve.
    """

    layout: Layout
    rank: int
    kind: str
    """`megatron`, `ddp`, ... for the log."""
    vocab_size: int
    hidden_size: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""

    @property
    def kernels(self) -> str:
        """Text for the first screen: which layers compute, why, and in which precision."""

    def start_count(self, microbatches: Sequence[Batch], loss: Loss, further: Sequence[float] = ()) -> StartedCount:
        """Start to sum the counts of the global batch over the ranks. Collective; does not wait.

        Args:
            microbatches: This rank's micro-batches.
            loss: Its `counts` are summed over data-parallel ranks and micro-batches.
            further: Further numbers, which are summed over all ranks in the same reduction.

        Returns:
            A function that waits for the sums and returns them.
        """

    def prepare_ahead(self, microbatches: list[Batch]) -> list[Batch]:
        """Compute in host memory what can be computed before the step; loader threads call this.

        Args:
            microbatches: This rank's micro-batches.

        Returns:
            The same micro-batches with the results.
        """

    def train_batch(
        self,
        microbatches: Sequence[Batch],
        loss: Loss,
        lr: float,
        weight_decay: float | None = None,
        counted: Counted = None,
        before_read: Callable[[], None] | None = None,
    ) -> StepResult:
        """Run the forward and backward passes of a global batch and take one optimizer step. Collective.

        The step is skipped where a gradient is not finite.

        Args:
            microbatches: This rank's micro-batches; every data-parallel rank has the same number.
            loss: Its terms are divided by their counts over the global batch.
            lr: The learning rate of the step.
            weight_decay: The weight decay of the step; None for the configuration's.
            counted: The counts of these micro-batches from `start_count`; None: they are counted here.
            before_read: Called once, when all passes are launched, before the host waits for the numbers of the step.

        Returns:
            The numbers of the step.
        """

    def evaluate(self, microbatches: Sequence[Batch], loss: Loss) -> StepResult:
        """Compute the numbers of `train_batch` without dropout, gradients or a change of state. Collective.

        Args:
            microbatches: This rank's micro-batches.
            loss: The loss that is evaluated.

        Returns:
            The numbers, averaged as in training.
        """

    def score(self, microbatches: Sequence[Batch], needs: RequestedModelOutputs) -> list[ModelOutputs]:
        """Compute log-probabilities or other fields in evaluation mode, without use of random numbers. Collective.

        Args:
            microbatches: This rank's micro-batches.
            needs: The fields to compute.

        Returns:
            Outputs of each micro-batch in order, float32 [b, s], on every model-parallel rank.
        """

    def hidden_states(self, microbatches: Sequence[Batch]) -> list[Tensor]:
        """Compute the last hidden states at the labels of each micro-batch, in evaluation mode. Collective.

        Args:
            microbatches: This rank's micro-batches.

        Returns:
            [labels, hidden size] of each micro-batch in order, in the dtype of the products, on ranks of the last
            pipeline stage; an empty list on the others.
        """

    def head_weight(self) -> Tensor:
        """Return the whole weight of the output layer, [vocabulary, hidden size], for a student's divergence.
        Collective."""

    def keep_reference(self, on_host: bool = False) -> None:
        """Make the model as it is now the reference model.

        Args:
            on_host: Keep its values in host memory between uses.
        """

    def reference(self) -> AbstractContextManager[None]:
        """Put the reference model in place of the model for a block, which may call `score` and `evaluate`.
        Collective."""

    def move_reference(self, share: float) -> None:
        """Move the reference model towards the model: reference = share x model + (1 - share) x reference.

        Args:
            share: Between 0 and 1.
        """

    def set_teacher_head(self, weight: Tensor | None, scale: float = 1.0, softcap: float | None = None) -> None:
        """Set the head of the teacher whose last hidden states come with batches, for `ModelOutputs.divergence`.

        Args:
            weight: The weight of its output layer, [vocabulary, hidden size], whole and on any device; the engine
                copies what it needs. None: no teacher any more.
            scale: The factor of its logits.
            softcap: The bound of its logits, by tanh, after the factor.
        """

    def largest_of_teacher(self, hidden: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Compute a teacher's largest log-probabilities by the head of `set_teacher_head`, on ranks of the last
        pipeline stage. Collective over the ranks that share the vocabulary.

        Args:
            hidden: [n, hidden size of the teacher].
            k: How many; -inf fills up where the vocabulary is smaller.
            temperature: By which logits are divided.

        Returns:
            float32 [n, k], descending, and their tokens, int64 [n, k].
        """

    def hf_weights(
        self, dtype: Any = None, to: Receivers = "rank0", on_device: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights, adapters merged in, as (Hugging Face name, whole tensor). Collective.

        Args:
            dtype: The dtype of all tensors; None for the model's own.
            to: The ranks that get the tensors. The stream is empty on other ranks, which have to iterate too.
            on_device: The tensors lie on the ranks' device. Otherwise they lie in host memory if one rank gets them.
        """

    def load_hf(self, directory: Path) -> None:
        """Load weights from a Hugging Face folder; each rank reads its own slices.

        Args:
            directory: The folder, or a checkpoint of a run.

        Raises:
            WeightsError: A tensor is missing, left over or of another shape.
        """

    def random_init(self, seed: int) -> None:
        """Draw the weights from a seed."""

    def keep(self, directory: Path) -> None:
        """Prepare an engine whose weights a checkpoint will bring.

        Args:
            directory: The folder of the model on which the run of the checkpoint trains.
        """

    def export(self, folder: Path, source: Path, dtype: Any = None) -> None:
        """Write the model as a Hugging Face folder, in place of an older one. Collective.

        Args:
            folder: The folder to write.
            source: The model's original folder, for its other files and the dtype of each tensor.
            dtype: One dtype for all tensors; None for those of `source`.
        """

    def write_adapter(self, folder: Path, base: str) -> None:
        """Write the adapters of a run as a PEFT folder. Collective.

        Args:
            folder: The folder to write.
            base: The name of the base model in the folder's configuration.
        """

    def describe(self, target: Path, folder: Path) -> None:
        """Write the files that a checkpoint needs besides its tensors: config.json, tokenizer, dtypes. Called on one
        rank.

        Args:
            target: The checkpoint.
            folder: The folder of the model that trains.
        """

    def replicated_weights(self) -> list[ReplicatedWeights]:
        """Return the weights that several data-parallel ranks hold, by process group; none where weights are
        sharded."""

    def save(self, directory: Path) -> FileEntries:
        """Save weights, optimizer and the random state of every rank; all is on disk when this returns. Collective.

        Args:
            directory: The folder of the checkpoint.

        Returns:
            The entries of the files that this rank hashed while it wrote them.
        """

    def start_save(self, directory: Path) -> StartedSave:
        """Copy the state to host memory for a save that is written while training goes on (`--async_save`). Collective.

        Args:
            directory: The folder of the checkpoint.

        Returns:
            The save, whose content is fixed.
        """

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, on the same or another layout. Collective.

        Args:
            directory: The folder of the checkpoint.
        """

    def offload(self, what: frozenset[str]) -> None:
        """Free memory of the device until `onload`, for example for a sampler.

        Args:
            what: `optimizer` moves its state and drops gradients; `model` moves the weights.
        """

    def onload(self) -> None:
        """Bring back what `offload` moved, bit by bit."""

    def report(self) -> EngineSizeReport:
        """Return exact sizes of the model and its state."""
