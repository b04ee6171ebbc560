"""KTO with one row a device: mismatched pairs of the whole global batch, against TRL with all rows in one micro-batch;
in evaluation; from a checkpoint.

Covers: megaswift/trainers/batch_fields.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.test_trajectories_trl import BATCH, SLOW, assert_same, folder, kto, ours  # noqa: F401

ROWS = ("--per_device_train_batch_size", 1, "--global_batch_size", BATCH)


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [
        (),
        pytest.param(("--tp", 2), marks=SLOW),
        pytest.param(("--pp", 2, "--packing", "false"), marks=SLOW),
        pytest.param(("--engine", "ddp"), marks=SLOW),
        pytest.param(("--engine", "zero3"), marks=SLOW),
    ],
)
def test_kto_with_one_row_a_device(
    layout: tuple[object, ...],
    folder: Path,  # noqa: F811
    kto: list[tuple[float, float]],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Mismatched pairs and their point are those of the global batch: TRL's in one micro-batch of all rows."""
    assert_same(ours(folder, tmp_path / "out", "kto", "--beta", 0.5, *ROWS, *layout), kto)


@pytest.mark.process
@SLOW
def test_evaluation_and_a_checkpoint(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """Evaluation has the loss of micro-batches with all rows of a step; a resumed run repeats the steps."""
    more = ("--val_dataset", folder / "judged.jsonl", "--save_steps", 3)
    whole = ours(folder, tmp_path / "whole", "kto", *more)
    ours(folder, tmp_path / "one", "kto", *ROWS, *more)
    losses = [read_lines(tmp_path / name / "eval.jsonl")[-1]["loss"] for name in ("whole", "one")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and abs(losses[0] - 0.5) > 1e-4
    resumed = ("--resume_from_checkpoint", tmp_path / "one/checkpoints/step-3")
    again = ours(folder, tmp_path / "again", "kto", *ROWS, *more, *resumed)
    assert again == [(x["loss"], x["grad_norm"]) for x in read_lines(tmp_path / "one/metrics.jsonl")][3:]
    assert whole
