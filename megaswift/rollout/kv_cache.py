"""Preallocated cache of the decode loop: expands one prompt to many rows, drops finished rows.

transformers' own cache of keys and values is concatenated, hence copied, for every token. This one writes in place and
implements transformers' cache protocol, so models and their masks need no change. Layers with linear attention keep
their states, whose size no token changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from megaswift.errors import ConfigError, Problem

LINEAR = "linear_attention"
"""transformers' name of layers with recurrent states, among a model's `layer_types`."""
STEP = 256
"""Smallest number of columns by which a full cache grows."""


class PreallocatedCacheLayer(DynamicLayer):
    """One layer's keys and values [rows, heads, columns, dim], of which `length` columns are in use."""

    def __init__(self, origin: Tensor, columns: int, window: int | None) -> None:
        super().__init__()
        self.origin = origin
        self.columns = columns
        self.window = window
        self.is_sliding = window is not None
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends columns. The first call has each prompt once [prompts, heads, width, dim]; later calls have one
        column per row."""
        start = self.length
        self.length = self.length + key_states.shape[-2]
        if not start:
            self.keys = self._allocate(key_states, len(self.origin))
            self.values = self._allocate(value_states, len(self.origin))
            self.keys[:, :, : self.length] = key_states.index_select(0, self.origin)
            self.values[:, :, : self.length] = value_states.index_select(0, self.origin)
            self.is_initialized = True
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        if self.length > self.keys.shape[-2]:
            self.columns = self.length + max(STEP, self.length // 2)
            old = self.keys, self.values
            self.keys, self.values = (self._allocate(t, len(t)) for t in old)
            self.keys[:, :, :start], self.values[:, :, :start] = (t[:, :, :start] for t in old)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        first = self._first(start)
        return self.keys[:, :, first : self.length], self.values[:, :, first : self.length]

    def _allocate(self, like: Tensor, rows: int) -> Tensor:
        return like.new_empty(rows, like.shape[1], max(self.columns, self.length), like.shape[3])

    def _first(self, before: int) -> int:
        """The first column inside the window of a query after `before` columns."""
        return 0 if self.window is None else max(before - self.window + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(Number of columns that the next `update` returns, index of the first)."""
        first = self._first(self.length)
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        """Number of columns in use."""
        return self.length

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (indices, ascending), in place."""
        assert self.keys is not None and self.values is not None
        for cached in (self.keys, self.values):
            cached[: len(rows), :, : self.length] = cached[rows, :, : self.length]
        self.keys = self.keys[: len(rows)]
        self.values = self.values[: len(rows)]


class ExpandedStateLayer(LinearAttentionLayer):
    """One layer's last inputs of its convolution [rows, channels, taps] and its recurrent state [rows, heads, dk, dv].

    transformers' decoding steps change the former in place, and read both as attributes.
    """

    def __init__(self, origin: Tensor) -> None:
        super().__init__()
        self.origin = origin

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keeps the last inputs. The first call has each prompt once [prompts, channels, width], as its result does."""
        first = not self.has_previous_state[state_idx]
        inputs: Tensor = super().update_conv_state(conv_states, state_idx, **kwargs)
        if first:
            self.conv_states[state_idx] = self._of_rows(self.conv_states[state_idx])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keeps the state; the first call has each prompt's once."""
        first = not self.is_recurrent_states_initialized[state_idx]
        state: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        if first:
            self.recurrent_states[state_idx] = self._of_rows(state)
        return state

    def _of_rows(self, of_prompts: Tensor | None) -> Tensor:
        assert of_prompts is not None
        return of_prompts.index_select(0, self.origin)

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but these (indices, ascending)."""
        self.reorder_cache(rows)


def build_preallocated_cache(config: Any, origin: Tensor, columns: int) -> Cache:
    """A cache of len(origin) rows; row i continues prompt `origin[i]` of the first call. `columns`: initial capacity of
    keys and values."""
    layers: list[Any] = []
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    counts_tokens = any(kind != LINEAR for kind in kinds)  # a cache of states alone has no length
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is LinearAttentionLayer and counts_tokens and kinds[number] == LINEAR:
            layers.append(ExpandedStateLayer(origin))
        elif type(layer) is DynamicLayer:
            layers.append(PreallocatedCacheLayer(origin, columns, None))
        elif type(layer) is DynamicSlidingWindowLayer:
            layers.append(PreallocatedCacheLayer(origin, columns, int(layer.sliding_window)))
        else:
            raise ConfigError(
                Problem(
                    "--rollout_backend transformers",
                    "supports layers with full, windowed or linear attention only; this model's cache has a "
                    f"{type(layer).__name__}",
                    "--rollout_backend vllm",
                )
            )
    return Cache(layers=layers)


def keep_rows(cache: Cache, rows: Tensor) -> None:
    """Drops all rows but these from every layer."""
    for layer in cache.layers:
        assert isinstance(layer, PreallocatedCacheLayer | ExpandedStateLayer)
        layer.keep(rows)


def check_kv_cache_layer_types(config: Any) -> None:
    """ConfigError for a model whose cache has layers other than full, sliding-window or linear attention."""
    build_preallocated_cache(config, torch.zeros(1, dtype=torch.long), 1)
