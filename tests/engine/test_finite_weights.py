"""Weights that are not finite are refused, and named, by either engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaswift import entry
from megaswift.engine import finite_weights
from megaswift.errors import WeightsError
from tests.trainers.inputs import write_inputs


@pytest.mark.parametrize("dtype", finite_weights.CHECKED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value(dtype: torch.dtype, bad: float) -> None:
    tensor = torch.arange(12.0, dtype=dtype).reshape(3, 4)
    assert finite_weights.is_finite(tensor)
    tensor[1, 2] = bad
    assert not finite_weights.is_finite(tensor)
    with pytest.raises(WeightsError, match=r"in b$|in b\n"):
        finite_weights.check([("a", torch.ones(2)), ("b", tensor)])


def test_what_is_not_looked_at() -> None:
    for tensor in (
        torch.ones(3, dtype=torch.int64),
        torch.ones(0),
        torch.ones(3, device="meta"),
        torch.ones(2, dtype=torch.uint8),
    ):
        assert finite_weights.is_finite(tensor)


@pytest.mark.process
@pytest.mark.parametrize("engine", ["megatron", "ddp"])
def test_a_run_is_refused_before_its_first_step(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write_inputs(tmp_path)
    path, name = tmp_path / "model/model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(path)
    tensors[name][3, 4] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(SystemExit) as left:
        entry.main("sft", [*words, "--engine", engine, "--max_steps", "2", "--output_dir", str(tmp_path / "out")])
    err = capsys.readouterr().err
    assert left.value.code == 2 and f"not finite (NaN or infinity) in {name}" in err
    assert not (tmp_path / "out/metrics.jsonl").exists()
