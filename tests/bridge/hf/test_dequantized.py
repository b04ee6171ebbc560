"""FP8 and MXFP4 folders against transformers' own dequantization and plain torch, whole and slice by slice; what is
refused.

Covers: megaswift/bridge/hf/export.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaswift.bridge import HfExportOptions, PlanEntry, open_hf_weights, write_hf_export
from megaswift.bridge.hf import dequantized as quantized_module
from megaswift.bridge.hf.source import HfSource
from megaswift.bridge.plan import EntriesOfSameHfTensors
from megaswift.errors import WeightsError
from megaswift.families import family_of, load_spec
from megaswift.models.published.table import QWEN3_30B_A3B
from tests.bridge.folders import make, plan_of, rewrite, set_config, tensors_of
from tests.bridge.quantize import folder_of, fp8, fp8_config, gpt_oss, quantize_fp8, quantize_mxfp4

pytestmark = pytest.mark.wide

Fresh = Callable[[str], Path]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def theirs_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """transformers' dequantization."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)


def by_hand(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Plain torch; also where blocks are cut off at the edges, which transformers' own does not take."""
    full = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return (weight.float() * full[..., : weight.shape[-2], : weight.shape[-1]]).to(torch.bfloat16)


def assert_same_slices(source: Any, name: str, whole: Tensor, count: int = 60) -> None:
    """The tensor, and random parts of it, bit by bit."""
    assert source.shape(name) == tuple(whole.shape) and source.dtype(name) == whole.dtype
    assert torch.equal(source.slice(name), whole)
    draw = random.Random(1)
    for _ in range(count):
        where = []
        for n in whole.shape[: draw.randint(1, whole.dim())]:
            start = draw.randrange(n)
            where.append(slice(start, draw.randint(start, n)))
        got, want = source.slice(name, where), whole[tuple(where)]
        assert got.shape == want.shape and torch.equal(got, want), where


def packed_fp4(experts: int, rows: int, groups: int, low: int = 100, high: int = 140) -> tuple[Tensor, Tensor]:
    """Random blocks and exponents."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(low, high, (experts, rows, groups), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("band", [1 << 22, 64])
@pytest.mark.parametrize("shape", [(96, 160), (3, 64, 96)])
def test_fp8_as_transformers(
    shape: tuple[int, ...], band: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_module, "BAND", band)
    weight, scale = fp8(torch.randn(shape), (32, 32))
    source = open_hf_weights(
        folder_of(tmp_path / "m", {"a.weight": weight, "a.weight_scale_inv": scale}, fp8_config((32, 32)))
    )
    assert source.names() == ["a.weight"] and source.dtype_name("a.weight") == "BF16"
    assert_same_slices(source, "a.weight", theirs_fp8(weight, scale))


def test_fp8_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    weight, scale = fp8(torch.randn(64, 64), (32, 32))
    source = open_hf_weights(
        folder_of(tmp_path / "m", {"a": weight, "a_scale_inv": scale}, fp8_config((32, 32)), "float32")
    )
    assert_same_slices(source, "a", theirs_fp8(weight, scale, torch.float32))


def test_fp8_blocks_cut_off_at_the_edges(tmp_path: Path) -> None:
    """DeepSeek-V3's kv_a_proj_with_mqa has 576 = 4.5 x 128 rows."""
    weight, scale = fp8(torch.randn(144, 200), (32, 48))
    assert scale.shape == (5, 5)
    source = open_hf_weights(folder_of(tmp_path / "m", {"a": weight, "a_scale_inv": scale}, fp8_config((32, 48))))
    assert_same_slices(source, "a", by_hand(weight, scale, (32, 48)))


@pytest.mark.parametrize("kind", ["e8m0", "bytes"])
def test_fp8_with_scales_that_are_powers_of_two(kind: str, tmp_path: Path) -> None:
    weight, _ = fp8(torch.randn(64, 96), (32, 32))
    exponents = torch.arange(119, 125, dtype=torch.uint8).reshape(2, 3)
    scale = exponents if kind == "bytes" else exponents.view(torch.float8_e8m0fnu)
    source = open_hf_weights(
        folder_of(tmp_path / "m", {"a": weight, "a_scale_inv": scale}, {**fp8_config((32, 32)), "scale_fmt": "ue8m0"})
    )
    assert_same_slices(source, "a", theirs_fp8(weight, scale))


def test_fp8_with_one_scale_a_tensor(tmp_path: Path) -> None:
    weight, scale = fp8(torch.randn(50, 70), (50, 70))
    stored = {"a.weight": weight, "a.weight_scale_inv": scale.reshape(()), "a.activation_scale": torch.ones(())}
    source = open_hf_weights(folder_of(tmp_path / "m", stored, {**fp8_config(None), "activation_scheme": "static"}))
    assert source.names() == ["a.weight"]
    assert_same_slices(source, "a.weight", theirs_fp8(weight, scale))


@pytest.mark.parametrize("band", [1 << 22, 96])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_as_transformers(dtype: str, band: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setattr(quantized_module, "BAND", band)
    blocks, scales = packed_fp4(3, 40, 4)
    stored = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales, "e.down_proj_bias": torch.zeros(3, 40)}
    source = open_hf_weights(folder_of(tmp_path / "m", stored, MXFP4, dtype))
    assert source.names() == ["e.down_proj_bias", "e.down_proj"]
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype))
    assert theirs.shape == (3, 128, 40)
    assert_same_slices(source, "e.down_proj", theirs)


