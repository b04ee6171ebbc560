"""QLoRA under every kind of layout against bitsandbytes and PEFT: loss, adapters' gradients, gradient norm, three
steps; bytes held.

Covers: megaswift/engine/megatron/layers/nf4_linear.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity import lora, nf4
from tests.parity.cases import Case, global_batch, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import LOSS, compare, number, table, tensors
from tests.parity.measure import STEPS, Task
from tests.parity.oracle import Reference
from tests.parity.pool import Pool
from tests.parity.references import References

LEAVES = (*lora.ATTENTION, *lora.MLP)
LAYOUTS = [
    "dense-nf4 single",
    "dense-nf4 tp2 sp",
    "dense-nf4 tp2 pp2 vpp2 recompute=full",
    "moe-nf4 tp2 sp dp2 ep2 etp2 do",
]
LATER = ["dense-nf4 cp2 packed", "mla-nf4 tp2 sp dp2 ep2", "dense-nf4 pp2", "moe-nf4 dp2 ep2", "moe-nf4 tp2 sp"]
PEFT = 1e-5
"""Of the tensor's largest value: the limit of adapter gradients beside PEFT and bitsandbytes."""


class Quantized:
    """Adapter folders and the oracle's numbers, once a session."""

    def __init__(self, references: References, folder: Path) -> None:
        self.references, self.folder = references, folder
        self._known: dict[tuple[str, int], Reference] = {}

    def rounded(self, case: Case) -> Path:
        """The folder of weights that went through four bits."""
        return self.folder / f"{case.variant}-d"

    def of(self, case: Case) -> tuple[Task, Reference]:
        """(what the ranks get: the unquantized folder; what they have to find)."""
        recipe = self.references.recipe if case.moe else replace(self.references.recipe, aux_coeff=0.0, z_coeff=0.0)
        model = self.references.model(case.variant)
        adapter = self.folder / f"{case.variant}-a"
        dequantized = self.rounded(case)
        if not adapter.exists():
            lora.make_adapter(model, adapter, LEAVES)
            nf4.round_trip(model, dequantized)
        key = (case.variant, case.total)
        if key not in self._known:
            steps = [global_batch(replace(case, packed=False), k) for k in range(STEPS)]
            self._known[key] = lora.reference(dequantized, recipe, adapter, steps)
        return Task(case, model, recipe, options={"train_type": "qlora", "adapters": str(adapter)}), self._known[key]


@pytest.fixture(scope="session")
def quantized(references: References, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return Quantized(references, tmp_path_factory.mktemp("quantized"))


@pytest.mark.process
@pytest.mark.parametrize("text", [*LAYOUTS, *(pytest.param(text, marks=pytest.mark.slow) for text in LATER)])
def test_layout(text: str, pool: Pool, quantized: Quantized) -> None:
    """Adapters on every projection; the oracle's weights went through bitsandbytes."""
    task, want = quantized.of(parse(text))
    got = pool.run("tests.parity.measure:train", task, task.case.world)[0]
    differences = compare(got, want, task.recipe)
    assert_within_limits(differences, task.case, pool, task.folder, task.options, of=quantized.rounded(task.case))


@pytest.mark.wide
def test_the_reference_is_what_peft_computes_on_four_bits(quantized: Quantized) -> None:
    """PEFT's adapters on bitsandbytes's own layers: what every layout above is held to is held to this."""
    task, want = quantized.of(parse("dense-nf4 single"))
    oracle = nf4.PeftOracle(task.folder, task.recipe, Path(task.options["adapters"]))
    loss, _, _ = oracle.accumulate(global_batch(task.case, 0))
    assert oracle.quantized == 7 * 4
    differences = [
        number("loss", want.loss, loss, LOSS),
        *tensors("gradient", want.gradients, oracle.gradients(), PEFT),
    ]
    assert not any(d.bad for d in differences), "\n" + table("PEFT", differences)


@pytest.mark.process
@pytest.mark.parametrize(
    "text, dtype, width", [("dense-nf4 single", "float32", 4), ("moe-nf4 tp2 sp dp2 ep2 etp2", "bfloat16", 2)]
)
def test_a_linear_weight_takes_four_and_a_half_bits(
    text: str, dtype: str, width: int, pool: Pool, quantized: Quantized
) -> None:
    """4 bits and its part of 32 for each block of 64, scales in float32 in every precision; the rest as in a plain LoRA
    run."""
    task, _ = quantized.of(parse(text))
    task = replace(task, options={**task.options, "torch_dtype": dtype})
    plain = replace(task, options={**task.options, "train_type": "lora"})
    four = pool.run("tests.parity.lora_ranks:held", task, task.case.world)
    whole = pool.run("tests.parity.lora_ranks:held", plain, task.case.world)
    for q, p in zip(four, whole, strict=True):
        assert q.linear * 4.5 / 8 == q.linear_bytes and p.linear == q.linear and p.linear_bytes == width * p.linear
        assert q.other_bytes == p.other_bytes
        assert q.report == q.linear_bytes + q.other_bytes
