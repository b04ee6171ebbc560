"""Whole commands on the stand-in for an H200, in the ranks of a pool, with a fault where a test plants one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tests.fake_cuda import h200
from tests.fake_cuda.faults import FAULTS
from tests.fake_cuda.h200 import STAND_IN
from tests.placement import collectives
from tests.placement.steps import _addmm, _name_the_devices_of_optimizers


def install() -> None:
    """The stand-in's device under the calls of torch, of Transformer Engine's kernels and of collectives."""
    from megaswift.engine.megatron import engine, parallel_context  # noqa: F401 - collectives are bound where used
    from megaswift.engine.megatron.cpu import collectives as cpu_collectives
    from megaswift.engine.megatron.cpu import patches
    from megaswift.engine.torch import process_group  # noqa: F401

    if "transformer_engine_torch" in sys.modules:
        from tests.te import registry
        from tests.te.cuda import Cuda

        registry.LAUNCH.append(STAND_IN.launch)
        Cuda.current_device = lambda self: h200.CUDA  # type: ignore[method-assign]
        Cuda.synchronize = lambda self, *_: STAND_IN.synchronized()  # type: ignore[method-assign]
    of_gloo = [
        row
        for row in patches.REPLACEMENTS
        if getattr(row.value, "__module__", "") == cpu_collectives.__name__
        or row.symbol.endswith("_coalescing_manager")
    ]
    patches._replace(of_gloo)
    collectives.install(STAND_IN)
    _name_the_devices_of_optimizers()
    torch.addmm = _addmm(torch.addmm)
    h200.mark_in_threads()


def count_waits_between_steps() -> Callable[[], dict[str, int]]:
    """What the host waited for in the last iteration of the loop: gives it once the command has ended."""
    from megaswift.engine.megatron.engine import MegatronEngine
    from megaswift.engine.torch.engine import TorchEngine

    seen: list[tuple[int, dict[str, int]]] = []

    def counted(train: Any) -> Any:
        def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((id(self), STAND_IN.counted()))
            return train(self, *args, **kwargs)

        return train_batch

    for kind in (MegatronEngine, TorchEngine):
        kind.train_batch = counted(kind.train_batch)  # type: ignore[method-assign]

    def last() -> dict[str, int]:
        steps = [number for number, (engine, _) in enumerate(seen) if engine == seen[0][0]]
        if len(steps) < 2:
            return {}
        between = seen[steps[-2] + 1 : steps[-1] + 1]
        return dict(sum((Counter(waits) for _, waits in between), Counter()))

    return last


def work(rank: int, world: int, command: tuple[str, list[str], str]) -> dict[str, int]:
    """A command line, with the fault of that name; the waits of its last step (on the ranks)."""
    from megaswift import cli
    from megaswift.commands.training import main

    name, words, fault = command
    install()
    waits = count_waits_between_steps()
    sys.argv = [f"megaswift/{name}.py", *words]
    with STAND_IN.running():
        if fault:
            FAULTS[fault]()
        code = cli.main([name, *words]) if name in ("export", "infer") else main(name, words)
    assert code == 0, f"exit code {code}"
    return waits()
