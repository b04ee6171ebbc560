"""The decode loop of the transformers sampler: prefill of one batch of prompts, then one token per row and step.

Prompts are padded on the left. Equal prompts are prefilled once. Finished rows are dropped from the batch once they are
an eighth of it. Rows share nothing but the matrix products, so a row's tokens do not depend on the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megaswift.device_copy import copy_to_device_async
from megaswift.errors import Problem, UserError
from megaswift.rollout.kv_cache import STEP, build_preallocated_cache, keep_rows
from megaswift.rollout.sampler import Completion, SamplingParams
from megaswift.rollout.token_sampling import RowGenerators, choose_tokens


class DecodingBatch:
    """The state of a batch: KV cache, masks, positions and generators of its rows, each a prompt with its seed."""

    def __init__(
        self, model: Any, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> None:
        self.model, self.sampling, self.device = model, sampling, model.device
        self.draws = RowGenerators(seeds, self.device) if sampling.temperature else None
        unique = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        self.origin = copy_to_device_async(torch.tensor([unique[p] for p in prompts]), self.device)
        self.width = max(map(len, unique))
        self.cache = build_preallocated_cache(model.config, self.origin, self.width + min(sampling.max_tokens, STEP))
        self.stops = copy_to_device_async(torch.tensor(sampling.stop_token_ids, dtype=torch.long), self.device)
        self.lengths = copy_to_device_async(torch.tensor([len(p) for p in prompts]), self.device)
        """[rows]: length of each row's prompt, also the position of its first completion token."""
        columns = self.width + sampling.max_tokens if len({len(p) for p in unique}) > 1 else 0
        self.mask = torch.ones(len(prompts), columns, dtype=torch.bool, device=self.device) if columns else None
        """[rows, columns] bool: False at padding; None where all prompts have one length."""
        if self.mask is not None:
            self.mask[:, : self.width] = (
                torch.arange(self.width, device=self.device) >= self.width - self.lengths[:, None]
            )
        self.seen: Tensor | None = None
        """[rows, V] bool: tokens of prompt and completion, for the repetition penalty; None without one."""
        self.unique = list(unique)

    def read(self) -> Tensor:
        """Prefills the prompts; returns logits [rows, V] of the first token."""
        padded_prompts = torch.tensor([[0] * (self.width - len(p)) + list(p) for p in self.unique])
        ids = copy_to_device_async(padded_prompts, self.device)  # [prompts, width]
        lengths = copy_to_device_async(torch.tensor([len(p) for p in self.unique]), self.device)
        columns = torch.arange(self.width, device=self.device)
        positions = (columns - (self.width - lengths[:, None])).clamp(min=0)
        padded = None if self.mask is None else columns >= self.width - lengths[:, None]
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        logits = self._forward(ids, padded, positions, **last)
        logits = logits.index_select(0, self.origin)
        if self.sampling.repetition_penalty != 1:
            seen = torch.zeros(len(self.unique), logits.shape[-1], dtype=torch.bool, device=self.device)
            for row, prompt in enumerate(self.unique):
                seen[row, list(prompt)] = True
            self.seen = seen.index_select(0, self.origin)
        return logits

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, **options: Any) -> Tensor:
        """Logits [b, V] of the last position."""
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **options,
        )
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
    model: Any, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, seeds: Sequence[int]
) -> list[Completion]:
    """The completions of one batch, in the order of `prompts`."""
    batch = DecodingBatch(model, prompts, sampling, seeds)
    steps, count = sampling.max_tokens, len(prompts)
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    rows: list[Tensor] = []
    live = torch.arange(count, device=batch.device)  # prompt index of each row that is left
    ends = torch.full((count,), steps, device=batch.device)  # tokens of each completion
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
        if len(batch.stops):
            done = active & torch.isin(chosen, batch.stops)
            if bool(done.any()):
                ends[live[done]], finished[live[done]] = step + 1, True
                active = active & ~done
                remaining = int(active.sum())
                if not remaining:
                    break
                if 8 * remaining <= 7 * len(live):
                    unfinished = active.nonzero()[:, 0]
                    batch.keep(unfinished)
                    chosen, live, active = chosen[unfinished], live[unfinished], active[unfinished]
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
