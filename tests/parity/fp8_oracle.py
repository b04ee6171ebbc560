"""A Hugging Face model whose linear layers multiply in FP8 by the plain torch reference (tests/te/fp8_reference.py).

Megatron-Core multiplies queries, keys and values by one weight, each group of heads together, and gate and up by
another: their operands are quantized together, so the oracle joins them too. The head is not quantized. On
tensor-parallel ranks each shard is quantized by itself (tests/te/fp8_shards.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaswift.losses.contract import Batch
from tests.parity.models import by_disk_name
from tests.parity.oracle import Oracle, Recipe, Reference, cross_entropy
from tests.te import fp8_reference
from tests.te.fp8_shards import column_parallel, row_parallel


@dataclass(frozen=True)
class Products:
    """How products are computed: by which recipe, on how many tensor-parallel ranks, and those of experts."""

    recipe: str
    hybrid: bool = True
    tp: int = 1
    etp: int = 1


class Joined:
    """Several linear layers of one input as a single column-parallel product; each part is asked for by its layer."""

    def __init__(self, layers: list[torch.nn.Linear], groups: int, ranks: int, recipe: fp8_reference.Recipe) -> None:
        self.layers, self.groups, self.ranks, self.recipe = layers, groups, ranks, recipe
        self.parts: list[Tensor] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """The output of one layer; the first to be asked computes all."""
        if index == 0:
            weights = [w.weight.unflatten(0, (self.groups, -1)) for w in self.layers]
            y = column_parallel(x, torch.cat(weights, 1).flatten(0, 1), self.ranks, self.recipe)
            sizes = [w.shape[1] for w in weights]
            self.parts = [t.flatten(-2) for t in y.unflatten(-1, (self.groups, -1)).split(sizes, -1)]
        return self.parts[index]


class Experts:
    """The experts of Qwen3-MoE one by one; every product of every expert has its own scales. Megatron-Core applies the
    router's weights before the second product."""

    def __init__(self, experts: Any, ranks: int, recipes: list[fp8_reference.Recipe]) -> None:
        self.experts, self.ranks, self.recipes = experts, ranks, recipes

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[t, h] of hidden [t, h], chosen experts [t, k] and their weights [t, k]."""
        out = torch.zeros_like(hidden)
        for e in range(self.experts.num_experts):
            token, place = (chosen == e).nonzero(as_tuple=True)
            # each rank has the same part of both
            both = self.experts.gate_up_proj[e].unflatten(0, (2, self.ranks, -1)).transpose(0, 1).flatten(0, 2)
            first = column_parallel(hidden[token], both, self.ranks, self.recipes[0], str(e))
            gate, up = (t.flatten(1) for t in first.unflatten(-1, (self.ranks, 2, -1)).unbind(2))
            inner = torch.nn.functional.silu(gate) * up * weights[token, place, None]
            second = row_parallel(inner, self.experts.down_proj[e], self.ranks, self.recipes[1], str(e))
            out = out.index_add(0, token, second)
        return out


def quantize(model: torch.nn.Module, products: Products) -> list[fp8_reference.Recipe]:
    """The decoder's linear layers, in place; returns each product's recipe. Megatron-Core's default of delayed scaling:
    a scale follows the pass before alone."""
    recipes: list[fp8_reference.Recipe] = []

    def recipe() -> fp8_reference.Recipe:
        recipes.append(fp8_reference.Recipe(products.recipe, products.hybrid, length=1))
        return recipes[-1]

    def split_rows(linears: list[Any], groups: int) -> None:
        joined = Joined(linears, groups, products.tp, recipe())
        for index, linear in enumerate(linears):
            linear.forward = lambda x, index=index: joined.part(x, index)

    def split_columns(linear: Any) -> None:
        own = recipe()
        linear.forward = lambda x: row_parallel(x, linear.weight, products.tp, own)

    for layer in model.model.layers:  # type: ignore[union-attr]
        attention, mlp = layer.self_attn, layer.mlp  # type: ignore[union-attr]
        split_rows([attention.q_proj, attention.k_proj, attention.v_proj], model.config.num_key_value_heads)  # type: ignore[union-attr]
        split_columns(attention.o_proj)
        if hasattr(mlp, "experts"):
            mlp.experts.forward = Experts(mlp.experts, products.etp, [recipe(), recipe()])
        else:
            split_rows([mlp.gate_proj, mlp.up_proj], products.tp)
            split_columns(mlp.down_proj)
    return recipes


def inputs_of(batch: Batch) -> dict[str, Any]:
    """Arguments of the model; padding at a row's end is computed as any token."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    if batch.cu_seqlens is not None:
        document = torch.bucketize(torch.arange(batch.input_ids.shape[1]), batch.cu_seqlens[1:], right=True)
        seen = (document[:, None] == document[None]).tril()
        hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        inputs |= {"position_ids": batch.positions, "attention_mask": hidden[None, None]}
    return inputs


def reference(folder: Path, passes: Sequence[Sequence[Batch]], products: Products | None) -> Reference:
    """Loss and gradients of the last of several passes over unchanged weights, each of one row a data-parallel rank;
    without `products` the layers are as they are."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    recipes = quantize(model, products) if products else []
    for batches in passes:
        model.zero_grad()
        total, loss = sum(float(b.loss_weights.sum()) for b in batches), 0.0
        for batch in batches:
            losses = cross_entropy(model(**inputs_of(batch)).logits, batch.labels)
            part = (losses * batch.loss_weights).sum() / total
            part.backward()
            loss += part.item()
        for recipe in recipes:
            recipe.end_step()
    grads = {n: g.clone() for n, g in by_disk_name(model, lambda p: p.grad if p.grad is not None else p)}
    return Reference(loss=loss, gradients=grads)


def trajectory(
    folder: Path, steps: Sequence[Sequence[Batch]], optimizer: Recipe, products: Products | None
) -> Reference:
    """Losses, gradient norms and weights of optimizer steps, for recipes whose scales do not depend on earlier
    steps."""
    oracle = Oracle(folder, optimizer, "eager")
    if products:
        assert products.recipe != "delayed"
        quantize(oracle.model, products)
    return oracle.trajectory(steps)
