"""Batches of Megatron-LM's indexed data, in the order of Megatron-Core's GPTDataset.

Owns samples as tensors (labels, end-of-document masks and resets) and the position of a run in them. The order is
`order.py`'s; it is computed once on a node and memory-mapped by the other processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaswift.data.batches.collate import PaddingShape, batch_of_arrays, empty_arrays, packed_batch
from megaswift.data.batches.epoch_order import EpochOrder
from megaswift.data.batches.loader import EvaluationSource
from megaswift.data.batches.numbered import LoaderGeometry, NumberedRowsBatchSource
from megaswift.data.indexed.files import IndexedTokens, open_indexed_tokens
from megaswift.data.indexed.order import (
    EpochPlan,
    SampleOrder,
    blend_order,
    blend_sizes,
    epoch_plan,
    numbers_within_data_sets,
    sample_order,
    sequences_of_split,
    split_ranges,
    with_surplus,
)
from megaswift.data.options.indexed import IndexedBlend, parse_indexed_blend
from megaswift.data.resume_check import FIX, WHAT
from megaswift.data.store.shared_build import (
    build_once,
    data_cache_folder,
    is_cache_builder_process,
    wait_for_build,
)
from megaswift.errors import DataError, Problem
from megaswift.losses.contract import Batch

VERSION = 1
Sample = tuple[np.ndarray, int]
"""int64 tokens [length + 1], and the sample's number."""


@dataclass(frozen=True)
class DocumentBoundaries:
    """What the end of a document (`token`) does within a sample."""

    token: int | None
    resets_attention: bool = False
    """Attention, and positions, begin anew after it."""
    masks_loss: bool = False
    """The label after it, another document's first token, carries no loss."""


@dataclass(frozen=True)
class _DataSet:
    data: IndexedTokens
    first: int
    end: int
    """Sequences [first, end) belong to this split."""
    samples: int | None
    """How many are needed; None: one epoch."""
    plan: EpochPlan

    @property
    def lengths(self) -> np.ndarray:
        return self.data.lengths[self.first : self.end]

    def facts(self) -> dict[str, Any]:
        """What the order depends on."""
        return {
            "name": Path(self.data.prefix).name,
            "content": self.data.content,
            "sequences": [self.first, self.end],
            "epochs": self.plan.epochs,
            "last_epoch_apart": self.plan.apart,
        }


