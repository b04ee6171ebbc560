"""Checkpoints of runs that train some of the experts: states of the others are missing, and of no others.

Covers: megaswift/engine/megatron/checkpoint/rank_chunks.py, megaswift/bridge/checkpoint/chunk_files.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaswift.bridge.checkpoint.chunk_files import SavedChunk, write_gathered_metadata
from megaswift.errors import UserError
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import global_batch, own, parse
from tests.parity.measure import Task, build, full
from tests.parity.models import build as build_model
from tests.parity.models import disk_tensors
from tests.parity.oracle import Recipe
from tests.parity.pool import Pool


def steps(rank: int, world: int, task: Task) -> dict[str, Any]:
    """Weights after the steps that `fault` numbers; a checkpoint is written before the end of "0", read before "1"."""
    engine, context = build(task.case, task.folder, world, **task.options)
    if task.fault == "1":
        engine.load(task.folder / "saved")
    dp = context.layout.coordinates(rank).dp
    for k in map(int, task.fault):
        engine.train_batch(own(global_batch(task.case, k), task.case.dp, dp), CrossEntropy(), 1e-2)
    if task.fault == "0":
        engine.save(task.folder / "saved")
    found = full(engine.hf_weights())
    torch.distributed.barrier()
    context.close()
    return found


@pytest.mark.process
@pytest.mark.parametrize("text", ["moe dp2 ep2", "moe dp2 do", "moe tp2 sp etp2"])
def test_a_run_resumes(text: str, pool: Pool, tmp_path: Path) -> None:
    """One expert of four trains, which one of two expert-parallel ranks has."""
    folder, case = build_model("moe", tmp_path / "moe"), parse(text)
    options = {"freeze_parameters": (".",), "trainable_parameters": (r"experts\.3\.",), "moe_aux_loss_coeff": 0.0}
    job = "tests.engine.megatron.checkpoint.test_partly_trained_experts:steps"
    whole, _, resumed = (
        pool.run(job, Task(case, folder, Recipe(), options=options, fault=which), case.world)[0]
        for which in ("01", "0", "1")
    )
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[n], resumed[n]) for n in whole)
    moved = {n for n, t in disk_tensors(folder).items() if not torch.equal(t.float(), whole[n])}
    assert moved and all(".experts.3." in name for name in moved)


def test_a_gap_that_no_rank_has_left_out_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank's expert is frozen: said so, its states may be missing; unsaid, or of a weight, they may not."""
    from megaswift import distributed

    def chunk(key: str) -> SavedChunk:
        return SavedChunk(key, (2, 4), (0, 0), (1, 4), torch.float32, "__0_0.distcp", 0, 9)

    other: list[Any] = []
    monkeypatch.setattr(distributed, "gather_on_rank0", lambda mine: [mine, ([], other)])
    state, weight = chunk("optimizer.state.exp_avg.experts.w"), chunk("experts.w")
    with pytest.raises(UserError, match=r"exp_avg\.experts\.w invalid fill"):
        write_gathered_metadata(tmp_path, [state])
    other.append(("experts.w", (1, 0), (1, 4)))
    assert ".metadata" in write_gathered_metadata(tmp_path, [state])
    with pytest.raises(UserError, match=r"key:experts\.w invalid fill"):
        write_gathered_metadata(tmp_path, [weight, state])
