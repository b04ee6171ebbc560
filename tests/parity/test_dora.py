"""DoRA under layouts against Hugging Face: loss, gradients of A, B and m, three steps; PEFT; new adapters; folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megaswift.bridge.adapters.folder import PeftFolder, write_peft_folder
from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.errors import ConfigError, WeightsError
from tests.bridge.folders import plan_of
from tests.parity import lora
from tests.parity.cases import Case, global_batch, parse
from tests.parity.check import assert_within_limits
from tests.parity.compare import GRADIENT, compare, tensors
from tests.parity.measure import STEPS, Task
from tests.parity.models import disk_tensors
from tests.parity.oracle import Reference
from tests.parity.pool import Pool
from tests.parity.references import References

M = ".lora_magnitude_vector"
ALL = (
    *lora.ATTENTION,
    *lora.MLP,
    "qkv_proj",
    "gate_up_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)
SLOW = [
    "dense single",
    "dense tp2",
    "dense tp2 sp",
    "dense pp2",
    "dense dp2 do",
    "qwen2 tp2",
    "dense tp4",
    "gemma2 tp2 sp",
    "phi3 tp2 sp",
    "granite tp2",
    "dense tp2 sp pp2 recompute=full do",
    "qwen3-tiny-heads tp4 sp",
    "deepseek_v3-dense tp2 sp",
    "dense pp2 vpp2",
    "dense cp2 packed",
]
LAYOUTS = ["qwen2 tp2 sp", "gemma2 tp2", *(pytest.param(text, marks=pytest.mark.slow) for text in SLOW)]
"""qwen2: biases in the product; gemma2: a norm after it, before which the rows are scaled."""


def prepared(text: str, references: References, folder: Path, leaves: tuple[str, ...] = ALL) -> tuple[Task, Reference]:
    """(what the ranks get, what they have to find)."""
    case: Case = parse(text)
    recipe = references.recipe if case.moe else replace(references.recipe, aux_coeff=0.0, z_coeff=0.0)
    model = references.model(case.variant)
    adapter = lora.make_adapter(model, folder / "adapter", leaves, use_dora=True)
    steps = [global_batch(replace(case, packed=False), k) for k in range(STEPS)]
    task = Task(case, model, recipe, options={"train_type": "lora", "adapters": str(adapter)})
    return task, lora.reference(model, recipe, adapter, steps)


def check(task: Task, want: Reference, pool: Pool) -> None:
    got = pool.run("tests.parity.measure:train", task, task.case.world)[0]
    assert any(name.endswith(M) and float(g.abs().max()) > 0 for name, g in want.gradients.items())
    differences = compare(got, want, task.recipe)
    assert_within_limits(differences, task.case, pool, task.folder, task.options)


@pytest.mark.process
@pytest.mark.parametrize("text", LAYOUTS)
def test_layout(text: str, pool: Pool, references: References, tmp_path: Path) -> None:
    check(*prepared(text, references, tmp_path), pool)


@pytest.mark.process
def test_updated_magnitudes_are_gathered_before_they_are_used(
    pool: Pool, references: References, tmp_path: Path
) -> None:
    task, want = prepared("dense dp2 do", references, tmp_path)
    check(
        replace(task, options={**task.options, "overlap_grad_reduce": True, "overlap_param_gather": True}), want, pool
    )


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "text, leaves",
    [
        ("dense tp2 sp", ("v_proj", "up_proj")),
        ("qwen2 tp2", ("layers.1.self_attn.k_proj",)),
        ("moe tp2 sp dp2 ep2", lora.ATTENTION),
        ("qwen2_moe tp2 sp", (*lora.ATTENTION, "shared_expert.up_proj")),
    ],
)
def test_part_of_the_model(
    text: str, leaves: tuple[str, ...], pool: Pool, references: References, tmp_path: Path
) -> None:
    """Rows of a joined layer without an adapter keep their length."""
    check(*prepared(text, references, tmp_path, leaves), pool)


@pytest.mark.wide
@pytest.mark.parametrize("variant", ["dense", "qwen2"])
def test_the_oracle_is_peft(variant: str, references: References, tmp_path: Path) -> None:
    """Loss and gradients of the oracle's changed weights are those of PEFT's own DoRA, and its merge is ours."""
    import peft

    task, _ = prepared(f"{variant} single", references, tmp_path)
    batches, adapter = global_batch(task.case, 2), Path(task.options["adapters"])
    ours = lora.LoraOracle(task.folder, task.recipe, adapter)
    loss = ours.accumulate(batches)[0]
    theirs = lora.Oracle(task.folder, task.recipe)
    base = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32)
    theirs.model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).double().train()
    assert loss == pytest.approx(theirs.accumulate(batches)[0], rel=1e-6)
    gradients = {
        n.removeprefix(lora.PREFIX).replace(".default", "").replace(M + ".weight", M): p.grad.float()
        for n, p in theirs.model.named_parameters()
        if p.requires_grad
    }
    assert not any(d.bad for d in tensors("gradient", ours.gradients(), gradients, GRADIENT))
    merge_adapter_folder_into_base(task.folder, adapter, tmp_path / "merged")
    want, got = theirs.model.merge_and_unload().state_dict(), disk_tensors(tmp_path / "merged")
    assert all(torch.allclose(t, want[name].float(), atol=1e-6) for name, t in got.items())


@pytest.mark.process
def test_new_adapters_change_nothing_and_load_in_peft(pool: Pool, references: References, tmp_path: Path) -> None:
    """m is the length of W's rows, those of split rows too; what is written, PEFT reads."""
    import peft

    case = parse("dense tp2 sp")
    task = Task(
        case, references.model(case.variant), references.recipe, options={"train_type": "lora", "use_dora": True}
    )
    plain = pool.run("tests.parity.lora_ranks:fresh", replace(task, options={"train_type": "lora"}), case.world)[0]
    loss, values, merged = pool.run("tests.parity.lora_ranks:fresh", task, case.world)[0]
    base = disk_tensors(task.folder)
    assert loss == pytest.approx(plain[0], rel=1e-6)
    assert all(torch.allclose(merged[name], t, rtol=1e-5, atol=1e-7) for name, t in base.items())
    lengths = {name: t for name, t in values.items() if name.endswith(M)}
    assert len(lengths) == len(values) // 3
    assert all(
        torch.allclose(t, base[name.removesuffix(M) + ".weight"].norm(dim=1), rtol=1e-6) for name, t in lengths.items()
    )
    adapter = lora.make_adapter(task.folder, tmp_path / "a", ALL, use_dora=True)
    plan = PeftFolder(adapter).plan(plan_of(task.folder))
    write_peft_folder(tmp_path / "b", plan, lora.read_adapter(adapter).items(), str(task.folder))
    ids, found = torch.arange(4, 24)[None], []
    for folder in (adapter, tmp_path / "b"):
        model = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32)
        found.append(peft.PeftModel.from_pretrained(model, folder).eval()(input_ids=ids).logits)
    values = {n: t for n, t in lora.read_adapter(tmp_path / "b").items()}
    model = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32).eval()
    want = lora.Adapted(model, values, lora.ALPHA / lora.RANK)(input_ids=ids).logits
    assert torch.equal(*found) and torch.allclose(found[0], want, atol=1e-5)


