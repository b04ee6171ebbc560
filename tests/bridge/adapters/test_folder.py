"""Adapter folders between us and PEFT, both ways and merged, and how an adapter is cut over ranks.

Covers: megaswift/bridge/adapters/plan.py, megaswift/bridge/adapters/expert_stacks.py,
megaswift/bridge/adapters/merge.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megaswift.bridge.adapters.folder import PeftFolder, write_peft_folder
from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.bridge.adapters.plan import HALVES, AdapterHyperparameters, AdapterPlan, rank_output_rows_by_adapter
from megaswift.commands.convert import convert_command
from megaswift.errors import UserError, WeightsError
from megaswift.models.targets import ALL, select_projections
from megaswift.models.weights.rules import shard_dim
from tests.bridge.folders import make, opened, plan_of, rewrite, tensors_of
from tests.parity.lora import ALPHA, ATTENTION, MLP, RANK, Adapted, made_by_peft, make_adapter, read_adapter
from tests.sources import ROOT

pytestmark = pytest.mark.wide

IDS = torch.tensor([[5, 17, 80, 3, 44, 9, 101, 7, 7, 23]])


def logits(model: Any) -> Tensor:
    """[1, n, V] in evaluation mode."""
    if hasattr(model, "eval"):
        model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def base(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


def random_values(plan: AdapterPlan) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in plan.shapes().items()}


GPT_OSS = {
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "r": 4,
    "lora_alpha": 6,
    "rank_pattern": {"gate_up_proj": 2},
    "alpha_pattern": {"experts.down_proj": 3},
}


def close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= 1e-5 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(
    "variant, targets, saved",
    [
        ("dense", (ALL,), ()),
        ("llama", ("q_proj", "linear_fc2"), ("lm_head.weight", "model.embed_tokens.weight")),
        ("qwen2", (r".*layers\.[12]\.self_attn\.(q|v)_proj",), ()),
        ("moe", (ALL,), ()),
        ("mixtral", (ALL,), ()),
        ("moe", ATTENTION, ()),
        ("qwen3_5", (ALL,), ("model.layers.0.linear_attn.conv1d.weight",)),
        ("qwen3_5", ("in_proj_z", "layers.1.linear_attn.in_proj_a"), ()),
        ("qwen3_next", ("linear_qkv", "in_proj", "out_proj"), ()),
        ("qwen3_next", ("in_proj_ba",), ()),
        ("qwen3_next", (ALL,), ()),
        ("qwen3_next", ("shared_expert.gate_proj", "layers.1.mlp.up_proj"), ()),
        ("qwen3_next", (r".*layers\.2\.mlp\..*",), ()),
        ("qwen3_5_moe", (ALL,), ()),
        ("qwen2_moe", (ALL,), ()),
        ("moe-mixed", (ALL,), ()),
        ("deepseek_v3", (ALL,), ()),
        ("deepseek_v3-dense", (ALL,), ()),
        ("glm4_moe", ("down_proj",), ()),
    ],
)
def test_peft_loads_what_we_write(
    variant: str, targets: tuple[str, ...], saved: tuple[str, ...], folders: Path, tmp_path: Path
) -> None:
    folder = make(variant, folders)
    weights = plan_of(folder)
    plan = AdapterPlan(
        weights, select_projections(weights.family, weights.spec, targets), AdapterHyperparameters(RANK, ALPHA), saved
    )
    values = random_values(plan)
    write_peft_folder(tmp_path / "adapter", plan, values.items(), str(folder))
    want = logits(Adapted(base(folder).double(), {n: t.double() for n, t in values.items()}, ALPHA / RANK))
    loaded = peft.PeftModel.from_pretrained(base(folder), tmp_path / "adapter").double()
    assert close(logits(loaded), want) and not close(logits(base(folder)), want)
    again = PeftFolder(tmp_path / "adapter")
    assert {a.module for a in again.plan(weights).adapters} == set(plan.by_module)
    assert all(torch.equal(t, values[name]) for name, t in again.read(plan).items())


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_loads_experts_of_other_ranks_and_scales(rslora: bool, folders: Path, tmp_path: Path) -> None:
    """Of one layer's experts, and of one shared expert's module."""
    folder = make("qwen2_moe", folders)
    weights = plan_of(folder)
    chosen = select_projections(weights.family, weights.spec, (ALL,))
    experts = [p.module for p in chosen if p.module.startswith("model.layers.2.mlp.experts.")]
    settings = AdapterHyperparameters(
        RANK,
        ALPHA,
        rslora,
        dropout=0.1,
        ranks=dict.fromkeys([*experts, "model.layers.3.mlp.shared_expert.up_proj"], 3),
        alphas={r"layers\.2\.mlp\.experts\..*": 5.0},
    )
    plan = AdapterPlan(weights, chosen, settings)
    values = random_values(plan)
    write_peft_folder(tmp_path / "adapter", plan, values.items(), str(folder))
    merged = base(folder).double()
    weight = dict(merged.named_parameters())
    for a in plan.adapters:
        change = a.scale * values[a.name("B")].double() @ values[a.name("A")].double()
        home, _, rest = a.module.partition(".experts.")
        if not rest:
            weight[a.module + ".weight"].data += change
            continue
        expert, leaf = rest.split(".")
        name = "down_proj" if leaf == "down_proj" else "gate_up_proj"
        rows = weight[f"{home}.experts.{name}"].data[int(expert)]
        (rows if leaf == "down_proj" else rows.chunk(2)[leaf == "up_proj"]).add_(change)
    loaded = peft.PeftModel.from_pretrained(base(folder), tmp_path / "adapter").double()
    assert close(logits(loaded), logits(merged))
    again = PeftFolder(tmp_path / "adapter").plan(weights)
    assert {a.module: a.rank for a in again.adapters} == {a.module: a.rank for a in plan.adapters}
    assert {a.module: a.scale for a in again.adapters} == pytest.approx({a.module: a.scale for a in plan.adapters})


@pytest.mark.parametrize(
    "options, scale", [({}, 0.5), ({"use_rslora": True}, 2.0), ({"use_dora": True, "lora_dropout": 0.25}, 0.5)], ids=str
)
def test_options_mean_what_they_mean_to_peft(
    options: dict[str, Any], scale: float, folders: Path, tmp_path: Path
) -> None:
    """rank 16, alpha 8: alpha / r is 1/2, alpha / sqrt(r) is 2. PEFT reads its own scale from the folder."""
    from megaswift.config import SwiftConfig
    from megaswift.engine.megatron.lora.adapters import adapter_plan_from_lora_config

    folder = make("dense", folders)
    cfg = SwiftConfig(
        train_type="lora",
        lora_rank=16,
        lora_alpha=8,
        target_modules=["linear_qkv", "down_proj"],
        modules_to_save="lm_head",
        **options,
    )
    plan = adapter_plan_from_lora_config(cfg.lora, plan_of(folder))
    assert {a.scale for a in plan.adapters} == {scale} and {a.dora for a in plan.adapters} == {cfg.lora.use_dora}
    write_peft_folder(tmp_path / "adapter", plan, random_values(plan).items(), str(folder))
    loaded = peft.PeftModel.from_pretrained(base(folder), tmp_path / "adapter")
    told, layers = (
        loaded.peft_config["default"],
        [m for m in loaded.modules() if hasattr(m, "lora_A") and hasattr(m, "scaling")],
    )
    assert {m.scaling["default"] for m in layers} == {scale} and len(layers) == 4 * 4
    assert (told.r, told.lora_alpha, told.use_rslora, told.use_dora, told.lora_dropout) == (
        16,
        8,
        cfg.lora.use_rslora,
        cfg.lora.use_dora,
        cfg.lora.lora_dropout,
    )
    assert not any(hasattr(m, "lora_A") for n, m in loaded.named_modules() if n.endswith(("o_proj", "up_proj")))
    assert any("modules_to_save" in n for n, _ in loaded.named_modules())


@pytest.mark.parametrize(
    "variant, options",
    [
        ("dense", {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}),
        (
            "llama",
            {
                "target_modules": ["q_proj", "up_proj"],
                "r": 4,
                "use_rslora": True,
                "rank_pattern": {"q_proj": 6},
                "alpha_pattern": {"layers.1.self_attn.q_proj": 3},
                "modules_to_save": ["lm_head"],
            },
        ),
        (
            "moe",
            {
                "target_modules": ["q_proj"],
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
                "r": 2,
            },
        ),
        ("mixtral", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"], "r": 2}),
        ("gpt_oss", {**GPT_OSS, "target_modules": "all-linear"}),
        ("gpt_oss", {"target_modules": [], "target_parameters": ["layers.1.mlp.experts.gate_up_proj"], "r": 3}),
    ],
    ids=["dense", "patterns", "stacked experts", "one stack", "gpt_oss", "one stack of gpt_oss"],
)
def test_what_peft_writes_is_merged_as_by_peft(
    variant: str, options: dict[str, Any], folders: Path, tmp_path: Path
) -> None:
    folder = make(variant, folders)
    model = made_by_peft(folder, tmp_path / "adapter", **options)
    want = logits(model)
    merge_adapter_folder_into_base(folder, tmp_path / "adapter", tmp_path / "merged", max_shard_bytes=150_000)
    assert close(logits(base(tmp_path / "merged")), want) and not close(logits(base(folder)), want)
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(float((t - theirs[n]).abs().max()) < 1e-6 for n, t in ours.items())


@pytest.mark.parametrize(
    "targets, parameters",
    [
        (("all-linear",), ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
        ((), ("down_proj",)),
        (("q_proj",), (r".*layers\.[02]\.mlp\.experts\.(gate_up|down)_proj",)),
    ],
)
def test_stacks_of_experts_are_written_as_peft_does(
    targets: tuple[str, ...], parameters: tuple[str, ...], folders: Path, tmp_path: Path
) -> None:
    """Names, shapes and what they do: PEFT computes the same from its own folder and from ours, and what we read comes
    back."""
    folder = make("gpt_oss", folders)
    weights = plan_of(folder)
    chosen = select_projections(weights.family, weights.spec, targets, parameters)
    plan = AdapterPlan(weights, chosen, AdapterHyperparameters(RANK, ALPHA, dropout=0.1))
    stacks = sorted({p.stack for p in chosen if p.stack})
    theirs = made_by_peft(
        folder,
        tmp_path / "theirs",
        r=RANK,
        lora_alpha=ALPHA,
        target_parameters=stacks,
        target_modules="all-linear" if targets == (ALL,) else list(targets),
    )
    values = read_adapter(tmp_path / "theirs")
    assert plan.shapes() == {name: tuple(t.shape) for name, t in values.items()}
    write_peft_folder(tmp_path / "ours", plan, values.items(), str(folder))
    assert close(logits(peft.PeftModel.from_pretrained(base(folder), tmp_path / "ours")), logits(theirs))
    again = PeftFolder(tmp_path / "ours")
    read = again.read(again.plan(weights))
    assert all(torch.equal(s.join([read[a.name(s.half)] for a in s.adapters]), values[s.name]) for s in plan.stored)


def test_dropout_on_experts_does_not_keep_peft_from_loading(folders: Path, tmp_path: Path) -> None:
    """PEFT refuses it for parameters, which Mixtral's experts become on loading."""
    folder = make("mixtral", folders)
    weights = plan_of(folder)
    plan = AdapterPlan(
        weights,
        select_projections(weights.family, weights.spec, ("w1", "w2", "w3")),
        AdapterHyperparameters(RANK, ALPHA, dropout=0.1),
    )
    write_peft_folder(tmp_path / "a", plan, random_values(plan).items(), str(folder))
    loaded = peft.PeftModel.from_pretrained(base(folder), tmp_path / "a")
    assert not close(logits(loaded), logits(base(folder)))


