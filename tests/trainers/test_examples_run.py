"""The examples of configs/ for small machines, each one step on a tiny model: what is in them runs, with the engine
that is meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megaswift.config import load_config
from megaswift.engine.options.engine_checks import requested_engine
from megaswift.trainers.hooks.metrics import read_lines
from tests.config.test_load import EXAMPLES
from tests.run.test_training import run
from tests.trainers.inputs import write_inputs

FALLBACK = [path for path in EXAMPLES if path.parent.name == "fallback"]
QUICK = ("small_ddp.yaml",)
SMALLER = ("--max_steps", 1, "--max_length", 64, "--global_batch_size", 8, "--report_to", "none")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.process
@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.name, marks=[] if p.name in QUICK else pytest.mark.slow) for p in FALLBACK]
)
def test_an_example_runs(path: Path, inputs: list[str], tmp_path: Path) -> None:
    """On two processes; the precision, the engine and the options of the file, another model and size."""
    engine = requested_engine(load_config("sft", [str(path)], environ={}))
    run([str(path), *inputs], tmp_path / "out", *SMALLER)
    (line,) = read_lines(tmp_path / "out" / "metrics.jsonl")
    assert 0 < line["loss"] < 10
    made = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert (
        made["engine"]["engine"] == ("ddp" if engine == "auto" else engine)
        and made["model"]["torch_dtype"] == "bfloat16"
    )
