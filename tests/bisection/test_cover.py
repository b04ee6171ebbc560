"""No false alarm: every layout of the parity tests' default run, in both dtypes, Transformer Engine's layers, adapters.

The adapters are new ones on every module, of which bisect has moved B.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaswift.errors import UserError
from tests.bisection.lora_faults import LORA
from tests.bisection.ranks import Task, explained, verdict
from tests.bridge.quantize import quantize_fp8
from tests.parity import (
    cover,
    cover_te,
    models,
    nf4,
    test_lora,
    test_lora_stacks,
    test_lora_te,
    test_mtp,
    test_quantized,
)
from tests.parity.cases import Case, parse
from tests.parity.pool import Pool

AHEAD = [parse(text) for text in (*test_mtp.DEFAULT, "qwen3_5_moe-mtp dp2 ep2", "qwen3_5-mtp pp2 tied")]
CASES = [*AHEAD, *(c for model in cover.SWITCHES for c in cover.default(model))]
TE_CASES = [*map(parse, test_mtp.TRANSFORMER_ENGINE), *cover_te.default("dense"), *cover_te.default("moe")]
LORA_CASES = [parse(text) for text in (*test_lora.LAYOUTS, *test_lora.LATER, *test_lora.FAMILIES)]
LORA_CASES += [parse(text, model="gpt_oss") for text in (*test_lora_stacks.LAYOUTS, *test_lora_stacks.LATER)]
LORA_TE_CASES = [parse(text) for text in (*test_lora_te.LAYOUTS, *test_lora_te.LATER)]
pytestmark = [pytest.mark.slow, pytest.mark.process]


def assert_no_alarm(case: Case, folder: Path, pool: Pool, dtype: str, **options: object) -> None:
    """Nothing differs, and nearly everything is compared."""
    model = models.build(case.variant, folder / "models" / case.variant)
    task = Task(case, model, folder / f"{case}-{dtype}".replace(" ", "-"), options={"torch_dtype": dtype, **options})
    pool.run("tests.bisection.ranks:record", task, case.world)
    found = verdict(task)
    bad = [f"{v.kind} {v.name} {v.rank}: {v.difference:.2e} > {v.expected:.2e}" for v in found.verdicts if v.bad]
    assert not bad and len(found.skipped) < 20, bad[:10]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_false_alarm(case: Case, dtype: str, tmp_path: Path, pool: Pool) -> None:
    assert_no_alarm(case, tmp_path, pool, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", TE_CASES, ids=str)
def test_no_false_alarm_of_transformer_engines_layers(case: Case, dtype: str, tmp_path: Path, te_pool: Pool) -> None:
    assert_no_alarm(case, tmp_path, te_pool, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", LORA_CASES, ids=str)
def test_no_false_alarm_of_adapters(case: Case, dtype: str, tmp_path: Path, pool: Pool) -> None:
    assert_no_alarm(case, tmp_path, pool, dtype, **dict(LORA))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", LORA_TE_CASES, ids=str)
def test_no_false_alarm_of_adapters_on_transformer_engines_layers(
    case: Case, dtype: str, tmp_path: Path, te_pool: Pool
) -> None:
    assert_no_alarm(case, tmp_path, te_pool, dtype, **dict(LORA))


def test_adapters_that_peft_does_not_find(tmp_path: Path, pool: Pool) -> None:
    """A folder that does not name all of its modules."""
    case = parse("dense tp2")
    model = models.build(case.variant, tmp_path / "model")
    task = Task(case, model, tmp_path / "step", options=dict(LORA))
    pool.run("tests.bisection.ranks:record", task, case.world)
    (file,) = tmp_path.rglob("adapter_config.json")
    config = json.loads(file.read_text())
    config["target_modules"].remove("gate_proj")
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"adapter on model.layers.0.mlp.gate_proj: has no counterpart in PEFT"):
        verdict(task)


def test_no_false_alarm_of_quantized_weights(tmp_path: Path, pool: Pool) -> None:
    """The reference has the values as transformers and bitsandbytes dequantize them."""
    case = parse("llama tp2 sp pp2")
    folder = quantize_fp8(models.build(case.variant, tmp_path / "fp8"), (8, 16))
    text = explained(case, pool, folder, {}, of=test_quantized.dequantized(folder, tmp_path / "values"))
    assert "no difference beyond rounding" in text
    case = parse("moe-nf4 tp2 sp dp2 ep2 etp2 do")
    folder = models.build(case.variant, tmp_path / "plain")
    values = nf4.round_trip(folder, tmp_path / "nf4")
    text = explained(case, pool, folder, {**dict(LORA), "train_type": "qlora"}, of=values)
    assert "no difference beyond rounding" in text
