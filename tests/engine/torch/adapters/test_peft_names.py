"""PEFT's adapters on the engines of torch, against a plain PEFT loop in one process: steps, folders, going on,
merging.

Covers: megaswift/engine/torch/adapters/merged_weights.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megaswift.bridge.adapters.merge import merge_adapter_folder_into_base
from megaswift.bridge.adapters.options.checks import SHARDED
from megaswift.bridge.adapters.options.methods import METHODS
from tests.engine.torch.adapter_ranks import RECIPE, Run, adapted, far, logits_of, model_of, orthogonal, plain, saved
from tests.parity.models import build, disk_tensors
from tests.parity.pool import Pool

pytestmark = pytest.mark.process
GO = "tests.engine.torch.adapter_ranks:go"

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # train_type: our options, PEFT's fields
    "lora": (
        {"lora_rank": 4, "lora_alpha": 16, "modules_to_save": ["lm_head"]},
        {"r": 4, "lora_alpha": 16, "modules_to_save": ["lm_head"]},
    ),
    "dora": ({"lora_rank": 4, "lora_alpha": 16}, {"r": 4, "lora_alpha": 16, "use_dora": True}),
    "rslora": ({"lora_rank": 4, "lora_alpha": 16}, {"r": 4, "lora_alpha": 16, "use_rslora": True}),
    "adalora": (
        {"init_r": 6, "target_r": 2, "total_step": 3, "tfinal": 1, "lora_alpha": 16},
        {"init_r": 6, "target_r": 2, "total_step": 3, "tfinal": 1, "lora_alpha": 16},
    ),
    "boft": ({"boft_block_size": 8}, {"boft_block_size": 8}),
    "delora": ({}, {}),
    "fourierft": ({"n_frequency": 40, "scaling": 50}, {"n_frequency": 40, "scaling": 50.0}),
    "gralora": ({"lora_rank": 8, "peft_config": {"gralora_k": "4"}}, {"r": 8, "gralora_k": 4}),
    "hra": ({"lora_rank": 4}, {"r": 4}),
    "ia3": (
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "loha": ({"lora_rank": 4}, {"r": 4}),
    "lokr": ({"peft_config": {"decompose_factor": "4"}}, {"decompose_factor": 4}),
    "miss": ({"lora_rank": 8}, {"r": 8}),
    "oft": ({"oft_block_size": 16}, {"oft_block_size": 16}),
    "randlora": ({"lora_rank": 8, "lora_alpha": 16}, {"r": 8, "randlora_alpha": 16}),
    "road": ({"peft_config": {"group_size": "16"}}, {"group_size": 16}),
    "shira": ({"lora_rank": 4}, {"r": 4}),
    "vblora": (
        {"lora_rank": 2, "peft_config": {"vector_length": "16", "num_vectors": "12"}},
        {"r": 2, "vector_length": 16, "num_vectors": 12},
    ),
    "vera": ({"lora_rank": 16}, {"r": 16}),
    "waveft": ({"n_frequency": 40}, {"n_frequency": 40}),
}


def config_of(name: str) -> Any:
    """As a user of PEFT writes it."""
    import peft

    kind = peft.LoraConfig if name in ("lora", "dora", "rslora") else getattr(peft, METHODS[name].config)
    return kind(**{"target_modules": "all-linear", "task_type": "CAUSAL_LM", **SETTINGS[name][1]})


def merged(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """By PEFT, as it is written."""
    model.merge_and_unload().save_pretrained(folder / "by-peft")
    return load_file(folder / "by-peft" / "model.safetensors")


def reference(name: str, folder: Path, **how: Any) -> Any:
    model = adapted(model_of(folder, **how), config_of(name))
    if name != "adalora":
        return plain(model)
    return plain(model, orthogonal, model.base_model.update_and_allocate)


DEFAULT = ("vera",)
ALL = [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in SETTINGS]


def test_every_method_is_tried() -> None:
    assert SETTINGS.keys() >= METHODS.keys()


@pytest.mark.parametrize("name", ALL)
def test_equals_peft(name: str, pool: Pool, dense: Path, tmp_path: Path) -> None:
    """Three steps on 2 ranks; the folder loads in PEFT and merges."""
    import peft

    folder = dense
    options = {"engine": "ddp", "train_type": name, **SETTINGS[name][0]}
    got, other = pool.run(
        GO, Run(folder, options, adapter=tmp_path / "adapter", save=tmp_path / "step", merges=True), 2
    )
    want = reference(name, folder)
    assert got.wrapper == "DistributedDataParallel" and far(other.weights, got.weights) == 0
    assert got.losses == pytest.approx(want.losses, rel=1e-5) and got.norms == pytest.approx(want.norms, rel=1e-4)
    assert far(got.weights, want.weights) < 1e-4
    loaded = peft.PeftModel.from_pretrained(model_of(folder), tmp_path / "adapter")
    trained = adapted(model_of(folder), config_of(name))
    trained.load_state_dict(got.weights, strict=False)
    found, plain_logits = logits_of(loaded), logits_of(model_of(folder))
    assert float((found - logits_of(trained)).abs().max()) < 2e-5
    assert float((found - plain_logits).abs().max()) > 1e-3
    merge_adapter_folder_into_base(folder, tmp_path / "adapter", tmp_path / "merged")
    assert float((found - logits_of(model_of(tmp_path / "merged"))).abs().max()) < 1e-4
    assert far(got.merged, merged(trained, tmp_path)) < 1e-6 and far(other.merged, got.merged) == 0


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS])
def test_goes_on_bit_for_bit(name: str, pool: Pool, dense: Path, tmp_path: Path) -> None:
    options = {"engine": "ddp", "train_type": name, **SETTINGS[name][0]}
    whole = pool.run(GO, Run(dense, options), 2)[0]
    first = pool.run(GO, Run(dense, options, last=2, save=tmp_path / "step", adapter=tmp_path / "a"), 2)[0]
    rest = pool.run(GO, Run(dense, options, first=2, load=tmp_path / "step"), 2)[0]
    assert first.losses + rest.losses == whole.losses
    assert all(torch.equal(t, whole.weights[n]) for n, t in rest.weights.items())
    if name != "adalora":  # with final ranks
        start = {
            "engine": "ddp",
            "train_type": "lora" if name in ("dora", "rslora") else name,
            "adapters": str(tmp_path / "a"),
        }
        again = pool.run(GO, Run(dense, start, last=0), 2)[0].weights
        assert again.keys() == first.weights.keys() and all(torch.equal(t, first.weights[n]) for n, t in again.items())


def serves(name: str, engine: str) -> bool:
    """Whether the rules let an adapter train there."""
    return engine not in SHARDED or name not in METHODS or not METHODS[name].whole


SPLIT = [name for name in SETTINGS if name not in METHODS or not METHODS[name].engines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(("lora", engine) for engine in ("zero0", "zero1", "zero2_offload", "zero3_offload")),
        *((name, engine) for name in SPLIT for engine in ("zero2", "zero3", "fsdp2") if serves(name, engine)),
    ],
)
def test_other_engines(name: str, engine: str, pool: Pool, dense: Path, tmp_path: Path) -> None:
    """The same three steps where gradients, or weights too, are split; the folder is whole."""
    options = {"engine": engine, "train_type": name, **SETTINGS[name][0]}
    got = pool.run(GO, Run(dense, options, adapter=tmp_path / "adapter", merges=True), 2)[0]
    want = reference(name, dense)
    assert got.losses == pytest.approx(want.losses, rel=1e-5)
    assert far(got.weights, want.weights) < 1e-4
    assert all(t.numel() for t in saved(tmp_path / "adapter").values())
    trained = adapted(model_of(dense), config_of(name))
    trained.load_state_dict(got.weights, strict=False)
    assert far(got.merged, merged(trained, tmp_path)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_adapters_on_stacked_experts_are_merged_for_samplers(engine: str, pool: Pool, tmp_path: Path) -> None:
    """Two adapters around one module, whose weights are several tensors in files."""
    import peft

    folder = build("moe", tmp_path / "moe")
    where = {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    got = pool.run(
        GO,
        Run(folder, {"engine": engine, "train_type": "lora", "lora_rank": 4, "lora_alpha": 16, **where}, merges=True),
        2,
    )[0]
    trained = adapted(model_of(folder), peft.LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **where))
    trained.load_state_dict(got.weights, strict=False)
    assert far(got.merged, merged(trained, tmp_path)) < 1e-6
    assert far(got.merged, disk_tensors(folder)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3", "fsdp2"])
def test_lora_plus_on_every_strategy(engine: str, pool: Pool, dense: Path) -> None:
    """Three steps by PEFT's own optimizer, and a larger step of B than without."""
    from peft.optimizers import create_loraplus_optimizer

    options = {"engine": engine, "train_type": "lora", "lorap_lr_ratio": 8, **SETTINGS["lora"][0]}
    got = pool.run(GO, Run(dense, options), 2)[0]
    model = adapted(model_of(dense), config_of("lora"))
    optimizer = create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=RECIPE.lr,
        loraplus_lr_ratio=8,
        loraplus_weight_decay=RECIPE.weight_decay,
        betas=RECIPE.betas,
        eps=RECIPE.eps,
    )
    want = plain(model, optimizer=optimizer)
    assert got.losses == pytest.approx(want.losses, rel=1e-5) and far(got.weights, want.weights) < 1e-4
    assert far(got.weights, reference("lora", dense).weights) > 1e-2
