"""`--precompute_ref_log_probs`: scores all rows with the reference once, before the first step.

Owns where the numbers of a row stand. Nothing is left of the reference itself then, and a step is a pass shorter. On
every rank, four bytes for each token with a label; a resumed run scores again, by the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megaswift import distributed, log
from megaswift.data.batches.loader import EvaluationSource
from megaswift.data.preference.collate import PreferenceDataset
from megaswift.data.prompts.collate import scatter_completion_values
from megaswift.losses.contract import Batch

Score = Callable[[Sequence[Batch]], list[torch.Tensor]]
"""Log-probabilities [b, s] of each micro-batch under the reference."""
TELL_EVERY = 60.0
"""Seconds between lines about a long pass."""


@dataclass(frozen=True)
class PrecomputedReferenceLogprobs:
    """The numbers of one set of rows."""

    samples: np.ndarray
    """int64 [n], ascending: rows of the data sets, each once however often it is trained on."""
    edges: np.ndarray
    """int64 [n + 1]: where the numbers of a row begin, its documents one after the other."""
    values: torch.Tensor
    """float32 [edges[-1]]."""

    @classmethod
    def room(cls, units: PreferenceDataset) -> PrecomputedReferenceLogprobs:
        """Make room for every row, without any number yet. Places hold infinity, so that the smallest over ranks is the
        one that was found."""
        docs = units.docs
        width = units.units.width
        samples, first = np.unique(docs.sample[::width], return_index=True)
        counts = docs.labels.reshape(-1, width).sum(axis=1)[first]
        edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(samples, edges, torch.full((int(edges[-1]),), torch.inf))

    def places(self, batch: Batch, width: int) -> list[slice]:
        """Return the places of the numbers of the batch's rows, in its order; fillers have none."""
        assert batch.sample_ids is not None
        numbers = batch.sample_ids[batch.sample_ids >= 0].numpy()[::width]
        rows = np.searchsorted(self.samples, numbers).clip(max=len(self.samples) - 1)
        assert (self.samples[rows] == numbers).all(), "a batch of other data than were scored"
        return [slice(int(self.edges[i]), int(self.edges[i + 1])) for i in rows]

    def keep(self, batch: Batch, logprobs: torch.Tensor) -> None:
        """Puts the numbers of a scored micro-batch to their rows."""
        given = logprobs.detach().float().cpu()[batch.loss_weights.cpu() != 0]
        first = 0
        for place in self.places(batch, documents_per_row(batch)):
            count = place.stop - place.start
            self.values[place] = given[first : first + count]
            first += count
        assert first == len(given), f"{len(given)} labels in a batch whose rows have {first}"

    def of(self, batch: Batch) -> torch.Tensor:
        """Return float32 [b, s]: the numbers at a batch's labels, 0 elsewhere."""
        return scatter_completion_values(
            batch,
            torch.cat(
                [self.values[place] for place in self.places(batch, documents_per_row(batch))] or [self.values[:0]]
            ),
        )


def documents_per_row(batch: Batch) -> int:
    """Return the number of documents of a row; those of a pair follow each other."""
    return 2 if "pairs" in batch.fields else 1


def compute_reference_logprobs(source: EvaluationSource, score: Score, what: str) -> PrecomputedReferenceLogprobs:
    """Compute the reference's log-probabilities of every row once, spread over data-parallel ranks. Collective; the
    same on every rank."""
    rows = source.data
    assert isinstance(rows, PreferenceDataset)
    known = PrecomputedReferenceLogprobs.room(rows)
    began = time.perf_counter()
    done = 0
    reported = began
    for batches in source.eval_batches():
        for batch, logprobs in zip(batches, score(batches), strict=True):
            known.keep(batch, logprobs)
        done = min(done + source.geometry.global_batch, len(rows))
        if distributed.global_rank() == 0 and time.perf_counter() - reported > TELL_EVERY:
            reported = time.perf_counter()
            log.info(f"reference: {done:,} of {len(rows):,} rows of {what} scored")
    distributed.all_min_(known.values)
    assert bool(torch.isfinite(known.values).all()), "the reference log-probability of a token is not finite"
    size = 4 * len(known.values) / 2**20
    seconds = time.perf_counter() - began
    log.info(f"reference: {len(rows):,} rows of {what} scored in {seconds:.1f} s, {size:.1f} MiB")
    return known
