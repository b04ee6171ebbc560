"""A step of one engine goes on in the other through its weights; as a step to resume from it is refused, with what
would do.

Covers: megaswift/bridge/checkpoint/torch_step.py, megaswift/engine/torch/checkpoint.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megaswift.bridge.convert.to_hf import megatron_to_hf
from megaswift.config import SwiftConfig
from megaswift.run import output
from megaswift.trainers.hooks.metrics import read_lines
from tests.bridge.folders import tensors_of
from tests.bridge.test_convert import assert_same
from tests.parity.pool import Pool
from tests.trainers.inputs import write_inputs
from tests.trainers.run_ranks import Job

pytestmark = pytest.mark.process
WORDS = (
    "--max_steps",
    "2",
    "--save_steps",
    "1",
    "--report_to",
    "none",
    "--adam_epsilon",
    "1e-6",
    "--global_batch_size",
    "8",
)
NATIVE, TORCH = ("--tp", "2"), ("--engine", "fsdp2")


def run(pool: Pool, inputs: list[str], model: Path | str, out: Path, *words: str) -> list[dict[str, float]]:
    """The curve of a run on 2 ranks from a model's folder or a step."""
    job = Job(["--model", str(model), *inputs[2:], *WORDS, *words, "--output_dir", str(out)])
    pool.run("tests.trainers.run_ranks:go", job, 2, timeout=240)
    return [{key: line[key] for key in ("loss", "grad_norm")} for line in read_lines(out / "metrics.jsonl")]


def close(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> bool:
    return len(mine) == len(theirs) == 2 and all(
        a == pytest.approx(b, rel=1e-5) for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize(("first", "other"), [(TORCH, NATIVE), pytest.param(NATIVE, TORCH, marks=pytest.mark.slow)])
def test_from_a_step_of_the_other(first: tuple[str, ...], other: tuple[str, ...], pool: Pool, tmp_path: Path) -> None:
    """The first folder is gone by then: the step is enough. Both engines go on from it alike, and it is the run's own
    export."""
    inputs = write_inputs(tmp_path, "1e-3")
    begun = tmp_path / "begun"
    run(pool, inputs, inputs[1], begun, *first)
    shutil.rmtree(inputs[1])
    step = begun / "checkpoints" / "step-2"
    mine = run(pool, inputs, step, tmp_path / "mine", *other)
    assert close(mine, run(pool, inputs, begun / "hf", tmp_path / "theirs", *first))
    assert {p.name for p in (tmp_path / "mine" / "hf").iterdir()} == {p.name for p in (begun / "hf").iterdir()}
    assert_same(tensors_of(megatron_to_hf(step, tmp_path / "made")), tensors_of(begun / "hf"))
    cfg = SwiftConfig(
        model=str(begun / "hf"),
        dataset=[inputs[3]],
        resume_from_checkpoint=str(step),
        output_dir=str(tmp_path / "new"),
        engine="megatron" if other == NATIVE else "fsdp2",
    )
    told = "\n".join(str(p) for p in output.output_folder_problems(cfg))
    wrote = "torch engine" if other == NATIVE else "native engine"
    assert wrote in told and f"--model {step}" in told
