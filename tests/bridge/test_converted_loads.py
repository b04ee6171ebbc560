"""Converted checkpoints on real ranks: Megatron's own loader and our engine, on layouts that nobody named when
converting.

Covers: megaswift/bridge/checkpoint/hf_metadata.py, megaswift/bridge/checkpoint/dtypes.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaswift.bridge.checkpoint.hf_metadata import write_checkpoint_hf_metadata
from megaswift.bridge.convert import to_hf, to_megatron
from tests.bridge.folders import plan_of
from tests.bridge.test_convert import assert_same, with_prediction_layer
from tests.engine.checkpoint_worker import Run, build
from tests.parity.cases import parse
from tests.parity.models import build as build_model
from tests.parity.models import disk_tensors
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
JOB = "tests.engine.checkpoint_worker:job"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where model folders and their checkpoints are made."""
    return tmp_path_factory.mktemp("made")


def converted(variant: str, made: Path, tp: int) -> tuple[Path, Path]:
    """(Hugging Face folder, checkpoint), made once."""
    folder, target = build_model(variant, made / variant), made / f"{variant}-tp{tp}"
    if not target.exists():
        to_megatron.hf_to_megatron(folder, target, to_megatron.HfToMegatronOptions({"tp": tp}))
    return folder, target


def megatrons_loader(rank: int, world: int, payload: tuple[Run, Path]) -> dict[str, Tensor]:
    """Weights of an engine with random weights after Megatron-Core's own `load` of a checkpoint, by their Hugging Face
    names."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    run, checkpoint = payload
    engine, context = build(run, world)
    engine.random_init(5)
    for chunk in engine.plain:
        metadata = {"non_homogeneous_layers": True, "dp_cp_group": engine.context.groups.dp_cp}
        wanted = chunk.sharded_state_dict(metadata=metadata)
        loaded, unasked, absent = dist_checkpointing.load(wanted, str(checkpoint), strict=StrictHandling.RETURN_ALL)
        assert not unasked and all(key.endswith("._extra_state") for key in absent), (unasked, absent)
        chunk.load_state_dict(loaded, strict=False)
    found = {name: tensor.clone() for name, tensor in engine.hf_weights()}
    torch.distributed.barrier()
    context.close()
    return found


@pytest.mark.parametrize(
    ("words", "tp"),
    [
        ("moe tp2 sp ep2", 4),
        *(pytest.param(words, 1, marks=pytest.mark.slow) for words in ("dense tp2 pp2", "dense pp2 tied")),
    ],
)
def test_megatrons_own_loader(words: str, tp: int, pool: Pool, made: Path) -> None:
    case = parse(words)
    folder, checkpoint = converted(case.variant, made, tp)
    got = pool.run(f"{__name__}:megatrons_loader", (Run(case, folder), checkpoint), case.world)[0]
    assert_same(got, disk_tensors(folder))


@pytest.mark.parametrize(
    ("words", "tp"),
    [
        ("moe tp2 sp ep2", 2),
        *(pytest.param(words, n, marks=pytest.mark.slow) for words, n in (("dense tp2 pp2", 4), ("moe ep2 dp2 do", 1))),
    ],
)
def test_training_from_a_checkpoint_is_training_from_the_folder(
    words: str, tp: int, pool: Pool, made: Path, tmp_path: Path
) -> None:
    """Two steps: losses, norms, weights and moments to the last bit; and what the run saved goes out as the same
    weights."""
    case = parse(words)
    folder, checkpoint = converted(case.variant, made, tp)
    want = pool.run(JOB, Run(case, folder, last=2), case.world)
    got = pool.run(JOB, Run(case, checkpoint / "model", last=2, save=tmp_path / "engine"), case.world)
    assert [r.losses for r in got] == [r.losses for r in want] and [r.norms for r in got] == [r.norms for r in want]
    assert_same(got[0].weights, want[0].weights)
    assert_same(got[0].moments["exp_avg"], want[0].moments["exp_avg"])
    (tmp_path / "model").symlink_to(checkpoint / "model")
    to_hf.megatron_to_hf(tmp_path, tmp_path / "hf")
    assert_same(disk_tensors(tmp_path / "hf"), want[0].weights)


def save_and_load(rank: int, world: int, run: Run) -> None:
    """A checkpoint of an engine, which that engine takes back."""
    engine, context = build(run, world)
    assert run.save is not None
    engine.save(run.save)
    engine.load(run.save)
    torch.distributed.barrier()
    context.close()


def test_runs_carry_prediction_layers(pool: Pool, tmp_path: Path) -> None:
    """A step of a two-rank run goes out with the layers that it never held."""
    case = parse("glm4_moe pp2")
    folder = build_model(case.variant, tmp_path / "folder")
    want = with_prediction_layer(folder)
    pool.run(f"{__name__}:save_and_load", Run(case, folder, save=tmp_path / "step" / "engine"), case.world)
    plan = plan_of(folder)
    write_checkpoint_hf_metadata(
        tmp_path / "step" / "model", plan.spec.hf_config, {n: want[n].dtype for n in plan.hf_shapes}, folder
    )
    to_hf.megatron_to_hf(tmp_path / "step", tmp_path / "hf")
    assert_same(disk_tensors(tmp_path / "hf"), want)
