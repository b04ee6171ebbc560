"""What the engine computes for one case, measured on its ranks.

Owns the rank side of the parity tests: build the engine on a layout, load the Hugging Face folder, gradients of the
first global batch, then one optimizer step per global batch. Rank 0 hands back full tensors by their names on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.losses.contract import FIELDS, Batch, Loss, LossTerm, ModelOutputs, Reported, RequestedModelOutputs
from megaswift.losses.mtp import MultiTokenPrediction
from megaswift.losses.sft import CrossEntropy
from tests.parity.cases import ROW, Case, global_batch, own
from tests.parity.oracle import Recipe, Reference

STEPS = 3


@dataclass(frozen=True)
class Task:
    """What the ranks get: a case, the model folder, the optimizer, and a fault to inject (self-check of the
    harness)."""

    case: Case
    folder: Path
    recipe: Recipe
    steps: int = STEPS
    fault: str = ""
    """`scale`: the loss x 1.00002; `mask`: one label is dropped; empty: none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More options of the configuration, by flat name."""
    batches: Sequence[Batch] = ()
    """What `score` scores: all ranks' micro-batches."""
    row: int = ROW
    """Tokens of a row that `train` takes, unless it is packed."""


@dataclass(frozen=True)
class ScaledLoss:
    """Cross-entropy with its sum scaled: a wrong objective that the comparison has to notice."""

    factor: float
    needs: RequestedModelOutputs = CrossEntropy().needs
    reported: Reported = CrossEntropy().reported

    def counts(self, batch: Batch) -> Any:
        """Those of cross-entropy."""
        return CrossEntropy().counts(batch)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Any]:
        """Cross-entropy's term, its sum scaled."""
        terms, metrics = CrossEntropy()(outputs, batch)
        return [replace(t, sum=t.sum * self.factor) for t in terms], metrics


MIX = {"logprobs": -1.0, "entropy": 0.3, "logsumexp": 0.1, "mean_logit": 0.5, "log_sum_sq": 0.2}
"""Weights of the fields in an objective that needs the gradient of each."""
TEMPERATURE = 0.7


@dataclass(frozen=True)
class MixedLoss:
    """A weighted sum of every differentiable output, at a temperature."""

    needs: RequestedModelOutputs = RequestedModelOutputs(fields=frozenset(FIELDS), temperature=TEMPERATURE)
    reported: Reported = Reported(("label_weight",), {"loss": "label_weight"})

    def counts(self, batch: Batch) -> Any:
        """Those of cross-entropy."""
        return CrossEntropy().counts(batch)

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> tuple[list[LossTerm], Any]:
        """One term."""
        mixed = sum(w * getattr(outputs, name) for name, w in MIX.items())
        return [LossTerm("loss", (mixed * batch.loss_weights).sum(), "label_weight")], {}


def build(case: Case, folder: Path, world: int, **options: Any) -> tuple[Any, Any]:
    """(engine with the folder's weights, context) on this rank."""
    from megaswift.config import SwiftConfig
    from megaswift.families import family_of
    from megaswift.parallel.layout import Layout
    from megaswift.run.engines import make_engine, start_context

    cfg = SwiftConfig(task="sft", model=str(folder), **case.config(**options))
    hf_config = json.loads((folder / "config.json").read_text())
    spec = family_of(hf_config).spec(hf_config)
    spec = replace(spec, features=replace(spec.features, mtp_layers=cfg.model.mtp_num_layers or 0))
    context = start_context(cfg.replace(ddp_timeout=600, seed=11), Layout.from_config(cfg.parallel, world))
    engine = make_engine(cfg, spec, folder, context)
    engine.load_hf(folder)
    return engine, context


def recipe_options(recipe: Recipe, moe: bool) -> dict[str, Any]:
    """The same optimizer as flat options."""
    options = {
        "learning_rate": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "adam_beta1": recipe.betas[0],
        "adam_beta2": recipe.betas[1],
        "adam_epsilon": recipe.eps,
        "max_grad_norm": recipe.max_grad_norm,
    }
    if recipe.mtp_layers:
        options |= {"mtp_num_layers": recipe.mtp_layers, "mtp_loss_scaling_factor": recipe.mtp_weight}
        options |= {"mtp_detach_heads": recipe.mtp_detach}
    if moe:
        options |= {"moe_aux_loss_coeff": recipe.aux_coeff, "moe_z_loss_coeff": recipe.z_coeff}
    return options


