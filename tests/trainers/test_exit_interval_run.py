"""`--exit_interval`: a run in pieces, each ended by the option and resumed, beside one in a piece.

Covers: megaswift/trainers/hooks/checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from megaswift.trainers.hooks.metrics import read_lines
from tests.trainers.inputs import write_inputs
from tests.trainers.runs import run

STEPS = ("--max_steps", 5, "--report_to", "none")


def steps(out: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in (out / "checkpoints").glob("step-*"))


@pytest.mark.process
@pytest.mark.parametrize("saving", [(), pytest.param(("--save_strategy", "no"), marks=pytest.mark.slow)])
def test_a_run_in_pieces(saving: tuple[str, ...], tmp_path: Path) -> None:
    """It is saved and ends after steps 2 and 4, also where nothing else would save; the losses and the export are those
    of one run."""
    inputs, whole, pieces = write_inputs(tmp_path), tmp_path / "whole", tmp_path / "pieces"
    run(inputs, whole, *STEPS, ranks=2)
    words = (*STEPS, *saving, "--exit_interval", 2, "--resume_from_checkpoint", "latest")
    for ended in (2, 4, 5):
        run(inputs, pieces, *words, ranks=2)
        lines = read_lines(pieces / "metrics.jsonl")
        assert [line["step"] for line in lines] == [*range(1, ended + 1)]
        assert steps(pieces) == ([2, 4] if saving and ended == 5 else [n for n in (2, 4, 5) if n <= ended])
    log = (pieces / "train.log").read_text()
    assert "finished at step 2: exit_interval 2; --resume_from_checkpoint latest goes on" in log
    assert [line["loss"] for line in lines] == [line["loss"] for line in read_lines(whole / "metrics.jsonl")]
    mine, theirs = (load_file(out / "hf" / "model.safetensors") for out in (pieces, whole))
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)