@dataclass
class IndexedSamples:
    """Numbered samples of one split of a blend, each a row of `length` tokens."""

    sets: list[_DataSet]
    orders: list[SampleOrder]
    chosen: np.ndarray
    """int16 [samples]: the data set of each."""
    numbers: np.ndarray
    """int64 [samples]: its number in that data set."""
    length: int
    boundaries: DocumentBoundaries
    vocabulary: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """What names the data and their order."""

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def one_pass(self) -> int:
        """Samples of one pass over all data sets."""
        return sum(max(0, (int(s.lengths.sum(dtype=np.int64)) - 1) // self.length) for s in self.sets)

    def read(self, row: int) -> Sample:
        """The tokens of a sample. DataError for one that the model does not know."""
        which = int(self.chosen[row])
        data = self.sets[which].data
        parts = self.orders[which].parts(int(self.numbers[row]), self.length)
        tokens = np.concatenate([data.read(*part) for part in parts]).astype(np.int64)
        if self.vocabulary and (unknown := tokens >= self.vocabulary).any():
            token = int(tokens[int(unknown.argmax())])
            rule = f"token {token} is out of range: the model's embedding has {self.vocabulary:,} rows"
            raise DataError(Problem(f"{data.prefix}.bin", rule, "index the data with the model's own tokenizer"))
        return tokens, row

    def batches(self, rows: Sequence[Sequence[Any]], shape: PaddingShape, uniform: bool) -> list[Batch]:
        """Tensors of a step's micro-batches. An empty row is one without weight."""
        if not self.boundaries.resets_attention:
            return [self._rows(micro, shape) for micro in rows]
        cut = [[self._documents(row[0]) if len(row) else [0, 1] for row in micro] for micro in rows]
        lengths = [[_padded_length(edges, shape) for edges in micro] for micro in cut]
        longest = max(max(micro) for micro in lengths)
        return [
            self._packed(micro, edges, [longest] * len(micro) if uniform else own, shape)
            for micro, edges, own in zip(rows, cut, lengths, strict=True)
        ]

    def _documents(self, tokens: np.ndarray) -> list[int]:
        """Where the documents of a sample begin, and its end."""
        ends = np.flatnonzero(tokens[:-1] == self.boundaries.token) + 1
        return list(dict.fromkeys([0, *ends.tolist(), self.length]))

    def _fill(self, arrays: dict[str, np.ndarray], at: tuple[int, int], tokens: np.ndarray) -> None:
        """Inputs tokens[:-1] with the labels tokens[1:]."""
        row, begin = at
        place = slice(begin, begin + len(tokens) - 1)
        arrays["input_ids"][row, place] = tokens[:-1]
        arrays["labels"][row, place] = tokens[1:]
        masked = (tokens[:-1] == self.boundaries.token) if self.boundaries.masks_loss else False
        arrays["loss_weights"][row, place] = np.where(masked, 0.0, 1.0)
        arrays["valid"][row, place] = True

    def _rows(self, micro: Sequence[Any], shape: PaddingShape) -> Batch:
        arrays = empty_arrays(len(micro), shape.row_length(self.length), shape.pad_id)
        for i, row in enumerate(micro):
            if len(row):
                self._fill(arrays, (i, 0), row[0])
        return batch_of_arrays(arrays, torch.tensor([row[1] if len(row) else -1 for row in micro]), None)

    def _packed(
        self, micro: Sequence[Any], cut: Sequence[list[int]], lengths: Sequence[int], shape: PaddingShape
    ) -> Batch:
        arrays = empty_arrays(1, sum(lengths), shape.pad_id)
        starts = []
        ids = []
        begin = 0
        for row, edges, length in zip(micro, cut, lengths, strict=True):
            position = begin
            for a, b in pairwise(edges):
                if len(row):
                    self._fill(arrays, (0, position), row[0][a : b + 1])
                starts.append(position)
                ids.append(row[1] if len(row) else -1)
                position += -(-(b - a) // shape.doc_multiple) * shape.doc_multiple
            begin += length
        return packed_batch(arrays, starts, ids)


def _padded_length(edges: Sequence[int], shape: PaddingShape) -> int:
    return shape.row_length(sum(-(-(b - a) // shape.doc_multiple) * shape.doc_multiple for a, b in pairwise(edges)))


@dataclass(frozen=True)
class SplitRequest:
    """Which samples of a blend are wanted."""

    blend: IndexedBlend
    part: tuple[float, float]
    """The part of each data set, as fractions."""
    samples: int | None
    """How many over all data sets; None: one pass."""
    length: int
    seed: int
    flag: str = "--dataset"


def load_indexed_samples(
    request: SplitRequest, cache: Path, boundaries: DocumentBoundaries, vocabulary: int = 0
) -> IndexedSamples:
    """The samples of a split, their order from the cache folder or computed by one process of the node. DataError for
    data that hold too little."""
    sets = _data_sets(request)
    weights = request.blend.weights
    facts = {
        "version": VERSION,
        "seed": request.seed,
        "max_length": request.length,
        "data_sets": [one.facts() for one in sets],
        "weights": None if weights is None else [w / sum(weights) for w in weights],
    }
    name = hashlib.blake2b(json.dumps([facts, request.samples]).encode(), digest_size=16).hexdigest()
    target = cache / f"order-{name}"
    if is_cache_builder_process():
        build_once(target, lambda scratch: _build(scratch, target, sets, request))
    else:
        wait_for_build(target)
    orders = [
        SampleOrder(*(np.load(target / f"{i}-{part}.npy", mmap_mode="r") for part in ("sequences", "ends", "samples")))
        for i in range(len(sets))
    ]
    chosen, numbers = (np.load(target / f"{part}.npy", mmap_mode="r") for part in ("chosen", "numbers"))
    return IndexedSamples(sets, orders, chosen, numbers, request.length, boundaries, vocabulary, facts)


def _data_sets(request: SplitRequest) -> list[_DataSet]:
    weights = request.blend.weights
    wanted: list[int | None] = [None] * len(request.blend.prefixes)
    if weights is not None and request.samples is not None:
        wanted = [with_surplus(n) for n in blend_sizes([w / sum(weights) for w in weights], request.samples)]
    elif len(wanted) == 1:
        wanted = [request.samples]
    sets = []
    for prefix, samples in zip(request.blend.prefixes, wanted, strict=True):
        data = open_indexed_tokens(prefix)
        first, end = sequences_of_split(len(data.lengths), request.part)
        tokens = int(data.lengths[first:end].sum(dtype=np.int64))
        if tokens <= request.length:
            part = f" in the part {request.part[0]:g} to {request.part[1]:g}" if request.part != (0.0, 1.0) else ""
            rule = f"holds {tokens:,} tokens{part}, fewer than one sample of --max_length {request.length} and a label"
            raise DataError(Problem(f"{request.flag} {prefix}", rule, "a smaller --max_length, or more data"))
        sets.append(_DataSet(data, first, end, samples, epoch_plan(tokens, samples, request.length)))
    return sets


def _build(scratch: Path, target: Path, sets: Sequence[_DataSet], request: SplitRequest) -> None:
    new = scratch / "order"
    new.mkdir()
    sizes = []
    for i, one in enumerate(sets):
        order = sample_order(np.asarray(one.lengths), one.first, one.plan, request.length, request.seed)
        sizes.append(len(order.samples))
        for part in ("sequences", "ends", "samples"):
            np.save(new / f"{i}-{part}.npy", getattr(order, part))
    if len(sets) == 1:
        chosen = np.zeros(sizes[0] if request.samples is None else request.samples, dtype=np.int16)
    else:
        chosen = _blend(sizes, request)
    np.save(new / "chosen.npy", chosen)
    np.save(new / "numbers.npy", numbers_within_data_sets(chosen, len(sets)))
    new.rename(target)


def _blend(sizes: Sequence[int], request: SplitRequest) -> np.ndarray:
    weights = request.blend.weights
    samples = request.samples
    if weights is not None and samples is not None:
        shares = [w / sum(weights) for w in weights]
        return blend_order(shares, sum(blend_sizes(shares, samples)))
    return blend_order([n / sum(sizes) for n in sizes], sum(sizes) if samples is None else min(samples, sum(sizes)))


@dataclass
class IndexedBatchSource(NumberedRowsBatchSource):
    """Training batches of indexed data: global batch k holds samples [k gbs, (k + 1) gbs)."""

    @property
    def samples(self) -> IndexedSamples:
        """What batches are made of."""
        assert isinstance(self.data, IndexedSamples)
        return self.data

    @cached_property
    def data_fingerprint(self) -> str:
        """A hash of the data and of their order."""
        return hashlib.sha256(json.dumps(self.samples.facts, sort_keys=True).encode()).hexdigest()

    @property
    def rows(self) -> int:
        """Samples of one pass over the data."""
        return self.samples.one_pass

    def state_dict(self) -> dict[str, Any]:
        """The position in samples, and what names the data and their order."""
        return {"version": VERSION, "rows_taken": self._taken, "indexed": self.samples.facts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, on this or another number of ranks; DataError when the order is another."""
        was = state.get("indexed")
        now = self.samples.facts
        if was is None:
            raise DataError(Problem(WHAT, "the checkpoint's data were not indexed", FIX))
        problems = [Problem(WHAT, text, FIX) for text in _differences(was, now)]
        if problems:
            raise DataError(problems)
        self._ahead.clear()
        self._taken = int(state["rows_taken"])

    @property
    def stats(self) -> dict[str, float]:
        """Samples of a pass, sequences, tokens."""
        sets = self.samples.sets
        tokens = sum(float(s.lengths.sum(dtype=np.int64)) for s in sets)
        return {
            "rows": float(self.samples.one_pass),
            "documents": float(sum(s.end - s.first for s in sets)),
            "tokens": tokens,
            "label_tokens": tokens,
            "global_batch": float(self.geometry.global_batch),
        }


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    options = {"seed": "--data_seed", "max_length": "--max_length", "weights": "the weights of --dataset"}
    for key, option in options.items():
        if was[key] != now[key]:
            return [f"{option} was {was[key]} in the checkpoint, but is {now[key]} now"]
    if len(was["data_sets"]) != len(now["data_sets"]):
        return [f"--dataset named {len(was['data_sets'])} data sets in the checkpoint, but {len(now['data_sets'])} now"]
    found = []
    for old, new in zip(was["data_sets"], now["data_sets"], strict=True):
        if old["content"] != new["content"]:
            found.append(f"the data set {new['name']} has other content than {old['name']} in the checkpoint")
        elif old["sequences"] != new["sequences"]:
            found.append("--data_split takes other parts of the data than in the checkpoint")
        elif (old["epochs"], old["last_epoch_apart"]) != (new["epochs"], new["last_epoch_apart"]):
            found.append(
                f"the steps need {new['epochs']} epochs of {new['name']}, which are shuffled together, and needed "
                f"{old['epochs']} in the checkpoint: the order is another (keep --max_steps and the global batch size)"
            )
    return found


def build_indexed_sources(
    data: Any, train: Any, tokenizer: Any, where: tuple[LoaderGeometry, PaddingShape]
) -> tuple[IndexedBatchSource, EvaluationSource | None]:
    """(training, evaluation) sources of a run on indexed data. Evaluation has `--eval_iters` global batches of samples,
    else one pass over its part. DataError for data that are too few for `--max_steps`."""
    geometry, shape = where
    boundaries = _boundaries(data, tokenizer)
    seed = train.seed if data.data_seed is None else data.data_seed
    cache = data_cache_folder(data.dataset_cache_dir)
    parts = split_ranges(data.data_split or "1")
    blend = parse_indexed_blend(data.dataset)
    assert blend is not None and train.max_steps is not None
    needed = train.max_steps * geometry.global_batch
    request = SplitRequest(blend, parts[0], needed, data.max_length, seed)
    samples = load_indexed_samples(request, cache, boundaries, geometry.vocabulary)
    if len(samples) < needed:
        rule = f"has {len(samples):,} samples of --max_length {data.max_length}, but the steps need {needed:,}"
        fix = f"--max_steps {len(samples) // geometry.global_batch}, or a weight before each prefix, which repeats data"
        raise DataError(Problem("--dataset", rule, fix))
    order = EpochOrder(len(samples), shuffle=False, seed=seed)
    source = IndexedBatchSource(samples, geometry, shape, order, data.dataloader_num_workers)
    held_out = parse_indexed_blend(data.val_dataset)
    if held_out is not None:
        request = replace(request, blend=held_out, part=(0.0, 1.0), flag="--val_dataset")
    elif data.evaluation_share > 0:
        request = replace(request, part=parts[1])
    else:
        return source, None
    limit = None if train.eval_iters is None else train.eval_iters * geometry.global_batch
    if limit is None and request.blend.weights is not None:
        limit = _one_pass(request)
    evaluation = load_indexed_samples(replace(request, samples=limit), cache, boundaries, geometry.vocabulary)
    per_device = train.per_device_eval_batch_size or geometry.per_device
    return source, EvaluationSource(evaluation, replace(geometry, per_device=per_device, accumulation=1), shape)


def _boundaries(data: Any, tokenizer: Any) -> DocumentBoundaries:
    resets = bool(data.reset_attention_mask)
    masks = bool(data.eod_mask_loss)
    if tokenizer.eos_token_id is None and (resets or masks):
        name = "reset_attention_mask" if resets else "eod_mask_loss"
        rule = "needs an end-of-text token (eos_token), which the tokenizer does not have"
        raise DataError(Problem(f"--{name} true", rule, "leave it out"))
    return DocumentBoundaries(tokenizer.eos_token_id, resets, masks)


def _one_pass(request: SplitRequest) -> int:
    sets = _data_sets(replace(request, samples=None))
    return sum((int(s.lengths.sum(dtype=np.int64)) - 1) // request.length for s in sets)