def test_mxfp4_every_byte_and_exponent(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 256, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).expand(1, 256, 16).contiguous()
    source = open_hf_weights(folder_of(tmp_path / "m", {"w_blocks": blocks, "w_scales": scales}, MXFP4))
    assert torch.equal(
        source.slice("w").view(torch.int16), convert_moe_packed_tensors(blocks, scales).view(torch.int16)
    )


def test_only_the_bytes_behind_a_slice_are_read(tmp_path: Path) -> None:
    weight, scale = fp8(torch.randn(128, 128), (32, 32))
    source = open_hf_weights(folder_of(tmp_path / "a", {"a": weight, "a_scale_inv": scale}, fp8_config((32, 32))))
    source.slice("a", (slice(40, 50), slice(60, 70)))
    assert source.bytes_read == 10 * 10 + 4 * 1 * 2
    blocks, scales = packed_fp4(4, 8, 4)
    source = open_hf_weights(folder_of(tmp_path / "b", {"w_blocks": blocks, "w_scales": scales}, MXFP4))
    source.slice("w", (slice(1, 2), slice(40, 60), slice(2, 5)))
    assert source.bytes_read == 3 * 16 + 3


def test_a_model_is_what_transformers_loads(fresh: Fresh, tmp_path: Path) -> None:
    """Every weight bit by bit; the export is a plain folder that transformers loads to the same weights."""
    from transformers import AutoModelForCausalLM

    folder = quantize_fp8(fresh("llama"), (16, 32))
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()  # on a CPU, transformers dequantizes
    plan, source = plan_of(folder), open_hf_weights(folder)
    assert plan.check(source) == [] and set(source.names()) == set(theirs)
    assert all(t.dtype == torch.bfloat16 for t in theirs.values())
    assert [n for n, t in theirs.items() if not torch.equal(t, source.slice(n))] == []
    weights = [
        pair
        for entry in plan.entries
        for pair in EntriesOfSameHfTensors((entry,)).write([[entry.read(source, 2, r) for r in range(2)]]).items()
    ]
    write_hf_export(tmp_path / "out", plan, weights, HfExportOptions(source=folder))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert [n for n, t in theirs.items() if not torch.equal(t, exported[n]) or t.dtype != exported[n].dtype] == []


def test_a_gpt_oss_folder_is_what_transformers_loads(tmp_path: Path) -> None:
    """Names, transposed experts and every bit."""
    from transformers import AutoModelForCausalLM

    # on a CPU, transformers dequantizes
    theirs = AutoModelForCausalLM.from_pretrained(quantize_mxfp4(gpt_oss(tmp_path))).state_dict()
    source = open_hf_weights(tmp_path)
    assert set(source.names()) == set(theirs) and theirs["model.layers.1.mlp.experts.gate_up_proj"].shape == (
        4,
        64,
        192,
    )
    assert [n for n, t in theirs.items() if t.dtype != source.dtype(n) or not torch.equal(t, source.slice(n))] == []


def test_a_spec_keeps_nothing_of_the_quantization(fresh: Fresh) -> None:
    assert "quantization_config" not in load_spec(quantize_fp8(fresh("llama"), (16, 16))).hf_config


