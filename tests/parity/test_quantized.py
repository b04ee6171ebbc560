"""Training from an FP8 folder as DeepSeek-V3's is stored: as Hugging Face does from the weights that transformers dequantises."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bridge.folders import rewrite, set_config, tensors_of
from tests.bridge.quantise import quantise_fp8
from tests.parity.cases import global_batch, parse
from tests.parity.compare import compare, table
from tests.parity.measure import STEPS, Task
from tests.parity.oracle import reference
from tests.parity.pool import Pool
from tests.parity.references import References


def dequantised(folder: Path, target: Path) -> Path:
    """The folder as transformers dequantises it, tensor by tensor."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    shutil.copytree(folder, target)
    stored, one = tensors_of(folder), Fp8Dequantize(None)._dequantize_one
    scales = {name: f"{name}_scale_inv" for name in stored if f"{name}_scale_inv" in stored}
    assert scales
    rewrite(target, {n: one(t, stored[scales[n]], torch.bfloat16) if n in scales else t
                     for n, t in stored.items() if n not in scales.values()})
    set_config(target, quantization_config=None)
    return target


@pytest.mark.process
@pytest.mark.parametrize("text", ["llama tp2 sp pp2", "moe tp2 sp ep2"])
def test_training_from_fp8(text: str, pool: Pool, references: References, tmp_path: Path) -> None:
    model, _, layout = text.partition(" ")
    case = parse(layout, model=model) if model != "moe" else parse(text)
    # Blocks divide every size: transformers takes sizes divided by the scales' shape for a block, which is another one otherwise.
    folder = quantise_fp8(Path(shutil.copytree(references.model(case.variant), tmp_path / "fp8")), (8, 16))
    recipe = references.recipe if case.moe else replace(references.recipe, aux_coeff=0.0, z_coeff=0.0)
    batches = [global_batch(replace(case, packed=False), k) for k in range(STEPS)]
    want = reference(dequantised(folder, tmp_path / "plain"), recipe, batches)
    got = pool.run("tests.parity.measure:train", Task(case, folder, recipe), case.world)[0]
    differences = compare(got, want, recipe)
    assert not any(d.bad for d in differences), "\n" + table(str(case), differences)