def full(pairs: Any) -> dict[str, Tensor]:
    """A stream of (name, tensor) as a dict of copies."""
    return {name: tensor.detach().to("cpu", torch.float32).clone() for name, tensor in pairs if tensor is not None}


def spoil(batches: list[Batch], fault: str) -> list[Batch]:
    """Drops one label of the last micro-batch when `fault` says so."""
    if fault != "mask":
        return batches
    weights = batches[-1].loss_weights.clone()
    weights.view(-1)[weights.view(-1).nonzero()[0]] = 0.0
    return [*batches[:-1], replace(batches[-1], loss_weights=weights)]


def train(rank: int, world: int, task: Task) -> Reference | None:
    """The engine's numbers; on rank 0 all of them, None elsewhere."""
    case = task.case
    engine, context = build(case, task.folder, world, **recipe_options(task.recipe, case.moe), **task.options)
    loss: Loss = ScaledLoss(1.00002) if task.fault == "scale" else CrossEntropy()
    layers = task.recipe.mtp_layers
    loss = MultiTokenPrediction(loss, layers, task.recipe.mtp_weight) if layers else loss
    mine = [
        own(spoil(global_batch(case, k, task.row), task.fault), case.dp, context.layout.coordinates(rank).dp)
        for k in range(task.steps)
    ]
    out = Reference()
    result = engine.accumulate(mine[0], loss)
    out.loss = result.loss
    out.gradients = full(engine.hf_gradients())
    for k in range(task.steps):
        result = engine.train_batch(mine[k], loss, task.recipe.lr)
        out.losses.append(result.loss)
        out.norms.append(result.grad_norm)
        out.mtp_losses.append([result.metrics[f"mtp_{n}_loss"] for n in range(1, layers + 1)])
        out.aux_steps.append(result.metrics.get("aux_loss", 0.0))
        out.z_steps.append(result.metrics.get("z_loss", 0.0))
    out.weights = full(
        engine.hf_weights() if task.options.get("train_type", "full") == "full" else engine.adapter_weights()
    )
    torch.distributed.barrier()
    context.close()
    return out if rank == 0 else None


@dataclass(frozen=True)
class Scored:
    """What one rank saw: its data-parallel index, the outputs per micro-batch, the evaluation, and on rank 0 weights,
    dtypes kept."""

    dp: int
    outputs: list[ModelOutputs]
    evaluated: float
    accuracy: float
    weights: dict[str, Tensor]


def score(rank: int, world: int, task: Task) -> Scored:
    """Outputs and evaluation of the task's batches, the outputs twice (nothing may change in between), and exported
    weights."""
    engine, context = build(task.case, task.folder, world, **task.options)
    dp = context.layout.coordinates(rank).dp
    mine = own(task.batches, task.case.dp, dp)
    needs = RequestedModelOutputs(fields=frozenset(FIELDS))
    first = engine.score(mine, needs)
    result = engine.evaluate(mine, CrossEntropy())
    second = engine.score(mine, needs)
    assert all(torch.equal(getattr(a, f), getattr(b, f)) for a, b in zip(first, second, strict=True) for f in FIELDS)
    weights = {name: tensor.cpu().clone() for name, tensor in engine.hf_weights() if tensor is not None}
    torch.distributed.barrier()
    context.close()
    return Scored(dp, list(first), result.loss, result.metrics["token_accuracy"], weights)


def mixed(rank: int, world: int, task: Task) -> Reference | None:
    """Loss and gradients of `MixedLoss` on the third global batch."""
    engine, context = build(task.case, task.folder, world, **recipe_options(task.recipe, task.case.moe))
    mine = own(global_batch(task.case, 2), task.case.dp, context.layout.coordinates(rank).dp)
    out = Reference(loss=engine.accumulate(mine, MixedLoss()).loss, gradients=full(engine.hf_gradients()))
    torch.distributed.barrier()
    context.close()
    return out if rank == 0 else None