def test_stacked_experts_are_read_by_a_rule(tmp_path: Path) -> None:
    """A rank's gates and ups of one expert, out of interleaved columns of a dequantized [experts, in, out]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from tests.bridge.test_pieces import Interleaved

    blocks, scales = packed_fp4(3, 12, 1)
    source = open_hf_weights(folder_of(tmp_path / "m", {"gate_up_blocks": blocks, "gate_up_scales": scales}, MXFP4))
    spec = family_of(QWEN3_30B_A3B).spec(QWEN3_30B_A3B)
    shard = PlanEntry(Interleaved(), spec, None, 1).read(source, 2, 1)
    assert torch.equal(shard, convert_moe_packed_tensors(blocks, scales)[1][:4, [6, 8, 10, 7, 9, 11]].t())


def refused(folder: Path) -> str:
    with pytest.raises(WeightsError) as error:
        open_hf_weights(folder)
    return str(error.value)


FP8_WRONG: list[tuple[str, Callable[[dict[str, Tensor]], Any], str]] = [
    ("no scale", lambda t: t.pop("a_scale_inv"), "tensor a: is FP8, and its scale a_scale_inv is not in any file"),
    ("no weight", lambda t: t.pop("a"), "tensor a_scale_inv: is a scale, and a is not in any file"),
    (
        "plain weight",
        lambda t: t.update(a=torch.zeros(64, 64)),
        "tensor a_scale_inv: is a scale, and a is F32, not F8_E4M3",
    ),
    (
        "shape",
        lambda t: t.update(a_scale_inv=torch.ones(2, 3)),
        "tensor a_scale_inv: has shape [2, 3]; a [64, 64] in blocks of [32, 32]",
    ),
    ("dtype", lambda t: t.update(a_scale_inv=torch.ones(2, 2, dtype=torch.int64)), "tensor a_scale_inv: has dtype I64"),
    ("vector", lambda t: t.update(a=t["a"][0].clone()), "tensor a: is FP8, but not a matrix"),
]


@pytest.mark.parametrize(("change", "told"), [r[1:] for r in FP8_WRONG], ids=[r[0] for r in FP8_WRONG])
def test_fp8_files_that_do_not_fit(change: Callable[[dict[str, Tensor]], Any], told: str, tmp_path: Path) -> None:
    weight, scale = fp8(torch.randn(64, 64), (32, 32))
    tensors = {"a": weight, "a_scale_inv": scale}
    change(tensors)
    message = refused(folder_of(tmp_path / "m", tensors, fp8_config((32, 32))))
    assert told in message and "model.safetensors" in message


MXFP4_WRONG: list[tuple[str, Callable[[dict[str, Tensor]], Any], str]] = [
    ("no scales", lambda t: t.pop("w_scales"), "tensor w_blocks: is MXFP4, and w_scales is not in any file"),
    ("no blocks", lambda t: t.pop("w_blocks"), "tensor w_scales: has exponents, and w_blocks is not in any file"),
    ("stored twice", lambda t: t.update(w=torch.zeros(1)), "tensor w_blocks: is MXFP4, and w is stored too"),
    ("shape", lambda t: t.update(w_blocks=t["w_blocks"][..., :8].clone()), "tensor w_blocks: is U8 [2, 8, 4, 8]"),
    ("scales", lambda t: t.update(w_scales=t["w_scales"][:1].clone()), "tensor w_scales: is U8 [1, 8, 4]"),
]


@pytest.mark.parametrize(("change", "told"), [r[1:] for r in MXFP4_WRONG], ids=[r[0] for r in MXFP4_WRONG])
def test_mxfp4_files_that_do_not_fit(change: Callable[[dict[str, Tensor]], Any], told: str, tmp_path: Path) -> None:
    blocks, scales = packed_fp4(2, 8, 4)
    tensors = {"w_blocks": blocks, "w_scales": scales}
    change(tensors)
    assert told in refused(folder_of(tmp_path / "m", tensors, MXFP4))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq weights are not supported"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes weights are not supported"),
        ({"quant_method": "some-new-one"}, "the format is not supported"),
        ({"bits": 4}, "must be a mapping with quant_method"),
        ("fp8", "must be a mapping with quant_method"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two sizes"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' cannot be read; e4m3 or float8_e4m3fn can"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4' cannot be read"),
        ({"quant_method": "fp8", "rotation": "hadamard"}, "rotation is not a known field of fp8"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_reason(given: Any, told: str, fresh: Fresh) -> None:
    """By the source, and by the reading of config.json before any file is opened."""
    folder = fresh("llama")
    set_config(folder, quantization_config=given)
    assert told in refused(folder) and "config.json" in refused(folder)
    with pytest.raises(WeightsError) as error:
        load_spec(folder)
    assert told in str(error.value) and len(error.value.problems) == 1


def test_plain_folders_are_read_as_they_are(folders: Path) -> None:
    assert isinstance(open_hf_weights(make("llama", folders)), HfSource)


def test_fp8_without_a_word_in_config_is_refused(fresh: Fresh) -> None:
    folder = quantize_fp8(fresh("llama"), (32, 32))
    set_config(folder, quantization_config=None)
    with pytest.raises(WeightsError, match=r"(?s)_scale_inv: is not in the weight table.*has dtype F8_E4M3"):
        plan_of(folder).check(open_hf_weights(folder))
    rewrite(folder, {n: t.to(torch.bfloat16) for n, t in tensors_of(folder).items() if not n.endswith("_scale_inv")})
    plan_of(folder).check(open_hf_weights(folder))
