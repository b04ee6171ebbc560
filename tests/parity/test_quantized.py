"""Training from quantized folders, all of an FP8 one's weights or adapters (QLoRA) on FP8 and MXFP4: from what
transformers dequantizes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.bridge.folders import rewrite, set_config, tensors_of
from tests.bridge.quantize import quantize_fp8, quantize_mxfp4
from tests.parity import lora, nf4
from tests.parity.cases import global_batch, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import compare
from tests.parity.measure import STEPS, Task
from tests.parity.oracle import reference
from tests.parity.pool import Pool
from tests.parity.references import References


def dequantized(folder: Path, target: Path) -> Path:
    """The folder as transformers dequantizes it, tensor by tensor."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    shutil.copytree(folder, target)
    stored, one = tensors_of(folder), Fp8Dequantize(None)._dequantize_one
    scales = {name: f"{name}_scale_inv" for name in stored if f"{name}_scale_inv" in stored}
    assert scales
    rewrite(
        target,
        {
            n: one(t, stored[scales[n]], torch.bfloat16) if n in scales else t
            for n, t in stored.items()
            if n not in scales.values()
        },
    )
    set_config(target, quantization_config=None)
    return target


@pytest.mark.process
@pytest.mark.parametrize("text", ["llama tp2 sp pp2", "moe tp2 sp ep2"])
def test_training_from_fp8(text: str, pool: Pool, references: References, tmp_path: Path) -> None:
    model, _, layout = text.partition(" ")
    case = parse(layout, model=model) if model != "moe" else parse(text)
    # Blocks divide every size: transformers takes sizes divided by the scales' shape for a block, which is another one
    # otherwise.
    folder = quantize_fp8(Path(shutil.copytree(references.model(case.variant), tmp_path / "fp8")), (8, 16))
    recipe = references.recipe if case.moe else replace(references.recipe, aux_coeff=0.0, z_coeff=0.0)
    batches = [global_batch(replace(case, packed=False), k) for k in range(STEPS)]
    plain = dequantized(folder, tmp_path / "plain")
    want = reference(plain, recipe, batches)
    got = pool.run("tests.parity.measure:train", Task(case, folder, recipe), case.world)[0]
    assert_within_limits(compare(got, want, recipe), case, pool, folder, {}, of=plain)


def unpacked(folder: Path, target: Path) -> Path:
    """The same for MXFP4."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shutil.copytree(folder, target)
    stored = tensors_of(folder)
    packed = {name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")}
    assert packed
    rewrite(
        target,
        {n: t for n, t in stored.items() if not n.endswith(("_blocks", "_scales"))}
        | {n: convert_moe_packed_tensors(stored[f"{n}_blocks"], stored[f"{n}_scales"]).contiguous() for n in packed},
    )
    set_config(target, quantization_config=None)
    return target


@pytest.mark.process
@pytest.mark.parametrize(
    "model, layout",
    [
        ("dense-nf4", "single"),
        ("gpt_oss-nf4", "single"),
        pytest.param("gpt_oss-nf4", "tp2 sp ep2", marks=pytest.mark.slow),
        pytest.param("moe-nf4", "tp2 sp dp2 ep2 etp2", marks=pytest.mark.slow),
    ],
)
def test_adapters_in_four_bits_on_a_quantized_folder(
    model: str, layout: str, pool: Pool, references: References, tmp_path: Path
) -> None:
    """FP8, or MXFP4 where experts are stacked, to NF4: the oracle's weights go through transformers, then through
    bitsandbytes."""
    case, stacked = parse(layout, model=model), model.startswith("gpt_oss")
    torch.manual_seed(0)
    copy = Path(shutil.copytree(references.model(case.variant), tmp_path / "folder"))
    folder = quantize_mxfp4(copy) if stacked else quantize_fp8(copy, (8, 16))
    plain = unpacked(folder, tmp_path / "a") if stacked else dequantized(folder, tmp_path / "a")
    recipe = references.recipe if case.moe else replace(references.recipe, aux_coeff=0.0, z_coeff=0.0)
    adapter, kind = tmp_path / "adapter", lora.PeftOracle if stacked else lora.LoraOracle
    if stacked:
        lora.made_by_peft(
            plain,
            adapter,
            target_modules="all-linear",
            r=lora.RANK,
            lora_alpha=lora.ALPHA,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
    else:
        lora.make_adapter(plain, adapter, (*lora.ATTENTION, *lora.MLP))
    rounded = nf4.round_trip(plain, tmp_path / "b")
    want = lora.reference(rounded, recipe, adapter, [global_batch(case, k) for k in range(STEPS)], kind)
    task = Task(case, folder, recipe, options={"train_type": "qlora", "adapters": str(adapter)})
    differences = compare(pool.run("tests.parity.measure:train", task, case.world)[0], want, recipe)
    assert_within_limits(differences, case, pool, folder, task.options, of=rounded)
