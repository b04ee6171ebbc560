"""The rank side of the resume tests on Transformer Engine's own FusedAdam (tests/te)."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tests.engine import checkpoint_worker, fused_adam
from tests.engine.checkpoint_worker import Result, Run


def job(rank: int, world: int, run: Run) -> Result:
    """`checkpoint_worker.job`, float16 allowed on a CPU; `moments["main"]` has the main weights where the optimizer is
    distributed."""
    import transformer_engine.pytorch.optimizers as te
    from megatron.core import optimizer as home

    from megaswift.engine.megatron import engine, transformer_config

    assert home.Adam is te.FusedAdam and engine is not None

    def asked(torch_dtype: str, spec: Any, cuda: bool) -> Any:
        return transformer_config.DTYPES[torch_dtype]

    patches = [patch.object(transformer_config, "compute_dtype", asked)]
    if run.case.do and not run.options.get("optimizer_cpu_offload"):
        patches.append(patch.object(checkpoint_worker, "snapshot", fused_adam.snapshot))
    for one in patches:
        one.start()
    result: Any = checkpoint_worker.job(rank, world, run)
    return result
