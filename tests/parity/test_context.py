"""How long a collective may take: as the run says, in every group."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaswift.config import SwiftConfig
from tests.parity.pool import Pool


def patience(rank: int, world: int, seconds: float) -> list[float]:
    """Seconds of the world's group and of two of Megatron's (on the ranks)."""
    from megaswift.engine.megatron.parallel_context import ParallelContext
    from megaswift.parallel.layout import Layout

    context = ParallelContext(Layout(world, tp=world), timeout_s=seconds)
    groups = [torch.distributed.group.WORLD, context.groups.tp, context.groups.pp]
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    context.close()
    return found


@pytest.mark.process
def test_a_collective_has_the_time_that_was_given(pool: Pool) -> None:
    assert pool.run("tests.parity.test_context:patience", 90.0, 2) == [[90.0] * 3] * 2


@pytest.mark.parametrize(("options", "seconds"), [({}, 600.0), ({"ddp_timeout": 77}, 77.0)])
def test_a_run_gives_it(options: dict[str, Any], seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from megaswift.parallel.layout import Layout
    from megaswift.run import build
    from megaswift.run import training as module

    class Stop(Exception):
        pass

    def context(layout: Any, timeout_s: float, *_: Any, **__: Any) -> None:
        raise Stop(timeout_s)

    monkeypatch.setattr(build, "locate_model", lambda *_, **__: Path())
    monkeypatch.setattr(build, "model_spec_for_task", lambda *_: None)
    monkeypatch.setattr(build, "ModelShape", SimpleNamespace(of=lambda _: None))
    monkeypatch.setattr(build, "legal_layout", lambda *_: Layout(1))
    monkeypatch.setattr("megaswift.engine.megatron.parallel_context.ParallelContext", context)
    with pytest.raises(Stop) as caught:
        module.run_training(SwiftConfig(model="m", dataset="d", **options))
    assert caught.value.args == (seconds,)
