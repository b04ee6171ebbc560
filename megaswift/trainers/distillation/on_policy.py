"""Micro-batches whose answers a model has written: in place of the answer of each row, a completion of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megaswift import distributed
from megaswift.data.batches.collate import Document, PaddingShape
from megaswift.data.preference.collate import collate_preferences
from megaswift.data.prompts.source import Prompt
from megaswift.losses.contract import Batch
from megaswift.trainers.rl.generation import CompletionGenerator

STUDENT = "student"
TEACHER = "teacher"
ROWS = "rows"


def writer_of_step(seed: int, step: int, lmbda: float, seq_kd: bool) -> str:
    """Return whose completions a step trains on, the same on all ranks: the student's with probability `lmbda`, else
    the teacher's if `seq_kd` asks for them, else the rows' own."""
    if np.random.default_rng([seed, step]).random() < lmbda:
        return STUDENT
    return TEACHER if seq_kd else ROWS


def last_prompts(batch: Batch) -> list[tuple[int, ...] | None]:
    """Return for each row of a micro-batch the tokens before its last answer; None for a row without labels."""
    prompts: list[tuple[int, ...] | None] = []
    for ids, weights in zip(batch.input_ids, batch.loss_weights, strict=True):
        labeled = (weights != 0).nonzero().squeeze(1)
        if not len(labeled):
            prompts.append(None)
            continue
        breaks = (labeled.diff() != 1).nonzero().squeeze(1)
        first = int(labeled[breaks[-1] + 1 if len(breaks) else 0])  # the label at t is the token at t + 1
        prompts.append(tuple(ids[: first + 1].tolist()))
    return prompts


@dataclass(frozen=True)
class CompletedRows:
    """Replaces the answers of micro-batches by completions."""

    shape: PaddingShape
    uniform: bool
    packing: bool
    """Lay the rows of a micro-batch end to end."""
    max_length: int

    def complete(self, batches: Sequence[Batch], generator: CompletionGenerator, number: int, own: bool) -> list[Batch]:
        """Return the micro-batches with completions in place of their last answers. Collective.

        Args:
            batches: This rank's micro-batches; not packed.
            generator: The sampler, with the weights that are to write.
            number: The number of the step, from which completions have their seeds.
            own: Whether the model that trains writes them.
        """
        # The prompts of all data-parallel ranks, in the order of their rows: the sampler's seeds go by this order.
        prompts = [prompt for batch in batches for prompt in last_prompts(batch)]
        place = generator.coordinates
        speaks = generator.speaks_for_replica
        shared = distributed.all_gather_merged_dict({place.dp: prompts} if speaks else {})
        asked: list[Prompt] = []
        first = 0
        for rank in sorted(shared):
            if rank == place.dp:
                first = len(asked)
            asked += [Prompt(i, ids, "", {}) for i, ids in enumerate(shared[rank]) if ids is not None]
        written = generator.write(asked, number)

        # This rank's rows with their completions. A row may not grow beyond the maximum length.
        rows: list[list[Document | None]] = []
        taken = first
        position = 0
        for batch in batches:
            documents: list[Document | None] = []
            for row in range(len(batch.input_ids)):
                prompt = prompts[position]
                position += 1
                if prompt is None:
                    documents.append(None)
                    continue
                tokens = [*prompt, *written[taken].token_ids][: self.max_length]
                taken += 1
                mask = np.arange(len(tokens)) >= len(prompt)
                sample = -1 if batch.sample_ids is None else int(batch.sample_ids[row])
                documents.append((np.asarray(tokens, dtype=np.int32), mask.astype(np.uint8), sample))
            rows.append(documents)
        laid = collate_preferences(rows, self.packing, self.shape, self.uniform)
        return [replace(batch, fields={"sampled": torch.tensor(own)}) for batch in laid]
