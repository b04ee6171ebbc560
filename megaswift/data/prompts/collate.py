"""Collates prompts with sampled completions into micro-batches, packed or not, with the fields that policy losses
read.

Owns where a completion's numbers stand in a micro-batch: at the positions whose label is one of the policy's own
tokens. Text of a tool or an environment between them carries no label. `fields["completions"]` int64 [n]: the documents
that are completions; fillers are none. The segments of an agent's session are documents one after the other, of which
the first is the completion; `fields["owner"]` int64 [documents] then names for each document the one that it counts
with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from megaswift.data.batches.collate import Document, PaddingShape
from megaswift.data.batches.prefix_sharing import share_prefixes
from megaswift.data.preference.collate import collate_preferences
from megaswift.data.prompts.images import PromptImageReader, PromptImages
from megaswift.data.vision.batches import ImageInputs, collate_rows_with_images
from megaswift.losses.contract import Batch
from megaswift.losses.document_segments import document_count


@dataclass(frozen=True)
class RolloutTokens:
    """A prompt, what was written after it, and a number for each token of the policy's own."""

    number: int
    """The number of the completion within its generation."""
    prompt: Sequence[int]
    written: Sequence[int]
    """Tokens after the prompt."""
    own: Sequence[bool]
    """Which of `written` are the policy's; the loss is on these."""
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    """By field name, one number for each own token: float32, or bool. None for a silent one, which has the fields all
    the same."""
    silent: bool = False
    """Counts as a completion, its tokens carry no loss (a truncated one under `mask_truncated_completions`)."""
    images: PromptImages | None = None
    """The prompt's."""
    further: Sequence[tuple[int, Sequence[int]]] = ()
    """Segments of an agent's session after the first: where in `written` each begins, and its own prompt."""

    @property
    def count(self) -> int:
        """Own tokens."""
        return sum(map(bool, self.own))

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The prompt of each segment."""
        return [self.prompt, *(prompt for _, prompt in self.further)]

    @property
    def documents(self) -> list[Document]:
        """Tokens and mask of each segment."""
        edges = [0, *(place for place, _ in self.further), len(self.written)]
        return [
            self._document(prompt, slice(*span)) for prompt, span in zip(self.prompts, pairwise(edges), strict=True)
        ]

    def _document(self, prompt: Sequence[int], part: slice) -> Document:
        mask = [False] * len(prompt) + [bool(o) and not self.silent for o in self.own[part]]
        ids = np.asarray([*prompt, *self.written[part]], dtype=np.int32)
        return ids, np.asarray(mask, dtype=np.uint8), self.number


RolloutMicrobatch = Sequence[RolloutTokens | None]
"""The completions of a micro-batch; None is without weight."""


@dataclass(frozen=True)
class RolloutCollator:
    """How completions lie in micro-batches."""

    shape: PaddingShape
    packing: bool
    uniform: bool
    images: PromptImageReader | None = None
    """For a vision-language model: reads the prompts' images; rows are not packed."""
    shares_prefixes: bool = False
    """Neighbours in a packed micro-batch with the same prompt have it once."""

    def batches(self, micros: Sequence[RolloutMicrobatch]) -> list[Batch]:
        """A step's micro-batches."""
        if self.shares_prefixes:
            return self._with_shared_prefixes(micros)
        if self.packing:
            micros = [[c for c in micro if c is not None] for micro in micros]
        documents = [[d for c in micro for d in ([None] if c is None else c.documents)] for micro in micros]
        numbers = [[n for n, d in enumerate(each) if d is not None] for each in documents]
        if self.images is not None:
            laid = [self._with_images(self.images, rows, micro) for rows, micro in zip(documents, micros, strict=True)]
        else:
            # a pipeline takes micro-batches of one shape, with the rows of as many segments
            most = max(map(len, documents)) if self.uniform and not self.packing else 0
            documents = [[*each, *[None] * (most - len(each))] for each in documents]
            laid = collate_preferences(documents, self.packing, self.shape, self.uniform)
        return [_with_fields(*one) for one in zip(laid, micros, numbers, strict=True)]

    def _with_shared_prefixes(self, micros: Sequence[RolloutMicrobatch]) -> list[Batch]:
        assert self.packing and self.images is None
        completed = [[c for c in micro if c is not None] for micro in micros]
        rows = [
            share_prefixes([d for c in micro for d in c.documents], [len(p) for c in micro for p in c.prompts])
            for micro in completed
        ]
        laid = collate_preferences([row.documents for row in rows], True, self.shape, self.uniform)
        return [
            _with_fields(row.mark(batch), micro, row.numbers)
            for row, batch, micro in zip(rows, laid, micros, strict=True)
        ]

    def _with_images(
        self, reader: PromptImageReader, rows: Sequence[Document | None], micro: RolloutMicrobatch
    ) -> Batch:
        """A micro-batch with the images of its prompts, each prompt's read once."""
        assert not self.packing
        read: dict[PromptImages, Mapping[str, Tensor]] = {}
        pieces = []
        for row, completed in enumerate(micro):
            if completed is not None and completed.images is not None:
                if completed.images not in read:
                    read[completed.images] = reader.inputs(completed.images, completed.prompt)
                inputs = read[completed.images]
                kinds = completed.images.media.kinds
                pieces.append(ImageInputs(row, 0, len(completed.prompt), inputs, kinds))
        return collate_rows_with_images(rows, pieces, reader.processor, self.shape, reader.kinds)


def _with_fields(batch: Batch, micro: RolloutMicrobatch, numbers: Sequence[int]) -> Batch:
    """The batch with its fields. `numbers`: the documents of the completions' segments."""
    completions = [c for c in micro if c is not None]
    counts = [len(c.prompts) for c in completions]
    first = torch.tensor(numbers, dtype=torch.int64)[[*accumulate(counts, initial=0)][:-1]]
    fields = {"completions": first}
    if len(first) < len(numbers):
        fields["owner"] = torch.arange(document_count(batch))
        fields["owner"][numbers] = first.repeat_interleave(torch.tensor(counts))
    for name in completions[0].values if completions else ():
        values = torch.from_numpy(np.concatenate([c.values[name] for c in completions]))
        fields[name] = scatter_completion_values(batch, values)
    return replace(batch, fields=fields)


def scatter_completion_values(batch: Batch, values: Tensor) -> Tensor:
    """[b, s]: `values` at the labeled positions in their order, 0 elsewhere."""
    labeled = batch.loss_weights != 0
    return torch.zeros(labeled.shape, dtype=values.dtype).masked_scatter(labeled, values)


def gather_completion_values(batch: Batch, values: Tensor, micro: RolloutMicrobatch) -> dict[int, np.ndarray]:
    """The inverse for one micro-batch: `values` [b, s] at each completion's own tokens, by its number."""
    numbers = values.detach().cpu()[batch.loss_weights != 0].numpy()
    position = 0
    gathered = {}
    for completed in micro:
        if completed is not None and not completed.silent:
            gathered[completed.number] = numbers[position : position + completed.count]
            position += completed.count
    return gathered
