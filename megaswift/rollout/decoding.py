"""The decode loop of the transformers sampler: prefill of one batch of prompts, then one token per row and step.

Prompts are padded on the left. Equal prompts are prefilled once. Finished rows are dropped from the batch once they are
an eighth of it. Rows share nothing but the matrix products, so a row's tokens do not depend on the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megaswift.data.vision.batches import ImageInputs, join_image_inputs
from megaswift.device_copy import copy_to_device_async
from megaswift.errors import Problem, UserError
from megaswift.rollout.kv_cache import STEP, build_preallocated_cache, keep_rows
from megaswift.rollout.sampler import BatchImages, Completion, SamplingParams
from megaswift.rollout.token_sampling import RowGenerators, choose_tokens


class DecodingBatch:
    """The state of a batch: KV cache, masks, positions and generators of its rows, each a prompt with its seed."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        images: BatchImages | None = None,
        drawn: Sequence[int] | None = None,
    ) -> None:
        """`drawn`: the tokens of each prompt that were sampled with its seed, at its end."""
        self.model = model
        self.sampling = sampling
        self.device = model.device
        self.draws = RowGenerators(seeds, self.device, drawn) if sampling.temperature else None
        asked = [*zip(prompts, [None] * len(prompts) if images is None else images.of, strict=True)]
        numbers = {one: number for number, one in enumerate(dict.fromkeys(asked))}
        self.origin = copy_to_device_async(torch.tensor([numbers[one] for one in asked]), self.device)
        self.unique = [prompt for prompt, _ in numbers]
        """Different prompts, or equal ones with other images."""
        self.images = None if images is None else replace(images, of=[one for _, one in numbers])
        self.width = max(map(len, self.unique))
        self.cache = build_preallocated_cache(model.config, self.origin, self.width + min(sampling.max_tokens, STEP))
        self.arguments = inspect.signature(model.forward).parameters
        self.stops = copy_to_device_async(torch.tensor(sampling.stop_token_ids, dtype=torch.long), self.device)
        self.lengths = copy_to_device_async(torch.tensor([len(p) for p in prompts]), self.device)
        """[rows]: length of each row's prompt, also the position of its first completion token; after `read`, where
        images stand on a grid, that position only."""
        columns = self.width + sampling.max_tokens if len({len(p) for p in self.unique}) > 1 else 0
        self.mask = torch.ones(len(prompts), columns, dtype=torch.bool, device=self.device) if columns else None
        """[rows, columns] bool: False at padding; None where all prompts have one length."""
        if self.mask is not None:
            self.mask[:, : self.width] = (
                torch.arange(self.width, device=self.device) >= self.width - self.lengths[:, None]
            )
        self.seen: Tensor | None = None
        """[rows, V] bool: tokens of prompt and completion, for the repetition penalty; None without one."""

    def read(self) -> Tensor:
        """Prefills the prompts; returns logits [rows, V] of the first token."""
        padded_prompts = torch.tensor([[0] * (self.width - len(p)) + list(p) for p in self.unique])
        ids = copy_to_device_async(padded_prompts, self.device)  # [prompts, width]
        lengths = copy_to_device_async(torch.tensor([len(p) for p in self.unique]), self.device)
        columns = torch.arange(self.width, device=self.device)
        positions = (columns - (self.width - lengths[:, None])).clamp(min=0)
        padded = None if self.mask is None else columns >= self.width - lengths[:, None]
        last = {"logits_to_keep": 1} if "logits_to_keep" in self.arguments else {}
        extra = self._image_inputs()
        if extra and (grid := self._grid_positions(ids, padded, extra)) is not None:
            positions, moved = grid
            self.lengths = self.lengths + moved.index_select(0, self.origin)  # where the text goes on
        logits = self._forward(ids, padded, positions, **last, **extra)
        logits = logits.index_select(0, self.origin)
        if self.sampling.repetition_penalty != 1:
            seen = torch.zeros(len(self.unique), logits.shape[-1], dtype=torch.bool, device=self.device)
            for row, prompt in enumerate(self.unique):
                seen[row, list(prompt)] = True
            self.seen = seen.index_select(0, self.origin)
        return logits

    def _image_inputs(self) -> dict[str, Tensor]:
        """Return what the model reads beside the tokens of the different prompts; nothing where none has an image."""
        if self.images is None:
            return {}
        reader = self.images.reader
        pieces = []
        for row, (prompt, images) in enumerate(zip(self.unique, self.images.of, strict=True)):
            if images is not None:
                start = self.width - len(prompt)
                size = len(prompt)
                pieces.append(ImageInputs(row, start, size, reader.inputs(images, prompt)))
        if not pieces:
            return {}
        joined = join_image_inputs(pieces, reader.processor.kinds, (len(self.unique), self.width))
        return {
            name: copy_to_device_async(t.to(self.model.dtype) if t.is_floating_point() else t, self.device)
            for name, t in joined.items()
        }

    def _grid_positions(
        self, ids: Tensor, padded: Tensor | None, extra: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """(positions [3, prompts, width], [prompts]: by how much the position after a prompt differs from its length)
        of a model that places images on a grid; None of another."""
        of_model = getattr(getattr(self.model, "model", self.model), "get_rope_index", None)
        if of_model is None:
            return None
        named = {name: extra[name] for name in inspect.signature(of_model).parameters if name in extra}
        mask = torch.ones_like(ids) if padded is None else padded.to(ids.dtype)
        positions, moved = of_model(input_ids=ids, attention_mask=mask, **named)
        return positions, moved.reshape(-1)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, **options: Any) -> Tensor:
        """Logits [b, V] of the last position."""
        renamed = "cache" in self.arguments  # `past_key_values` before transformers 5.24, and in code of a folder
        options["cache" if renamed else "past_key_values"] = self.cache
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **options)
        return out.logits[:, -1]

    def feed(self, tokens: Tensor, step: int) -> Tensor:
        """Appends the tokens [rows] of a step; returns logits [rows, V] of the next."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        mask = None if self.mask is None else self.mask[:, : self.width + step + 1]
        return self._forward(tokens[:, None], mask, (self.lengths + step)[:, None])

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (indices, ascending)."""
        keep_rows(self.cache, rows)
        self.lengths = self.lengths[rows]
        self.mask = None if self.mask is None else self.mask[rows]
        self.seen = None if self.seen is None else self.seen[rows]
        if self.mask is not None and bool(self.mask[:, : self.width].all()):
            self.mask = None
        if self.draws is not None:
            self.draws.keep(rows)


