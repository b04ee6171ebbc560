"""Models that are built without memory and filled from files a piece at a time: what `from_pretrained` makes, bit by
bit.

Covers: megaswift/engine/torch/conversions.py, megaswift/engine/torch/weights.py.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megaswift.bridge.convert.to_megatron import hf_to_megatron
from megaswift.bridge.hf.model_folder import tensors_by_disk_name
from megaswift.bridge.weight_source import open_weights
from megaswift.config import SwiftConfig
from megaswift.engine.torch import meta_init, weights
from megaswift.engine.torch import model as torch_model
from megaswift.engine.torch.adapters.peft_names import unwrap_peft_model
from megaswift.engine.torch.conversions import conversion_groups, jointly_written_parameters, tied_name_map
from megaswift.errors import WeightsError
from megaswift.models.any_model import spec_from_family_or_size_fields
from megaswift.run.engines import base_quantization, model_build
from tests.bridge.folders import tensors_of
from tests.parity.models import build

pytestmark = pytest.mark.wide
VARIANTS = ("dense", "dense-tied", "moe", "mixtral", "gpt_oss", "deepseek_v3")
LORA = {"train_type": "lora", "target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}


def filled(folder: Path, **options: Any) -> tuple[Any, list[int]]:
    """(a model that was hollow, how many elements each piece of files held)."""
    cfg = SwiftConfig(model=str(folder), engine="fsdp2", **options)
    how, spec = model_build(cfg), spec_from_family_or_size_fields(folder)
    fields = torch_model.build_model_for_wrapping(folder, how, False, spec, {}, empty=True)
    bare, source = unwrap_peft_model(fields.model), open_weights(folder)
    assert all(
        meta_init.is_unallocated(p)
        for n, p in bare.named_parameters()
        if "lora_" not in n and "modules_to_save" not in n
    )
    found, first = conversion_groups(bare, source), tied_name_map(bare)
    assert not weights._differences(bare, source, found)
    meta_init.allocate_storage(fields.parameters(), torch.device("cpu"))
    parameters = dict(fields.named_parameters())

    def put(name: str, kind: str, tensor: Tensor) -> None:
        parameters[name].data.copy_(tensor)

    engine: Any = SimpleNamespace(fields=fields, build=how, shapes=parameters, strategy=SimpleNamespace(put=put))
    engine.context = SimpleNamespace(rank=0, device=torch.device("cpu"))
    weights.fill_from_files(engine, found, source, first)
    return fields, [sum(torch.Size(source.shape(name)).numel() for _, name in piece.stored) for piece in found]


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_from_pretrained(variant: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Weights, adapters, buffers, ties; no piece is more than a layer's experts."""
    folder = build(variant, tmp_path / variant)
    got, sizes = filled(folder, **options)
    want = torch_model.build_model_for_wrapping(
        folder,
        model_build(SwiftConfig(model=str(folder), engine="fsdp2", **options)),
        True,
        spec_from_family_or_size_fields(folder),
        {},
    )
    for mine, theirs in (
        (got.named_parameters(), want.named_parameters()),
        (got.named_buffers(), want.named_buffers()),
    ):
        own, others = dict(mine), dict(theirs)
        assert list(own) == list(others)
        assert all(torch.equal(own[name], tensor) for name, tensor in others.items())
        assert [t.requires_grad for t in own.values()] == [t.requires_grad for t in others.values()]
    assert tied_name_map(unwrap_peft_model(got.model)) == tied_name_map(unwrap_peft_model(want.model))
    assert max(sizes) < 0.3 * sum(sizes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_written_in_groups_equal_those_of_the_model(variant: str, tmp_path: Path) -> None:
    """What goes out a group at a time is what the files held."""
    folder = build(variant, tmp_path / variant)
    bare = filled(folder)[0].model
    tensors = dict(bare.named_parameters())
    made: dict[str, Tensor] = {}
    for group in jointly_written_parameters(bare, tensors):
        made |= tensors_by_disk_name(bare, {name: tensors[name] for name in group})
    stored = tensors_of(folder)
    left = {n for n in stored if n not in made}
    assert left <= {n for n, _ in bare.named_buffers()} | {"lm_head.weight"} and made.keys() <= stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in made.items())
    assert len(jointly_written_parameters(bare, tensors)) > 20


def test_files_that_lack_a_tensor(tmp_path: Path) -> None:
    stored, folder = tensors_of(build("dense", tmp_path / "m")), tmp_path / "lacks"
    del stored["model.layers.1.mlp.up_proj.weight"]
    stored["model.norm.weight"] = torch.ones(7)
    folder.mkdir()
    shutil.copy(tmp_path / "m" / "config.json", folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    fields = torch_model.build_model_for_wrapping(
        folder,
        model_build(SwiftConfig(model=str(folder), engine="fsdp2")),
        False,
        spec_from_family_or_size_fields(folder),
        {},
        empty=True,
    )
    source = open_weights(folder)
    told = "\n".join(
        str(p) for p in weights._differences(fields.model, source, conversion_groups(fields.model, source))
    )
    assert "model.layers.1.mlp.up_proj.weight" in told and "model.norm.weight" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    "options", [{"train_type": "lora", "use_dora": True}, {"train_type": "qlora"}, {"train_type": "vera"}]
)
def test_adapters_initialized_from_weights_refuse_a_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    """DoRA's magnitudes would be those of an empty model."""
    hf_to_megatron(build("dense", tmp_path / "m"), tmp_path / "c")
    folder = tmp_path / "c" / "model"
    cfg = SwiftConfig(model=str(tmp_path / "c"), engine="ddp", **options)
    engine: Any = SimpleNamespace(
        layout=SimpleNamespace(world_size=1),
        build=model_build(cfg),
        settings=SimpleNamespace(quantization=base_quantization(cfg)),
        kind="ddp",
        spec=spec_from_family_or_size_fields(folder),
    )
    with pytest.raises(WeightsError, match="convert megatron-to-hf"):
        weights.prepare_model_and_filler_from_files(folder, engine)


def test_a_real_model_hands_its_weights_over() -> None:
    """Tied weights are one; what is left has shapes and no memory."""
    plain = torch.nn.Linear(3, 5)
    module = torch.nn.ModuleDict({"a": plain, "b": torch.nn.Linear(3, 5)})
    module["b"].weight = plain.weight
    before = {n: t.detach().clone() for n, t in module.named_parameters()}
    taken = meta_init.swap_parameters_for_expanded_zeros(module)
    assert taken.keys() == before.keys() and all(torch.equal(taken[n], t) for n, t in before.items())
    assert module["a"].weight is module["b"].weight and meta_init.is_unallocated(plain.weight)
    assert plain.weight.shape == (5, 3) and plain.weight.untyped_storage().nbytes() == 4


def test_only_modules_of_the_thread_that_builds_are_empty() -> None:
    """Another thread builds a module meanwhile."""
    with ThreadPoolExecutor(1) as other, meta_init.init_empty_weights():
        here, there = torch.nn.Linear(2, 2), other.submit(torch.nn.Linear, 2, 2).result()
    assert here.weight.is_meta and not there.weight.is_meta
