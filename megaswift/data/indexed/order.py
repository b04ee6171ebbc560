"""The order in which Megatron-Core's GPTDataset and BlendedDataset go through indexed data: equal seeds, sizes and
splits give equal samples.

A data set's sequences are shuffled (all epochs together, the last one apart where less than 80% of it is used) and laid
end to end; sample k is tokens [k L, k L + L], and samples are shuffled again. A blend takes each sample from the data
set that is furthest behind its weight. Nothing is drawn anywhere else, so the order depends on no layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from megaswift.data.options.data import split_shares

SURPLUS = 0.005
"""Samples that are prepared beyond a blend's share of a data set (Megatron-Core's `mid_level_dataset_surplus`)."""
LAST_EPOCH = 0.8
"""The last epoch is shuffled apart where a smaller part of it is used."""


def split_ranges(split: str) -> list[tuple[float, float]]:
    """The parts of each data set for training, evaluation and tests, as `969,30,1` names them."""
    shares = split_shares(split)
    assert shares is not None, "the configuration was checked"
    edges = [0.0, *accumulate(shares)]
    return list(pairwise(edges))


def sequences_of_split(count: int, part: tuple[float, float]) -> tuple[int, int]:
    """[first, end) of `count` sequences."""
    return round(part[0] * float(count)), round(part[1] * float(count))


@dataclass(frozen=True)
class EpochPlan:
    """How often the sequences of a data set are gone through."""

    epochs: int
    apart: bool
    """The last epoch is shuffled apart."""


def epoch_plan(tokens: int, samples: int | None, length: int) -> EpochPlan:
    """For so many samples of `length` + 1 tokens, of a data set of `tokens`; None: one epoch."""
    if samples is None:
        return EpochPlan(1, False)
    epochs = max(1, -(-(samples * length + 1) // tokens))
    if epochs == 1:
        return EpochPlan(1, False)
    before = ((epochs - 1) * tokens - 1) // length
    return EpochPlan(epochs, samples - before < int(LAST_EPOCH * ((tokens - 1) // length)))


@dataclass(frozen=True)
class SampleOrder:
    """Where the samples of a data set lie."""

    sequences: np.ndarray
    """int32 [epochs x sequences]: their order."""
    ends: np.ndarray
    """int64 [epochs x sequences]: tokens up to the end of each."""
    samples: np.ndarray
    """uint32 or int64 [samples]: sample k is `samples[k]` of those that lie end to end."""

    def parts(self, sample: int, length: int) -> list[tuple[int, int, int]]:
        """(sequence, start, stop) of what holds the `length` + 1 tokens of a sample."""
        start = int(self.samples[sample]) * length
        stop = start + length + 1
        place = int(np.searchsorted(self.ends, start, side="right"))
        parts = []
        begin = int(self.ends[place - 1]) if place else 0
        while start < stop:
            end = int(self.ends[place])
            if end > start:
                parts.append((int(self.sequences[place]), start - begin, min(stop, end) - begin))
            start = max(start, end)
            begin = end
            place = place + 1
        return parts


def sample_order(lengths: np.ndarray, first: int, plan: EpochPlan, length: int, seed: int) -> SampleOrder:
    """The order of sequences `first`, `first` + 1, ... of `lengths` int32 [n]."""
    random = np.random.RandomState(seed)
    numbers = np.arange(first, first + len(lengths), dtype=np.int32)
    runs = [plan.epochs - 1, 1] if plan.apart else [plan.epochs]
    shuffled = []
    for epochs in runs:
        run = np.tile(numbers, epochs)
        random.shuffle(run)
        shuffled.append(run)
    sequences = np.concatenate(shuffled)
    ends = np.cumsum(lengths[sequences - first], dtype=np.int64)
    tokens = int(ends[-1]) // plan.epochs if len(ends) else 0
    total = max(0, (plan.epochs * tokens - 1) // length)
    before = ((plan.epochs - 1) * tokens - 1) // length if plan.apart else total
    kind = np.int64 if total >= np.iinfo(np.uint32).max - 1 else np.uint32
    first_samples = np.arange(0, before, dtype=kind)
    last_samples = np.arange(before, total, dtype=kind)
    random.shuffle(first_samples)
    random.shuffle(last_samples)
    return SampleOrder(sequences, ends, np.concatenate([first_samples, last_samples]))


def blend_sizes(weights: Sequence[float], samples: int) -> list[int]:
    """Samples that each data set of a blend gives; normalized weights."""
    return [math.ceil(samples * weight) for weight in weights]


def with_surplus(samples: int) -> int:
    """Samples that are prepared of a data set which gives so many."""
    return math.ceil(samples * (1 + SURPLUS))


def blend_order(weights: Sequence[float], samples: int) -> np.ndarray:
    """int16 [samples]: the data set of each; always the one that is furthest behind its weight, the first of equals."""
    chosen = np.empty(samples, dtype=np.int16)
    taken = [0] * len(weights)
    places = range(len(weights))
    for k in range(samples):
        wanted = max(float(k), 1.0)
        best = 0
        behind = weights[0] * wanted - taken[0]
        for place in places:
            error = weights[place] * wanted - taken[place]
            if error > behind:
                best = place
                behind = error
        chosen[k] = best
        taken[best] += 1
    return chosen


def numbers_within_data_sets(chosen: np.ndarray, count: int) -> np.ndarray:
    """int64 [samples]: for each sample of a blend, how many of its data set came before."""
    numbers = np.zeros(len(chosen), dtype=np.int64)
    for place in range(count):
        own = chosen == place
        numbers[own] = np.arange(int(own.sum()))
    return numbers
