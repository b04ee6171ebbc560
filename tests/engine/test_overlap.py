"""Communication behind computation: on by default on a GPU, off on a CPU, as the options say where they say
something."""

from __future__ import annotations

from typing import Any

import pytest

from megaswift.config import SwiftConfig
from megaswift.engine.megatron.model import ddp_overlap_flags

OFF: dict[str, Any] = {"overlap_grad_reduce": False}
BOTH: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("options", "on_gpu", "on_cpu"),
    [
        ({}, (True, True), (False, False)),
        ({"distributed_optimizer": False}, (True, False), (False, False)),
        (OFF, (False, False), (False, False)),
        ({"overlap_param_gather": False}, (True, False), (False, False)),
        (BOTH, (True, True), (True, True)),
    ],
)
def test_defaults_and_options(options: dict[str, Any], on_gpu: tuple[bool, bool], on_cpu: tuple[bool, bool]) -> None:
    p = SwiftConfig(task="sft", model="m", dataset="d", tp=2, **options).parallel
    flags = [ddp_overlap_flags(p, p.distributed_optimizer, cuda) for cuda in (True, False)]
    assert flags == [on_gpu, on_cpu]
