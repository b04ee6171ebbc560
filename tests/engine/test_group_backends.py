"""Which backend each process group of a run on GPUs has, recorded on torch's fake one, and that tensors in host memory
only travel through gloo.

Covers: megaswift/engine/megatron/parallel_context.py.
"""

from __future__ import annotations

import ast
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megaswift import distributed
from tests.parity.pool import Pool
from tests.sources import sources

COLLECTIVES = {
    name
    for name in dir(dist)
    if name.startswith(
        ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "scatter")
    )
} | {"send", "recv", "isend", "irecv", "monitored_barrier", "send_object_list", "recv_object_list"}
ON_DEVICE = {
    "megaswift.engine.objective",  # counts of a step, moved to the device
    "megaswift.engine.megatron.layers.moe.router",  # sums of auxiliary losses, moved to the device
    "megaswift.trainers.distillation.teacher",  # shapes of hidden states, moved to the device
}
"""Modules whose collectives on the default group send tensors of the device."""


def recorded(rank: int, world: int, ranks: int) -> dict[str, Any]:
    """The groups of a `ParallelContext` on GPUs, of which there are `ranks` in pretence (runs on a rank)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megaswift.engine.megatron import parallel_context
    from megaswift.parallel.layout import Layout

    os.environ["WORLD_SIZE"] = str(ranks)
    seen: dict[str, Any] = {"default": None, "others": []}
    start, make = dist.init_process_group, dist.new_group

    def start_fake(backend: str, **named: Any) -> None:
        seen["default"] = backend
        start("fake", **named)

    def make_fake(ranks: Any = None, backend: Any = None, **named: Any) -> Any:
        seen["others"].append((backend, ranks))
        return make(ranks, **{k: v for k, v in named.items() if k != "pg_options"})

    with (
        patch.object(dist, "init_process_group", start_fake),
        patch.object(dist, "new_group", make_fake),
        patch.object(parallel_context._device, "runs_without_cuda", lambda: False),
        patch.object(parallel_context._device, "compute_device", lambda: torch.device("cpu")),
    ):
        layout = Layout(world_size=ranks, tp=2, pp=2, cp=2, ep=2, etp=1)
        context = parallel_context.ParallelContext(layout, store=FakeStore())
        seen["control"] = distributed.cpu_group() is not None
        context.close()
        seen["after"] = distributed.cpu_group() is not None
    return seen


@pytest.mark.process
def test_one_gloo_group_beside_nccl(pool: Pool) -> None:
    seen = pool.run("tests.engine.test_group_backends:recorded", 16, 1)[0]
    gloo = [ranks for backend, ranks in seen["others"] if backend == "gloo"]
    rest = {backend for backend, _ in seen["others"] if backend != "gloo"}
    assert seen["default"] == "nccl" and gloo == [None], "None: all ranks"
    assert rest == {None} and len(seen["others"]) > 20, "Megatron's groups have the default group's backend"
    assert seen["control"] and not seen["after"]


def test_everything_in_host_memory_goes_through_that_group() -> None:
    group, calls = object(), []

    def called(name: str) -> Any:
        def record(*args: Any, group: Any = None, **named: Any) -> None:
            calls.append((name, group))
            if name == "all_gather_object":
                args[0][:] = [args[1]] * 2

        return record

    names = ("all_reduce", "all_gather_object", "broadcast_object_list", "barrier")
    with (
        patch.multiple(dist, **{name: called(name) for name in names}),
        patch.multiple(dist, is_initialized=lambda: True, get_world_size=lambda g=None: 2, get_rank=lambda g=None: 0),
        patch.object(distributed, "cpu_group", lambda: group),
    ):
        distributed.barrier()
        distributed.all_max([1.0])
        distributed.all_min_(torch.zeros(1))
        distributed.all_gather_merged_dict({"a": 1})
        distributed.run_and_gather_on_all_ranks(lambda: 1)
        distributed.raise_on_all_ranks([])
        distributed.run_on_rank0(lambda: 1)
    assert {name for name, _ in calls} == set(names)
    assert {used for _, used in calls} == {group}


def test_no_other_module_sends_on_the_default_group() -> None:
    """On NCCL alone a tensor in host memory fails there. (The torch engine's default group has gloo too.)"""
    found = set()
    for source in sources(folders=("megaswift",)):
        exempt = source.module.startswith(("megaswift.engine.torch", "megaswift.engine.megatron.cpu"))
        if exempt or "torch.distributed" not in source.text:
            continue
        for node in source.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COLLECTIVES:
                owner = ast.unparse(node.func.value)
                grouped = any(k.arg == "group" for k in node.keywords) or any(
                    "group" in ast.unparse(a) for a in node.args
                )
                if owner in ("dist", "torch.distributed") and not grouped:
                    found.add(source.module)
    assert found == ON_DEVICE