def test_merging_keeps_dtypes_and_what_has_no_adapter(folders: Path, tmp_path: Path) -> None:
    folder = make("dense", folders, torch.bfloat16)
    adapter = make_adapter(folder, tmp_path / "adapter", ("q_proj",))
    merge_adapter_folder_into_base(folder, adapter, tmp_path / "merged")
    before, after, values = tensors_of(folder), tensors_of(tmp_path / "merged"), read_adapter(adapter)
    for name, tensor in before.items():
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in values:
            exact = (
                tensor.double()
                + ALPHA / RANK * values[f"{module}.lora_B.weight"].double() @ values[f"{module}.lora_A.weight"].double()
            )
            assert after[name].dtype == torch.bfloat16 and not torch.equal(after[name], tensor)
            assert float((after[name].double() - exact).abs().max() / exact.abs().max()) < 2**-8
        else:
            assert torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype


@pytest.mark.wide
@pytest.mark.parametrize("variant", ["dense", "qwen3-tiny-heads", "moe", "mixtral", "gpt_oss", "qwen3_5"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_shards_of_the_product_are_products_of_shards(variant: str, ranks: int, folders: Path, tmp_path: Path) -> None:
    """On each rank, the base shard and the rank's parts of A and B give the shard of the merged weight; the parts join
    again."""
    folder = make(variant, folders)
    weights, source = opened(folder)
    leaves = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "w1", "w2")
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if variant == "gpt_oss" else []
    chosen = select_projections(weights.family, weights.spec, [x for x in leaves if _has(weights, x)], stacks)
    plan = AdapterPlan(weights, chosen, AdapterHyperparameters(RANK, ALPHA))
    write_peft_folder(tmp_path / "a", plan, random_values(plan).items(), "base")
    values = PeftFolder(tmp_path / "a").read(plan)
    merge_adapter_folder_into_base(folder, tmp_path / "a", tmp_path / "merged")
    _, changed = opened(tmp_path / "merged")
    for adapters in plan.by_layer.values():
        entry, dim = adapters[0].entry, shard_dim(adapters[0].entry.rule)
        parts: dict[str, list[Tensor]] = {a.name(h): [] for a in adapters for h in HALVES}
        for rank in range(ranks):
            for a in adapters:
                for half in HALVES:
                    part = a.take(half, values[a.name(half)], ranks, rank)
                    assert tuple(part.shape) == a.local_shape(half, ranks, rank)
                    parts[a.name(half)].append(part)
            products = [a.scale * parts[a.name("B")][rank] @ parts[a.name("A")][rank] for a in adapters]
            at, rows = [0] * len(adapters), []
            for number, n in rank_output_rows_by_adapter(adapters, ranks, rank):
                if number is None:
                    rows.append(torch.zeros(n, products[0].shape[1]))
                else:
                    rows.append(products[number][at[number] : at[number] + n])
                    at[number] += n
            shard = entry.read(source, ranks, rank) + torch.cat(rows)
            assert torch.allclose(shard, entry.read(changed, ranks, rank), atol=1e-5), (entry.megatron, rank, dim)
        assert all(torch.equal(a.join(h, parts[a.name(h)]), values[a.name(h)]) for a in adapters for h in HALVES)


def _has(weights: Any, leaf: str) -> bool:
    return any(name.endswith(f".{leaf}.weight") for name in weights.hf_shapes)


def test_folders_that_do_not_fit_are_refused_by_name(folders: Path, tmp_path: Path) -> None:
    folder, wide = make("dense", folders), make("moe", folders)
    good = make_adapter(folder, tmp_path / "good", (*ATTENTION, *MLP))

    def refused(**changes: Any) -> str:
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(good, bad)
        config = json.loads((bad / "adapter_config.json").read_text()) | changes
        (bad / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(WeightsError) as error:
            PeftFolder(bad).plan(plan_of(folder))
        return str(error.value)

    assert "peft_type is LOHA" in refused(peft_type="LOHA")
    assert "trains biases" in refused(bias="all")
    assert "changed the base model's weights" in refused(init_lora_weights="pissa_niter_4")
    assert "repeats layers" in refused(layer_replication=[[0, 2]])
    with pytest.raises(WeightsError, match="does not match a layer of this model"):
        PeftFolder(good).plan(plan_of(wide))
    with pytest.raises(WeightsError, match="has no adapter_config.json"):
        PeftFolder(folder)
    (tmp_path / "good" / "adapter_model.safetensors").write_bytes(b"x" * 30)
    with pytest.raises(WeightsError, match="cannot be read"):
        PeftFolder(good)
    half = make_adapter(folder, tmp_path / "half", ("q_proj",))
    tensors = {f"base_model.model.{n}": t for n, t in read_adapter(half).items()}
    tensors.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    rewrite(half, tensors)
    (half / "model.safetensors").rename(half / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match=r"q_proj.lora_B.weight: is missing"):
        PeftFolder(half).plan(plan_of(folder))


@pytest.mark.process
def test_the_command_and_the_script_merge_equally(folders: Path, tmp_path: Path) -> None:
    folder = make("moe", folders, torch.bfloat16)
    adapter = make_adapter(folder, tmp_path / "adapter", (*ATTENTION, *MLP))
    assert (
        convert_command(["merge-lora", str(folder), str(adapter), str(tmp_path / "a"), "--max_shard_size", "200KB"])
        == 0
    )
    script = [sys.executable, "converters/merge_lora.py", str(folder), str(adapter), str(tmp_path / "b")]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    a, b = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert a.keys() == b.keys() == tensors_of(folder).keys() and all(torch.equal(t, b[n]) for n, t in a.items())
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > len(list((tmp_path / "b").glob("*.safetensors"))) == 1
    with pytest.raises(UserError, match="already exists"):
        convert_command(["merge-lora", str(folder), str(adapter), str(tmp_path / "b")])
