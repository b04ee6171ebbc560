"""Adapters on the engines of torch, measured on their ranks; and the same training in plain PEFT, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megaswift.engine.torch.strategies.strategy import whole_tensor
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import Case, global_batch, own, parse
from tests.parity.lora import draw_lora_a
from tests.parity.measure import recipe_options
from tests.parity.oracle import Recipe, adamw, cross_entropy, documents

STEPS, SEED = 3, 42
RECIPE = Recipe(lr=4e-3, eps=1e-3, max_grad_norm=1.0)
"""Many adapters start from zero, where Adam with a small epsilon makes whole steps of rounding errors."""
CASE: Case = parse("dense dp2")


@dataclass(frozen=True)
class Run:
    """Steps `first` to `last` with these options; from a folder, to folders."""

    folder: Path
    options: dict[str, Any]
    first: int = 0
    last: int = STEPS
    load: Path | None = None
    save: Path | None = None
    adapter: Path | None = None
    export: Path | None = None
    case: Case = CASE
    merges: bool = False
    """A policy's: merged weights are asked for before every step and after the last."""


@dataclass
class Result:
    """What a rank saw."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """What trained, by its name in PEFT's model."""
    merged: dict[str, Tensor] = field(default_factory=dict)
    """The model with its adapters, by the names of its files."""
    kinds: list[str] = field(default_factory=list)
    """Classes of the linear layers under the adapters."""
    wrapper: str = ""
    elements: int = 0
    weight_bytes: int = 0


def opened(case: Case, run: Run, world: int) -> tuple[Any, Any]:
    """(engine with the folder's weights, context), of any model that transformers loads."""
    from megaswift.config import SwiftConfig
    from megaswift.models.any_model import spec_from_family_or_size_fields
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import make_engine, start_context

    task = {"task": "grpo", "reward_funcs": ("format",)} if run.merges else {"task": "sft"}
    cfg = SwiftConfig(model=str(run.folder), **task, **case.config(**recipe_options(RECIPE, False), **run.options))
    context = start_context(cfg.replace(ddp_timeout=600, seed=11), Layout.from_config(cfg.parallel, world))
    engine = make_engine(cfg, spec_from_family_or_size_fields(run.folder), run.folder, context)
    engine.load_hf(run.folder)
    return engine, context


def go(rank: int, world: int, run: Run) -> Result:
    """On a rank."""
    case = run.case if world == 2 else parse("dense single")
    engine, context = opened(case, run, world)
    out = Result(wrapper=type(engine.strategy.module).__name__)
    report = engine.report()
    out.elements, out.weight_bytes = report.parameters_total, report.weight_bytes
    out.kinds = sorted({type(m).__name__ for m in engine.fields.modules()})
    if run.load is not None:
        engine.load(run.load)
    for k in range(run.first, run.last):
        if run.merges:
            list(engine.hf_weights(to="all"))
        mine = own(global_batch(run.case, k), world, rank)
        result = engine.train_batch(mine, CrossEntropy(), RECIPE.lr)
        out.losses.append(result.loss)
        out.norms.append(result.grad_norm)
    if run.merges:
        out.merged = {name: tensor.clone() for name, tensor in engine.hf_weights(to="all")}
    if run.save is not None:
        engine.save(run.save)
    if run.adapter is not None:
        engine.write_adapter(run.adapter, str(run.folder))
    if run.export is not None:
        engine.export(run.export, run.folder)
    out.weights = {
        n.removeprefix("model."): whole_tensor(engine.strategy, n, "weight").detach().cpu().clone()
        for n in engine.strategy.trained()
    }
    torch.distributed.barrier()
    del engine  # DDP's reducer must not be the last owner of a group of gloo
    context.close()
    return out


def model_of(folder: Path, **how: Any) -> Any:
    """transformers' model, in evaluation mode like all that have no dropout."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)


def adapted(model: Any, config: Any) -> Any:
    """PEFT's adapters, drawn from the run's seed: A of LoRA by name, where PEFT is not told how."""
    import peft

    torch.manual_seed(SEED)
    made = peft.get_peft_model(model, config).train()
    if config.peft_type == "LORA" and config.init_lora_weights is True:
        draw_lora_a(made, SEED)
    return made


def orthogonal(model: Any) -> Tensor:
    """What PEFT adds to a loss: it is the difference to the model's own."""
    ids = torch.arange(4, 20)[None]
    return model(ids, labels=ids).loss - model.get_base_model()(ids, labels=ids).loss


def plain(
    model: Any,
    extra: Callable[[Any], Tensor] | None = None,
    after: Callable[[int], None] = lambda step: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Result:
    """The loop as one writes it: loss over the labels of the global batch, clipping, AdamW."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = optimizer or adamw(named, RECIPE)
    out = Result()
    for k in range(STEPS):
        batches = global_batch(CASE, k)
        total, loss = sum(float(b.loss_weights.sum()) for b in batches), 0.0
        for batch in batches:
            for ids, labels, weights, _, _ in documents(batch):
                if not bool(weights.any()):
                    continue
                logits = model(input_ids=ids, use_cache=False).logits
                part = (cross_entropy(logits, labels) * weights).sum() / total
                part.backward()
                loss += float(part.detach())
        if extra is not None:
            extra(model).backward()
        out.losses.append(loss)
        out.norms.append(float(torch.nn.utils.clip_grad_norm_([p for _, p in named], RECIPE.max_grad_norm)))
        optimizer.step()
        after(k + 1)
        optimizer.zero_grad()
    out.weights = {n: p.detach().clone() for n, p in named}
    return out


def far(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """The largest difference, in units of each tensor's largest value."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())[:4]
    return max(float((got[n] - t).abs().max() / t.abs().max().clamp(min=1e-6)) for n, t in want.items())


def saved(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter folder."""
    return load_file(folder / "adapter_model.safetensors")


def logits_of(model: Any) -> Tensor:
    """Of the same tokens each time."""
    with torch.no_grad():
        found: Tensor = model.eval()(torch.arange(4, 40)[None]).logits
    return found
