"""`hf-to-megatron --format megatron-lm`: Megatron-Core's own loader fills its own model from the folder.

Covers: megaswift/bridge/convert/to_megatron.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.bridge.convert.to_hf import MegatronToHfOptions, megatron_to_hf
from megaswift.bridge.convert.to_megatron import HfToMegatronOptions, hf_to_megatron
from megaswift.cli import main
from megaswift.errors import CheckpointError
from tests.bridge.folders import make, tensors_of
from tests.bridge.foreign.megatron_writer import Job
from tests.bridge.test_convert import assert_same
from tests.parity.pool import Pool

pytestmark = pytest.mark.process


def loaded(rank: int, world: int, job: Job) -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]]:
    """Of each chunk: the parameters that Megatron-Core's loader gives a model of zeros, those that the weights of the
    folder give it by another way, and what else the checkpoint says."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from tests.bridge.foreign.megatron_writer import models, start

    start(rank, world, job)
    found = []
    for chunk in models(job):
        want = {name: p.detach().clone() for name, p in chunk.named_parameters()}
        for parameter in chunk.parameters():
            parameter.data.zero_()
        metadata = {**dict(job.metadata), "dp_cp_group": parallel_state.get_data_parallel_group(True)}
        wanted = {"model": chunk.sharded_state_dict(metadata=metadata)}
        state, unasked, absent = dist_checkpointing.load(wanted, job.target, strict=StrictHandling.RETURN_ALL)
        assert not unasked and all("._extra_state" in key for key in absent), (unasked, absent)
        chunk.load_state_dict(state["model"], strict=False)
        got = {name: p.detach().clone() for name, p in chunk.named_parameters()}
        found.append((got, want, {name: state[name] for name in ("checkpoint_version", "iteration")}))
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("variant", "job"),
    [
        ("dense", Job("", "", tp=2, pp=2, padding=14)),
        ("moe", Job("", "", ep=2, te_norms=True)),
    ],
)
def test_megatron_cores_own_loader(variant: str, job: Job, pool: Pool, folders: Path, tmp_path: Path) -> None:
    folder = make(variant, folders)
    words = ["--format", "megatron-lm", *(["--tp", str(job.tp)] if job.tp > 1 else [])]
    assert main(["convert", "hf-to-megatron", str(folder), str(tmp_path / "out"), *words]) == 0
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    whole = replace(job, folder=str(folder), target=str(tmp_path / "out" / "release"))
    for rank in pool.run(f"{__name__}:loaded", whole, job.world):
        for got, want, facts in rank:
            assert facts == {"checkpoint_version": 3.0, "iteration": 0}
            for name, tensor in want.items():
                rows = slice(None)
                if job.padding and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                    rows = (tensor != 9.0).any(1)
                assert torch.equal(got[name][rows], tensor[rows]), name
    out = megatron_to_hf(tmp_path / "out", tmp_path / "hf", MegatronToHfOptions(hf_config=folder))
    assert_same(tensors_of(out), tensors_of(folder))


def test_models_that_megatron_core_has_under_other_names(folders: Path, tmp_path: Path) -> None:
    folder = make("qwen3_next", folders)
    with pytest.raises(
        CheckpointError, match="--format megatron-lm with a model of qwen3_next: Megatron-Core has gated"
    ):
        hf_to_megatron(folder, tmp_path / "out", HfToMegatronOptions(megatron_lm=True))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_next"
