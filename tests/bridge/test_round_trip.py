"""Hugging Face -> Megatron shards -> Hugging Face: bitwise, for every family and tensor-parallel size, with each
tensor's own dtype.

Covers: megaswift/bridge/plan.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaswift.bridge import HfExportOptions, HfSource, WeightPlan, write_hf_export
from megaswift.bridge.plan import EntriesOfSameHfTensors
from megaswift.families import FAMILIES
from megaswift.models.weights.rules import InterleavedGateUp
from tests.bridge.folders import make, opened, plan_of, rewrite, tensors_of
from tests.parity.models import AHEAD, BRIDGED, VARIANTS
from tests.parity.mtp import MTP

pytestmark = pytest.mark.wide

ALL = sorted(
    {*VARIANTS, *BRIDGED, *(name for name in FAMILIES.names() if name not in {kind for kind, _ in VARIANTS.values()})}
)
ONE_A_FAMILY = sorted({kind: name for name, (kind, _) in VARIANTS.items()}.values())


def round_trip(plan: WeightPlan, source: HfSource, tp: int, etp: int) -> dict[str, Tensor]:
    """Every entry read by each of its ranks, with a padded vocabulary, and written back."""
    padded = math.ceil(plan.spec.vocab_size / (8 * tp)) * 8 * tp
    out: dict[str, Tensor] = {}
    for group in plan.groups:
        cut = []
        for entry in group.entries:
            ranks = tp if entry.expert is None else etp
            cut.append([entry.read(source, ranks, rank, padded) for rank in range(ranks)])
            assert {tuple(s.shape) for s in cut[-1]} == {entry.shard_shape(ranks, padded)}
        back = group.write(cut)
        assert not set(back) & set(out)
        out.update(back)
    return out


@pytest.mark.wide
@pytest.mark.parametrize("variant", [*ALL, *AHEAD])
def test_bitwise(variant: str, folders: Path) -> None:
    """With the layers for multi-token prediction, whose copies of embedding and head are no part of the model."""
    folder = make(variant, folders)
    plan, source = opened(folder)
    if variant in AHEAD:
        spec = plan.spec
        plan = WeightPlan(plan.family, replace(spec, features=replace(spec.features, mtp_layers=MTP[variant])))
        plan.check(source)
    theirs = tensors_of(folder)
    for copy, original in plan.copies.items():
        assert torch.equal(theirs.pop(copy), theirs[original])
    for tp, etp in ((1, 1), (2, 1), (2, 2), (4, 4)):
        ours = round_trip(plan, source, tp, etp)
        assert list(ours) and set(ours) == set(theirs)
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), (name, tp)


@pytest.mark.wide
@pytest.mark.parametrize("variant", ONE_A_FAMILY)
def test_export_loads_in_transformers_with_equal_logits(variant: str, folders: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make(variant, folders)
    plan, source = opened(folder)
    weights = round_trip(plan, source, 2, 2).items()
    write_hf_export(tmp_path / "out", plan, weights, HfExportOptions(source=folder, max_shard_bytes=100_000))
    before, after = (
        AutoModelForCausalLM.from_pretrained(f, attn_implementation="eager") for f in (folder, tmp_path / "out")
    )
    ids = torch.arange(24).remainder(plan.spec.vocab_size)[None]
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    trained = (p for n, p in before.named_parameters() if not n.endswith("e_score_correction_bias"))
    assert plan.parameters == sum(p.numel() for p in trained)


def test_each_tensor_keeps_its_own_dtype(tmp_path: Path, fresh: Callable[[str], Path]) -> None:
    folder = fresh("dense")
    mixed = {n: t.to(torch.float32 if "norm" in n else torch.bfloat16) for n, t in tensors_of(folder).items()}
    mixed["lm_head.weight"] = mixed["lm_head.weight"].to(torch.float16)
    rewrite(folder, mixed)
    plan, source = opened(folder)
    # as fp32 main weights would be
    trained = {name: tensor.float() for name, tensor in round_trip(plan, source, 2, 1).items()}
    write_hf_export(tmp_path / "kept", plan, trained.items(), HfExportOptions(source=folder))
    kept = tensors_of(tmp_path / "kept")
    assert {n: t.dtype for n, t in kept.items()} == {n: t.dtype for n, t in mixed.items()}
    assert all(torch.equal(kept[n], mixed[n]) for n in mixed)
    write_hf_export(tmp_path / "cast", plan, trained.items(), HfExportOptions(source=folder, dtype=torch.bfloat16))
    assert {t.dtype for t in tensors_of(tmp_path / "cast").values()} == {torch.bfloat16}
    assert plan_of(tmp_path / "cast").spec.dtype == "bfloat16"


def test_a_rank_reads_only_its_slices(folders: Path) -> None:
    plan, _ = opened(make("moe", folders))
    for entry in plan.entries:
        source = HfSource(make("moe", folders))
        whole = sum(4 * math.prod(shape) for shape in entry.hf_shapes)
        entry.read(source, 2, 1, 144)
        if entry.shard == "vocab":  # rows 72 to 129 of 130, the rest is padding
            assert source.bytes_read == 4 * 64 * (130 - 72)
        else:
            assert source.bytes_read == (whole if entry.shard == "replicated" else whole // 2)


def test_qkv_interleave_by_hand(fresh: Callable[[str], Path]) -> None:
    folder = fresh("qwen2")  # 8 query heads and 4 KV heads of width 8: 2 query heads a group
    tensors = tensors_of(folder)
    attention = "model.layers.1.self_attn."
    for letter, start in (("q", 0), ("k", 1000), ("v", 2000)):
        bias = tensors[f"{attention}{letter}_proj.bias"]
        tensors[f"{attention}{letter}_proj.bias"] = start + torch.arange(bias.numel(), dtype=torch.float32)
    rewrite(folder, tensors)
    plan, source = opened(folder)
    entry = plan.by_megatron["decoder.layers.1.self_attention.linear_qkv.bias"]
    second_of_four = entry.read(source, 4, 1)
    assert second_of_four.tolist() == [*range(16, 32), *range(1008, 1016), *range(2008, 2016)]
    assert entry.full_shape() == (128,)


def test_padding_is_zero_and_leaves_no_trace(folders: Path) -> None:
    plan, source = opened(make("dense", folders))
    entry = plan.by_megatron["output_layer.weight"]
    # 48 rows each: the third has 34 rows of 130, the last none
    shards = [entry.read(source, 4, rank, 192) for rank in range(4)]
    assert torch.count_nonzero(shards[2][34:]) == 0 and torch.count_nonzero(shards[3]) == 0
    assert torch.count_nonzero(shards[2][:34]) > 0
    shards = [s + 7 for s in shards]  # whatever the padding became in training
    back = EntriesOfSameHfTensors((entry,)).write([shards])["lm_head.weight"]
    assert torch.equal(back, tensors_of(make("dense", folders))["lm_head.weight"] + 7)


def test_lost_shards_are_noticed(folders: Path) -> None:
    plan, source = opened(make("dense", folders))
    entry = plan.by_megatron["decoder.layers.0.mlp.linear_fc1.weight"]
    shard = entry.read(source, 4, 0)
    with pytest.raises(AssertionError, match="shard 0 is"):
        EntriesOfSameHfTensors((entry,)).write([[shard, shard]])


@pytest.mark.parametrize("variant", ONE_A_FAMILY)
def test_gate_comes_before_up(variant: str, folders: Path) -> None:
    """Megatron computes activation(first half) x second half: the plain formula on its tensors equals transformers' own
    module."""
    from transformers import AutoModelForCausalLM

    folder = make(variant, folders)
    plan, source = opened(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    x = torch.randn(3, plan.spec.hidden_size)
    gelu = plan.spec.transformer["activation_func"] == "gelu_tanh"
    for layer, sparse in enumerate(plan.spec.moe_layers):
        stem, mlp = f"decoder.layers.{layer}.mlp.", model.model.layers[layer].mlp
        if sparse:
            for expert in range(plan.spec.experts):
                entry, theirs = (
                    plan.by_megatron[f"{stem}experts.{expert}.linear_fc1.weight"],
                    mlp.experts.gate_up_proj[expert],
                )
                if isinstance(entry.rule, InterleavedGateUp):  # gpt-oss: [h, gate, up, gate, up, ...]
                    theirs = torch.cat([theirs[:, ::2], theirs[:, 1::2]], dim=1).t()
                assert torch.equal(entry.read(source), theirs)  # [gate; up] in transformers' fused experts too
        elif plan.spec.gated and not plan.spec.linear_bias:
            fc1, fc2 = (plan.by_megatron[f"{stem}linear_fc{i}.weight"].read(source) for i in (1, 2))
            gate, up = (x @ fc1.t()).chunk(2, dim=-1)
            active = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
            torch.testing.assert_close((active * up) @ fc2.t(), mlp(x))
