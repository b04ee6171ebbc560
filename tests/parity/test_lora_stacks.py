"""LoRA on experts that share a parameter (gpt_oss, mistral4) against PEFT itself on the Hugging Face model: under
layouts, new, in four bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity import lora, nf4
from tests.parity.cases import global_batch, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import compare
from tests.parity.measure import STEPS, Task
from tests.parity.models import disk_tensors
from tests.parity.oracle import Reference
from tests.parity.pool import Pool
from tests.parity.references import References

BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LAYOUTS = ["tp2 sp dp2 ep2 do"]
LATER = [
    "single",
    "pp2 ep2 dp2 recompute=full",
    "tp2 sp ep2",
    "dp2 ep4 tp2 sp",
    "dp2 do",
    "pp2 vpp2",
    "tp2 sp pp2",
    "packed cp2",
    "tp2 sp cp2 packed",
    "pp2 ep2 dp2 do",
    "ep2 dp2 recompute=moe",
    "dp2 ep2 allgather",
]


def prepared(
    text: str,
    references: References,
    folder: Path,
    modules: str | list[str] = "all-linear",
    parameters: tuple[str, ...] = BOTH,
    variant: str = "gpt_oss",
) -> tuple[Task, Reference]:
    """(what the ranks get, what PEFT finds)."""
    case = parse(text, model=variant)
    model, recipe = references.model(case.variant), references.recipe
    lora.made_by_peft(
        model,
        folder / "adapter",
        r=lora.RANK,
        lora_alpha=lora.ALPHA,
        target_modules=modules,
        target_parameters=list(parameters),
    )
    task = Task(case, model, recipe, options={"train_type": "lora", "adapters": str(folder / "adapter")})
    base = nf4.round_trip(model, folder / "rounded") if variant.endswith("-nf4") else model
    steps = [global_batch(replace(case, packed=False), k) for k in range(STEPS)]
    return task, lora.reference(base, recipe, folder / "adapter", steps, lora.PeftOracle)


def check(task: Task, want: Reference, pool: Pool) -> None:
    got = pool.run("tests.parity.measure:train", task, task.case.world)[0]
    stacks = [g for name, g in want.gradients.items() if ".experts." in name]
    assert stacks and all(float(g.abs().max()) > 0 for g in stacks)
    assert_within_limits(compare(got, want, task.recipe), task.case, pool, task.folder, task.options)


@pytest.mark.process
@pytest.mark.parametrize("text", [*LAYOUTS, *(pytest.param(text, marks=pytest.mark.slow) for text in LATER)])
def test_layout(text: str, pool: Pool, references: References, tmp_path: Path) -> None:
    """Attention and all experts."""
    check(*prepared(text, references, tmp_path), pool)


@pytest.mark.process
@pytest.mark.parametrize("text", ["tp2 sp dp2 ep2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_latent_attention(text: str, pool: Pool, references: References, tmp_path: Path) -> None:
    """With stacks that are not transposed, and a shared expert of separate matrices."""
    check(*prepared(text, references, tmp_path, variant="mistral4"), pool)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "text, parameters",
    [
        ("tp2 sp dp2 ep2", ("layers.2.mlp.experts.gate_up_proj",)),
        ("pp2 do dp2 ep2", ("mlp.experts.down_proj",)),
    ],
)
def test_part_of_the_experts(
    text: str, parameters: tuple[str, ...], pool: Pool, references: References, tmp_path: Path
) -> None:
    """One of the two parameters, one layer; nothing else."""
    check(*prepared(text, references, tmp_path, [], parameters), pool)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("text", ["tp2 sp dp2 ep2", "single", "pp2"])
def test_four_bits(text: str, pool: Pool, references: References, tmp_path: Path) -> None:
    """The oracle's weights went through bitsandbytes."""
    task, want = prepared(text, references, tmp_path, variant="gpt_oss-nf4")
    check(replace(task, options={**task.options, "train_type": "qlora"}), want, pool)


@pytest.mark.process
def test_new_adapters_start_as_peft_starts_them(pool: Pool, references: References) -> None:
    """A uniform within 1 / sqrt(in), B zero; the same on every layout; the model unchanged."""
    found = []
    for text in ("single", "tp2 sp ep2"):
        case = parse(text, model="gpt_oss")
        options = {"train_type": "lora", "target_parameters": BOTH, "lora_rank": 3}
        task = Task(case, references.model("gpt_oss"), references.recipe, options=options)
        found.append(pool.run("tests.parity.lora_ranks:fresh", task, case.world)[0])
    loss, values, merged = found[0]
    assert values.keys() == found[1][1].keys() and all(torch.equal(t, found[1][1][n]) for n, t in values.items())
    assert loss == pytest.approx(found[1][0], rel=1e-6)
    base = disk_tensors(references.model("gpt_oss"))
    assert all(torch.equal(t, base[name]) for name, t in merged.items())
    experts = {name: t for name, t in values.items() if ".experts." in name}
    assert len(experts) == 4 * 4
    for name, t in experts.items():
        bound = t.shape[1] ** -0.5
        wanted = (0.0, 0.0) if "lora_B" in name else (bound, bound / 3**0.5)
        assert float(t.abs().max()) == pytest.approx(wanted[0], rel=0.02) and float(t.std()) == pytest.approx(
            wanted[1], rel=0.1
        ), name
