"""Offloading of gradients, optimizer states and weights of the native engine while a sampler uses the same device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megaswift.engine.megatron.model import finish_weight_gathers
from megaswift.engine.megatron.optim.adam_update import forget_launch_tables
from megaswift.engine.megatron.optim.optimizer import optimizer_parts
from megaswift.engine.storage_offload import StorageOffloader


class EngineOffload:
    """Parks parts of one engine. Weights that the optimizer keeps in float32 count as its state."""

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.parked = StorageOffloader()

    def optimizer_and_gradients(self) -> None:
        """Gradients are dropped: the next step begins with zeros."""
        finish_weight_gathers(list(self.chunks))
        for part in optimizer_parts(self.optimizer):
            forget_launch_tables(part.optimizer)
        self.parked.park((buffer.grad_data for buffer in self._buffers()), keep=False)
        weights = {p.untyped_storage().data_ptr() for p in self._weights()}
        self.parked.park(t for t in self._states() if t.untyped_storage().data_ptr() not in weights)

    def weights(self) -> None:
        """Nothing can be computed until they are back."""
        self.parked.park(self._weights())

    def bring_back(self) -> None:
        """Everything."""
        self.parked.bring_back()

    def _buffers(self) -> Iterator[Any]:
        for chunk in self.chunks:
            yield from (*chunk.buffers, *chunk.expert_parallel_buffers)

    def _weights(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            yield from (p.data for p in chunk.parameters())

    def _states(self) -> Iterator[Tensor]:
        for part in optimizer_parts(self.optimizer):
            for group in part.optimizer.param_groups:
                yield from (p.data for p in group["params"])
            for state in part.optimizer.state.values():
                yield from (v for v in state.values() if isinstance(v, torch.Tensor))
