"""A teacher: a model that does not train, whose hidden states come with the student's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megaswift.data.prompts.collate import RolloutCollator, RolloutTokens
from megaswift.engine.objective import label_positions
from megaswift.engine.protocol import Engine
from megaswift.losses.contract import Batch, RequestedModelOutputs
from megaswift.parallel.layout import Layout
from megaswift.trainers.distillation.exchange import (
    SHAPE,
    Exchange,
    batch_from_numbers,
    batch_to_numbers,
    numbers_in,
    shape_numbers,
    transfer,
)
from megaswift.trainers.distillation.largest import Largest
from megaswift.trainers.rl.source import compute_rollout_token_outputs

Active = Callable[[], AbstractContextManager[None]]


class Teacher:
    """A model beside the one that trains, on the same ranks and in a layout of its own.

    Args:
        engine: The teacher's engine, with its weights.
        student: The layout of the model that trains.
        active: A context in which the teacher's process groups are in use.
        offload: Keep the weights in host memory between uses.
    """

    def __init__(self, engine: Engine, student: Layout, active: Active = nullcontext, offload: bool = False) -> None:
        self.engine = engine
        self.student = student
        self._active = active
        self.offload = offload
        self.bytes_sent = 0
        """Bytes of hidden states that this rank has sent to others."""
        self._away = False
        if offload:
            self.sleep()

    def sleep(self) -> None:
        """Move the weights to host memory."""
        self.engine.offload(frozenset({"model"}))
        self._away = True

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which the teacher's engine may be called."""
        return self._active()

    def give_head(self, student: Engine, scale: float, softcap: float | None) -> None:
        """Give the student's engine the teacher's output layer. Collective."""
        with self.active():
            weight = self.engine.head_weight()
        student.set_teacher_head(weight, scale, softcap)

    def add_hidden_states(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the student's micro-batches with `fields["teacher_hidden"]`, [b, s, hidden size of the teacher], on
        ranks of the student's last stage. Collective."""
        if self._away:
            self.engine.onload()
        with self.active():
            if self.engine.layout == self.student:
                states = dict(enumerate(self.engine.hidden_states(batches)))
            else:
                states = self._exchanged(batches)
        if self.offload:
            self.sleep()
        if not states:
            return list(batches)
        return [_with_states(batch, states[i]) for i, batch in enumerate(batches)]

    def add(self, batches: Sequence[Batch], training: bool) -> list[Batch]:
        """Return the micro-batches with the teacher's hidden states. Collective."""
        return self.add_hidden_states(batches)

    def largest(self, student: Engine, batches: Sequence[Batch], k: int, temperature: float) -> list[Largest]:
        """Compute the `k` largest log-probabilities at the labels of each micro-batch, on the host. Collective.

        Returns:
            Of each micro-batch on one rank of each data-parallel replica; empty on the others.
        """
        place = self.student.coordinates(self.engine.rank)
        found = []
        for batch in self.add_hidden_states(batches):
            if "teacher_hidden" in batch.fields:
                states = batch.fields["teacher_hidden"].flatten(0, 1)
                states = states.index_select(0, label_positions(batch).to(states.device))
                logprobs, ids = student.largest_of_teacher(states, k, temperature)
                found.append(Largest(logprobs.cpu(), ids.int().cpu()))
        return found if place.tp == place.cp == 0 else []

    def scores(
        self, completed: Sequence[RolloutTokens], needs: RequestedModelOutputs, layout: RolloutCollator, rows: int
    ) -> dict[int, np.ndarray]:
        """Compute one number for each token of completions that every rank holds. Collective.

        Args:
            completed: All completions, the same on every rank.
            needs: The one output to compute.
            layout: How completions lie in micro-batches of `rows`.
            rows: Completions of a micro-batch.
        """
        if self._away:
            self.engine.onload()
        theirs = self.engine.layout
        place = theirs.coordinates(self.engine.rank)
        width = rows * theirs.dp
        filled = [*completed, *[None] * (-len(completed) % width)]
        micros = [filled[start : start + rows] for start in range(place.dp * rows, len(filled), width)]
        speaks = place.tp == place.pp == place.cp == 0
        with self.active():
            found = compute_rollout_token_outputs(self.engine, micros, layout, needs, speaks)
        if self.offload:
            self.sleep()
        return found

    def _exchanged(self, batches: Sequence[Batch]) -> dict[int, Tensor]:
        """The hidden states at the labels of this rank's micro-batches, by their index; none before the last stage."""
        plan = Exchange(self.student, self.engine.layout, len(batches))
        rank = self.engine.rank
        place = self.student.coordinates(rank)
        first = place.dp * plan.count

        # The micro-batches go to the teacher's ranks. All ranks know their shapes.
        shapes = _gathered([shape_numbers(batch) for batch in batches], self.student)
        own = {first + i: _on_device(batch_to_numbers(batch)) for i, batch in enumerate(batches)}
        sizes = {number: 8 * numbers_in(shape) for number, shape in enumerate(shapes)}
        got = transfer(own, plan.sources(), sizes)
        taken = plan.taken(rank)
        given = [batch_from_numbers(got[number].view(torch.int64).cpu(), shapes[number]) for number in taken]

        # The teacher computes. A pipeline takes micro-batches of one shape at a time.
        states: list[Tensor] = []
        for _, same in groupby(given, key=lambda batch: batch.input_ids.shape):
            states += self.engine.hidden_states(list(same))
        computed = dict(zip(taken, states, strict=True)) if states else {}

        # The hidden states come back.
        width = self.engine.hidden_size * self.engine.dtype.itemsize
        sizes = {number: shape[-1] * width for number, shape in enumerate(shapes)}
        results = plan.results()
        self.bytes_sent += sum(sizes[n] for (n, target), source in results.items() if source == rank != target)
        found = transfer(computed, results, sizes)
        rows = {number - first: t.view(self.engine.dtype) for number, t in found.items()}
        return {i: t.view(-1, self.engine.hidden_size) for i, t in rows.items()}


def _with_states(batch: Batch, states: Tensor) -> Batch:
    """The micro-batch with the states [labels, h] at its labels and zeros elsewhere."""
    whole = states.new_zeros(batch.input_ids.numel(), states.shape[1])
    whole = whole.index_copy(0, label_positions(batch).to(states.device), states)
    return replace(batch, fields={**batch.fields, "teacher_hidden": whole.view(*batch.input_ids.shape, -1)})


def _on_device(numbers: Tensor) -> Tensor:
    return numbers.cuda() if torch.cuda.is_available() else numbers


def _gathered(shapes: list[list[int]], layout: Layout) -> list[list[int]]:
    """The shapes of all micro-batches in the order of their numbers. Collective."""
    own = _on_device(torch.tensor(shapes, dtype=torch.int64))
    every = [torch.empty_like(own) for _ in range(layout.world_size)]
    dist.all_gather(every, own)
    ranks = [layout.rank(dp=i) for i in range(layout.dp)]
    return [shape for rank in ranks for shape in every[rank].view(-1, len(SHAPE)).tolist()]
