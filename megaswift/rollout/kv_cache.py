"""Keys and values of a batch that is decoded: room made ahead, one prompt for many rows, rows that leave.

transformers' own cache copies itself with every token. This one writes into its place, and keeps transformers'
protocol, so models and their masks do not know the difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from megaswift.errors import ConfigError, Problem

STEP = 256
"""Columns that are added at least when the room is used up."""


class RowLayer(DynamicLayer):
    """One layer's keys and values [rows, heads, room, dim], of which `length` columns are in use."""

    def __init__(self, origin: Tensor, columns: int, window: int | None) -> None:
        super().__init__()
        self.origin, self.columns, self.window = origin, columns, window
        self.is_sliding = window is not None
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes new columns. The first call brings each prompt once [prompts, heads, width, dim]; later ones a column
        for each row."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        if not start:
            self.keys = self._room(key_states, len(self.origin))
            self.values = self._room(value_states, len(self.origin))
            self.keys[:, :, : self.length] = key_states.index_select(0, self.origin)
            self.values[:, :, : self.length] = value_states.index_select(0, self.origin)
            self.is_initialized = True
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        if self.length > self.keys.shape[-2]:
            self.columns = self.length + max(STEP, self.length // 2)
            old = self.keys, self.values
            self.keys, self.values = (self._room(t, len(t)) for t in old)
            self.keys[:, :, :start], self.values[:, :, :start] = (t[:, :, :start] for t in old)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        first = self._first(start)
        return self.keys[:, :, first : self.length], self.values[:, :, first : self.length]

    def _room(self, like: Tensor, rows: int) -> Tensor:
        return like.new_empty(rows, like.shape[1], max(self.columns, self.length), like.shape[3])

    def _first(self, before: int) -> int:
        """The first column that a query after `before` columns sees."""
        return 0 if self.window is None else max(before - self.window + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(Columns that the next `update` returns, the first of them)."""
        first = self._first(self.length)
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.length

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows, given in order."""
        assert self.keys is not None and self.values is not None
        for kept in (self.keys, self.values):
            kept[: len(rows), :, : self.length] = kept[rows, :, : self.length]
        self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]


def row_cache(config: Any, origin: Tensor, columns: int) -> Cache:
    """A cache for rows whose prompts are `origin` [rows] of the first batch, with room for `columns` tokens to start
    with."""
    made: list[Any] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) is DynamicLayer:
            made.append(RowLayer(origin, columns, None))
        elif type(layer) is DynamicSlidingWindowLayer:
            made.append(RowLayer(origin, columns, int(layer.sliding_window)))
        else:
            raise ConfigError(
                Problem(
                    "--rollout_backend transformers",
                    f"knows attention only, and this model has a layer that "
                    f"remembers otherwise ({type(layer).__name__})",
                    "--rollout_backend vllm",
                )
            )
    return Cache(layers=made)


def keep_rows(cache: Cache, rows: Tensor) -> None:
    """The cache goes on with these rows only."""
    for layer in cache.layers:
        assert isinstance(layer, RowLayer)
        layer.keep(rows)


def check_layers(config: Any) -> None:
    """ConfigError for a model whose cache is of another kind."""
    row_cache(config, torch.zeros(1, dtype=torch.long), 1)