@pytest.mark.wide
def test_experts_and_lacking_magnitudes_are_refused(references: References, tmp_path: Path) -> None:
    import peft

    from megaswift.bridge.adapters.options.lora import LoraConfig
    from megaswift.engine.megatron.lora.adapters import adapter_plan_from_lora_config

    moe, dense = references.model("moe"), references.model("dense")
    config = peft.LoraConfig(use_dora=True, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ValueError, match="does not work with use_dora=True"):  # what our message says of PEFT
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(moe), config)
    with pytest.raises(ConfigError, match="--use_dora true: is not supported for experts"):
        adapter_plan_from_lora_config(LoraConfig(use_dora=True), plan_of(moe))
    dense_mlps = plan_of(references.model("deepseek_v3-dense"))
    with pytest.raises(ConfigError, match="gate_proj, up_proj, down_proj are among the targets"):
        adapter_plan_from_lora_config(LoraConfig(use_dora=True), dense_mlps)
    attention = adapter_plan_from_lora_config(LoraConfig(use_dora=True, target_modules=("o_proj",)), dense_mlps)
    assert {a.projection.leaf for a in attention.adapters} == {"o_proj"}
    with pytest.raises(WeightsError, match="use_dora: is not supported for experts"):
        PeftFolder(lora.make_adapter(moe, tmp_path / "a", ALL, use_dora=True)).plan(plan_of(moe))
    adapter = lora.make_adapter(dense, tmp_path / "b", ALL)
    text = (adapter / "adapter_config.json").read_text()
    (adapter / "adapter_config.json").write_text(text.replace('"r": 4', '"r": 4, "use_dora": true'))
    with pytest.raises(WeightsError, match="lora_magnitude_vector: is missing"):
        PeftFolder(adapter).plan(plan_of(dense))