def decode_batch(
    model: Any,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    seeds: Sequence[int],
    images: BatchImages | None = None,
    begun: Sequence[int] | None = None,
    stop: Callable[[], bool] = bool,
) -> list[Completion]:
    """Return the completions of one batch, in the order of `prompts`.

    Args:
        model: The transformers model.
        prompts: Different lengths are padded on the left.
        sampling: How tokens are drawn.
        seeds: One for each prompt.
        images: The prompts' images.
        begun: How many tokens at the end of each prompt belong to its completion already; `max_tokens` counts them.
        stop: Asked after each token; once it is true, unfinished completions are returned as they are.
    """
    before = [*(begun or [0] * len(prompts))]
    sampling = replace(sampling, max_tokens=sampling.max_tokens - min(before))
    batch = DecodingBatch(model, prompts, sampling, seeds, images, begun)
    steps = sampling.max_tokens
    limits = [steps + min(before) - count for count in before]
    full = {*limits} - {steps}
    """The steps after which rows are full that began with more tokens than others."""
    count = len(prompts)
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    rows: list[Tensor] = []
    live = torch.arange(count, device=batch.device)  # prompt index of each row that is left
    ends = copy_to_device_async(torch.tensor(limits), batch.device)  # tokens of each completion
    finished = torch.zeros(count, dtype=torch.bool, device=batch.device)
    active = torch.ones(count, dtype=torch.bool, device=batch.device)  # rows of the batch that are not done
    logits = batch.read()
    for step in range(steps):
        chosen, chosen_logprobs = choose_tokens(
            logits, sampling, None if batch.draws is None else batch.draws.at(step), batch.seen
        )
        tokens.append(chosen)
        logprobs.append(chosen_logprobs)
        rows.append(live)
        if len(batch.stops) or step + 1 in full:
            stopped = active & torch.isin(chosen, batch.stops)
            done = stopped | (active & (ends[live] == step + 1)) if step + 1 in full else stopped
            if bool(done.any()):
                ends[live[done]] = step + 1
                finished[live[stopped]] = True
                active = active & ~done
                remaining = int(active.sum())
                if not remaining:
                    break
                if 8 * remaining <= 7 * len(live):
                    unfinished = active.nonzero()[:, 0]
                    batch.keep(unfinished)
                    chosen = chosen[unfinished]
                    live = live[unfinished]
                    active = active[unfinished]
        if stop():
            ends[live[active]] = step + 1
            break
        if step + 1 < steps:
            logits = batch.feed(chosen, step)
    return _completions(tokens, logprobs, rows, (ends, finished))


def _completions(
    tokens: Sequence[Tensor], logprobs: Sequence[Tensor], rows: Sequence[Tensor], ended: tuple[Tensor, Tensor]
) -> list[Completion]:
    """Regroups tokens and log-probabilities from steps to rows, without the tokens after a row's end."""
    ends, finished = (t.tolist() for t in ended)
    ids: list[list[int]] = [[] for _ in ends]
    values: list[list[float]] = [[] for _ in ends]
    for row, token, logprob in zip(
        torch.cat(list(rows)).tolist(),
        torch.cat(list(tokens)).tolist(),
        torch.cat(list(logprobs)).tolist(),
        strict=True,
    ):
        if len(ids[row]) < ends[row]:
            ids[row].append(token)
            values[row].append(logprob)
    if any(not abs(value) < float("inf") for row in values for value in row):
        raise UserError(
            Problem("sampling", "the model's logits are not finite", "check loss and grad_norm of the previous step")
        )
    return [Completion(tuple(i), tuple(t), bool(f)) for i, t, f in zip(ids, values, finished, strict=True)]
