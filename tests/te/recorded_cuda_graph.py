"""CUDA graphs on the test device: what is captured is recorded operation by operation, and a replay computes the same
operations on the same tensors again.

As on a GPU, a capture changes no tensor that was there before it, Python runs during the capture alone, and an
operation whose result the host reads ends it with an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map


def memory(value: Any) -> Any:
    """A graph knows a tensor's memory, whatever becomes of the tensor."""
    return value.detach() if isinstance(value, Tensor) else value


class RecordedGraph(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`."""

    captured = replays = 0
    """Of all graphs of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self.made: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def register_generator_state(self, state: Any) -> None:
        """Random numbers are not drawn in a graph here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert "_local_scalar_dense" not in str(func), "the host reads a tensor during a capture"
        self._keep_what_is_changed(func, args)
        return self.record(func, args, kwargs)

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result, and the operation for replays."""
        out = func(*args, **kwargs)
        self.made |= {t.untyped_storage().data_ptr() for t in tree_flatten(out)[0] if isinstance(t, Tensor)}
        self.operations.append(tuple(tree_map(memory, part) for part in (func, args, kwargs, out)))
        return out

    def _keep_what_is_changed(self, func: Any, args: Any) -> None:
        schema = func._schema.arguments
        for argument, value in zip(schema, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_flatten(value)[0]:
                place = tensor.untyped_storage().data_ptr()
                if place not in self.made and place not in self.before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                    self.before[place] = (whole, whole.clone())

    def end_capture(self) -> None:
        """Nothing has run yet."""
        for whole, copy in self.before.values():
            whole.copy_(copy)
        RecordedGraph.captured += 1

    @torch.no_grad()
    def replay(self) -> None:
        """All operations, into the tensors of the capture."""
        RecordedGraph.replays += 1
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def recorded(exchange: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An exchange between ranks as one operation of a graph."""

    def one_operation(*args: Any) -> Tensor:
        graph = _get_current_dispatch_mode()
        if not isinstance(graph, RecordedGraph):
            return exchange(*args)
        with _disable_current_modes():
            return graph.record(exchange, args, {})

    return one_operation


@contextmanager
def capture(graph: RecordedGraph, **_: Any) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    with graph:
        yield
    graph.end_capture()


def get_generator(*_: Any, graph_safe: bool = True, **__: Any) -> Any:
    """The state as Transformer Engine's tracker keeps it: a generator where graphs are to advance it."""
    return torch.default_generator.clone_state() if graph_safe else torch.get_rng_state()


def set_generator(state: Any, *_: Any, **__: Any) -> None:
    """The inverse of `get_generator`."""
    torch.set_rng_state(state.get_state() if isinstance(state, torch.Generator) else state)


def install() -> None:
    """On this rank, once Megatron-Core is imported."""
    from megatron.core.transformer import cuda_graphs
    from transformer_engine.pytorch import distributed

    from megaswift.engine.megatron.cpu import collectives

    collectives._gathered, collectives._received = recorded(collectives._gathered), recorded(collectives._received)
    distributed._get_cuda_rng_state, distributed._set_cuda_rng_state = get_generator, set_generator
    torch.cuda.CUDAGraph, torch.cuda.graph = RecordedGraph, capture  # type: ignore[misc, assignment]
    torch.cuda.graph_pool_handle = lambda: 0  # type: ignore[assignment]
    torch.cuda.set_stream = lambda _: None  # type: ignore[assignment]
    torch.cuda.default_stream = lambda *_: None  # type: ignore[assignment]
    torch.cuda.memory_stats = lambda *_: defaultdict(int)  # type: ignore[assignment]
    cuda_graphs.make_weak_ref = torch.Tensor.detach
    cuda_graphs.get_all_rng_states = dict
