"""Process groups and random states of a run. Several engines (policy, critic, reward model) can share one context; a
teacher with a layout of its own has one `beside` it.

Owns initialization and tear-down of torch.distributed and of Megatron-Core's groups for a `Layout`; what runs on them
is not here.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megaswift.engine import process_group
from megaswift.engine.megatron.cpu import patches as _device
from megaswift.engine.megatron.cuda_graphs import delete_captured_graphs
from megaswift.engine.megatron.tp_comm_overlap import destroy_user_buffers
from megaswift.parallel.layout import Layout


def _core_variables() -> dict[str, Any]:
    """The variables in which Megatron-Core keeps the groups of the process."""
    own = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name[1] != "_"}
    return {name: value for name, value in own.items() if not callable(value) and not isinstance(value, ModuleType)}


_UNSET = {name: copy.copy(value) for name, value in _core_variables().items()}


class ParallelContext:
    """The groups of `layout` on this process. Made once a process; `close` before another is made.

    `context_levels`: sizes of the groups inside the context-parallel one, innermost first, for `a2a+p2p`.
    `cuda_graphs`: random states are Transformer Engine's, which a CUDA graph can advance.
    """

    def __init__(
        self,
        layout: Layout,
        timeout_s: float = 600.0,
        seed: int = 42,
        context_levels: Sequence[int] = (),
        store: dist.Store | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        self.layout = layout
        self.cuda_graphs = cuda_graphs
        self.rank = int(os.environ.get("RANK", "0"))
        world = int(os.environ.get("WORLD_SIZE", "1"))
        layout.check_processes(world)
        self._timeout_s = timeout_s
        self._parked: dict[str, Any] | None = None
        """Megatron-Core's variables with the groups of this context while another one's are in their place; None where
        it never is."""
        self._start(timeout_s, store)
        self.device = _device.compute_device()
        self._make_groups(context_levels)
        self.seed(seed)

    def _make_groups(self, context_levels: Sequence[int] = ()) -> None:
        layout = self.layout
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            hierarchical_context_parallel_sizes=list(context_levels) or None,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=self._timeout_s / 60,  # a float does: Megatron-Core makes a timedelta of it
            create_gloo_process_groups=False,  # a mesh of sockets between all ranks for each group, unused
        )
        self.coordinates = layout.coordinates(self.rank)
        self.groups = ProcessGroupCollection.use_mpu_process_groups()

    def beside(self, layout: Layout) -> ParallelContext:
        """Return a context of the same processes in another layout, for a second model. Collective.

        Megatron-Core reads groups from variables of its module too: whatever runs on the second model runs within
        `active`.
        """
        layout.check_processes(self.layout.world_size)
        other = copy.copy(self)
        other.layout = layout
        other._parked = {name: copy.copy(value) for name, value in _UNSET.items()}
        with other.active():
            other._make_groups()
        return other

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put the groups of this context in Megatron-Core's variables for a block; the run's own context has them
        there always."""
        if self._parked is None:
            yield
            return
        outer = _core_variables()
        vars(parallel_state).update(self._parked)
        try:
            yield
        finally:
            self._parked = _core_variables()
            vars(parallel_state).update(outer)

    def _start(self, timeout_s: float, store: dist.Store | None) -> None:
        if not _device.runs_without_cuda():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # not "cpu:gloo,cuda:nccl": each of Megatron's groups would connect by gloo too
        process_group.init_default_and_gloo_process_groups(
            "gloo" if _device.runs_without_cuda() else "nccl", timeout_s, store
        )

    def seed(self, seed: int) -> None:
        """Random states for dropout: one for what tensor-parallel ranks share, one each for what they split.

        Ranks with other data, sequence parts or layers draw other numbers. Weights never come from these (see
        weights.py).
        """
        coords = self.coordinates
        layout = self.layout
        place = coords.cp + layout.cp * (coords.dp + layout.dp * coords.pp)
        # Plugins may draw from Python's, NumPy's and the CPU's generators: ranks with the same data draw the same.
        place_seed = seed + 10_000 * place
        random.seed(place_seed)
        np.random.seed(place_seed % 2**32)
        torch.manual_seed(place_seed)
        tensor_parallel.model_parallel_cuda_manual_seed(
            place_seed, te_rng_tracker=self.cuda_graphs, force_reset_rng=True
        )

    def close(self) -> None:
        """Take the groups down; another layout may follow in this process.

        Everything goes, torch.distributed too: Megatron's own tear-down alone leaks file descriptors and threads.
        """
        destroy_user_buffers()
        if self.cuda_graphs:
            delete_captured_graphs()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        if dist.is_initialized():
            dist.destroy_process_group()
