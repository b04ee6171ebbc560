"""`--init_weights`: adapters that do not start as PEFT's default, written as a PEFT folder before the run.

    true        A uniform, B zero: nothing is written, the engines do it
    false       A and B uniform
    gaussian    A normal with deviation 1 / r, B zero
    pissa       A and B from the r largest singular values of W (arXiv:2404.02948); pissa_niter_N by a randomized SVD
    olora       A and B from the QR decomposition of W (arXiv:2406.01775)
    loftq       A and B from the singular values of W minus W in NF4 (arXiv:2310.08659, one iteration)

pissa and olora take scale x B A off the base model, which is written too: the adapters belong to that folder. The
formulas are PEFT's, computed in float32 on a CPU.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.base.atomic_writes import safetensors_errors_as_oserror
from megaswift.bridge import nf4
from megaswift.bridge.adapters.folder import write_peft_folder
from megaswift.bridge.adapters.options.lora import LoraConfig
from megaswift.bridge.adapters.plan import AdapterHyperparameters, AdapterPlan
from megaswift.bridge.hf.base_model import MARK, link_weights_copy_rest
from megaswift.bridge.hf.source import WeightSource
from megaswift.bridge.initial_weights import seed_by_name
from megaswift.bridge.plan import WeightPlan
from megaswift.bridge.weight_source import open_weights
from megaswift.errors import ConfigError, Problem
from megaswift.families import family_of, load_spec
from megaswift.models.targets import modules_to_save_tensor_names, select_projections

NITER = "_niter_"


def first_matrices(weight: Tensor, method: str, rank: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return A [r, in] and B [out, r] of a weight [out, in], float32. `seed`: that of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    out, width = weight.shape
    if method in ("false", "gaussian"):
        draw = torch.rand(rank, width, generator=generator).mul_(2).sub_(1).div_(math.sqrt(width))
        if method == "gaussian":
            return torch.randn(rank, width, generator=generator).div_(rank), torch.zeros(out, rank)
        return draw, torch.rand(out, rank, generator=generator).mul_(2).sub_(1).div_(math.sqrt(rank))
    weight = weight.float()
    if method == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank].contiguous(), q[:, :rank].contiguous()
    if method == "loftq":
        weight = weight - nf4.nf4_dequantize(*nf4.nf4_quantize(weight), torch.float32)
    if NITER in method:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            left, values, right = torch.svd_lowrank(weight, rank, niter=int(method.split(NITER)[1]))
        rows = right.t()
    else:
        left, values, rows = torch.linalg.svd(weight, full_matrices=False)
    root = (values[:rank] / scale).sqrt()
    return (root[:, None] * rows[:rank]).contiguous(), (left[:, :rank] * root).contiguous()


def adapter_plan_of(lora: LoraConfig, expert_adapters: bool, folder: Path) -> AdapterPlan:
    """Plan the options' adapters on the model in `folder`. ConfigError where they cannot start from its weights.

    Args:
        expert_adapters: Whether the run's engine trains adapters of experts.
    """
    label = f"--init_weights {lora.init_weights}"
    spec = load_spec(folder)
    family = family_of(spec.hf_config)
    if spec.experts and not expert_adapters:
        rule = "needs the native engine for models with experts"
        raise ConfigError(Problem(label, rule, "--engine megatron, or --init_weights true"))
    settings = AdapterHyperparameters(lora.lora_rank, lora.lora_alpha, lora.use_rslora, lora.lora_dropout)
    chosen = select_projections(family, spec, lora.target_modules, lora.target_parameters)
    if narrow := [p.module for p in chosen if min(p.shape) < lora.lora_rank]:
        rule = f"needs matrices of at least lora_rank {lora.lora_rank} rows and columns, unlike {narrow[0]}"
        raise ConfigError(Problem(label, rule, "use a smaller --lora_rank"))
    saved = modules_to_save_tensor_names(family, spec, lora.modules_to_save)
    return AdapterPlan(WeightPlan(family, spec), chosen, settings, saved)


def write_initial_adapter(
    lora: LoraConfig, seed: int, expert_adapters: bool, folder: Path, adapter: Path, residual: Path
) -> Path:
    """Writes `adapter`, a PEFT folder on the model of `folder`, and `residual`, the model that it belongs to where the
    method changes it; returns that model's folder. What an earlier start has written is kept.

    Args:
        lora: With new adapters that do not start as PEFT's default does.
        expert_adapters: Whether the run's engine trains adapters of experts.
    """
    base = residual if lora.init_weights.startswith(("pissa", "olora")) else folder
    if (adapter / MARK).is_file() and (adapter / MARK).read_text(encoding="utf-8") == _mark(lora, seed, folder):
        return base
    plan = adapter_plan_of(lora, expert_adapters, folder)
    source = open_weights(folder)
    tensors: dict[str, Tensor] = {}
    for one in plan.adapters:
        own_seed = seed_by_name(seed, one.name("A"))
        weight = source.slice(one.projection.weight)
        a, b = first_matrices(weight, lora.init_weights, one.rank, one.scale, own_seed)
        tensors |= {one.name("A"): a, one.name("B"): b}
    if base is residual:
        _write_residual(folder, residual, plan, tensors)
    shutil.rmtree(adapter, ignore_errors=True)
    write_peft_folder(adapter, plan, _with_saved(plan, tensors, source), str(base.resolve()))
    (adapter / MARK).write_text(_mark(lora, seed, folder), encoding="utf-8")
    return base


def _mark(lora: LoraConfig, seed: int, folder: Path) -> str:
    options = (lora.init_weights, lora.lora_rank, lora.lora_alpha, lora.use_rslora, lora.lora_dropout)
    modules = (lora.target_modules, lora.modules_to_save)
    return f"{folder.resolve()} {options} {modules} {seed}\n"


def _with_saved(plan: AdapterPlan, tensors: Mapping[str, Tensor], source: WeightSource) -> Iterator[tuple[str, Tensor]]:
    yield from tensors.items()
    for name in plan.saved:
        yield name, source.slice(name).float()


def _write_residual(folder: Path, residual: Path, plan: AdapterPlan, tensors: Mapping[str, Tensor]) -> None:
    """W - scale B A in place of each adapted weight, in its dtype; other weights are linked."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.rmtree(residual, ignore_errors=True)
    link_weights_copy_rest(folder, residual, [MARK])
    adapters: dict[str, Any] = {one.projection.weight: one for one in plan.adapters}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if not adapters.keys() & set(file.keys()):
                continue
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        for name in adapters.keys() & held.keys():
            one = adapters[name]
            weight = held[name]
            a = tensors[one.name("A")]
            b = tensors[one.name("B")]
            held[name] = (weight.float() - one.scale * (b @ a)).to(weight.dtype).contiguous()
        (residual / path.name).unlink()
        with safetensors_errors_as_oserror(residual / path.name):
            save_file(held, residual / path.name, metadata=metadata)
